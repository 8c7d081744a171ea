"""Ranges of positions: which to read, which are superseded, which to merge. No files, no Spark."""

from hypothesis import given
from hypothesis import strategies as st

from purveyor.pipeline.archive.layout import (
    PositionRange,
    end_position,
    parse_range,
    parse_snapshot,
    select_ranges,
    superseded,
)
from purveyor.pipeline.archive.maintenance import SizedRange, next_merge

RANGES = st.lists(
    st.builds(lambda first, length: PositionRange(first, first + length), st.integers(1, 40), st.integers(0, 20))
)


@given(RANGES, st.integers(1, 60), st.integers(1, 60))
def test_each_position_is_read_from_one_range(ranges: list[PositionRange], first: int, last: int) -> None:
    pieces = select_ranges(ranges, first, last)
    read = [position for piece in pieces for position in range(piece.first, piece.last + 1)]
    there = {position for each in ranges for position in range(each.first, each.last + 1)}
    assert read == sorted(there & set(range(first, last + 1)))
    assert all(piece.range.first <= piece.first and piece.last <= piece.range.last for piece in pieces)


@given(RANGES)
def test_without_the_superseded_ranges_nothing_is_missing(ranges: list[PositionRange]) -> None:
    left = [each for each in set(ranges) if each not in superseded(ranges)]
    positions = [
        {position for each in some for position in range(each.first, each.last + 1)} for some in (ranges, left)
    ]
    assert positions[0] == positions[1]
    assert end_position(left) == end_position(ranges)


def test_names_that_are_not_ranges_are_ignored() -> None:
    good = PositionRange(1, 2).name
    assert parse_range(good) == PositionRange(1, 2)
    others = ["", ".draft-1", "_SUCCESS", good + "x", "1-2", PositionRange(5, 4).name, PositionRange(0, 4).name]
    assert [parse_range(name) for name in others] == [None] * len(others)
    assert [parse_snapshot(name) for name in (f"{7:020}", "7", ".draft-1")] == [7, None, None]


def merge_all(sized_ranges: list[int], *, fan_in: int, file_bytes: int) -> tuple[list[int], int]:
    """The sizes that compaction ends with, and how many bytes it has rewritten."""
    ranges = [SizedRange(PositionRange(number, number), size) for number, size in enumerate(sized_ranges, 1)]
    rewritten = 0
    while parts := next_merge(ranges, fan_in=fan_in, file_bytes=file_bytes):
        at = next(number for number, each in enumerate(ranges) if each.range == parts[0])
        together = ranges[at : at + len(parts)]
        assert [each.range for each in together] == parts
        assert len(parts) > 1
        size = sum(each.size for each in together)
        ranges[at : at + len(parts)] = [SizedRange(PositionRange(parts[0].first, parts[-1].last), size)]
        rewritten += size
    return [each.size for each in ranges], rewritten


@given(st.lists(st.integers(1_000, 3_000_000), max_size=300))
def test_compaction_ends_with_few_ranges_and_rewrites_little(sized_ranges: list[int]) -> None:
    left, rewritten = merge_all(sized_ranges, fan_in=4, file_bytes=16 << 20)
    full = sum(sized_ranges) // (16 << 20)
    tiers = 6
    assert len(left) <= 2 * full + (4 - 1) * tiers * (full + 1)
    assert sum(left) == sum(sized_ranges)
    assert rewritten <= sum(sized_ranges) * 2 * tiers


def test_two_ranges_that_do_not_touch_are_not_merged() -> None:
    apart = [SizedRange(PositionRange(number * 2, number * 2), 10) for number in range(1, 20)]
    assert next_merge(apart, fan_in=4) == []

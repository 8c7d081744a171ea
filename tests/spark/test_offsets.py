"""The rules of positions: ranges are covered exactly, limits hold, nothing lost goes uncounted or counts twice."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purveyor.model.errors import DataLost
from purveyor.spark.offsets import (
    ROWS_PER_PARTITION,
    Offset,
    SequenceRange,
    StreamView,
    advance,
    check_identity,
    loss,
    lost_range,
    split,
)

CREATED = "2026-01-01T00:00:00Z"
positions = st.integers(0, 1_000_000)


def at(sequence: int, lost: int = 0) -> Offset:
    return Offset("S", CREATED, sequence, lost)


@st.composite
def views(draw: st.DrawFn) -> StreamView:
    first = draw(st.integers(1, 2000))
    messages = draw(st.integers(0, 2000))
    gaps = draw(st.integers(0, 50)) if messages > 1 else 0
    last = first + messages + gaps - 1
    return StreamView("S", CREATED, first, max(last, 0), messages)


@given(st.integers(1, 10**12), st.integers(-5, 10**6), st.integers(1, 500))
def test_split_covers_exactly_in_order_with_even_pieces(first: int, count: int, at_least: int) -> None:
    pieces = split(first, first + count - 1, at_least)
    if count <= 0:
        assert pieces == []
        return
    assert pieces[0].first == first
    assert pieces[-1].last == first + count - 1
    assert all(left.last + 1 == right.first for left, right in pairwise(pieces))
    sizes = {piece.last - piece.first + 1 for piece in pieces}
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= 1.5 * ROWS_PER_PARTITION + 1
    assert len(pieces) == 1 or count > ROWS_PER_PARTITION or at_least > 1
    assert len(pieces) >= min(at_least, count)


@given(st.integers(1, 10**9), st.integers(1, 10**9), st.integers(1, 50), st.integers(0, 10**6))
def test_a_sparse_range_is_not_cut_into_empty_tasks(first: int, count: int, at_least: int, rows: int) -> None:
    pieces = split(first, first + count - 1, at_least, most_rows=rows)
    assert (pieces[0].first, pieces[-1].last) == (first, first + count - 1)
    assert all(left.last + 1 == right.first for left, right in pairwise(pieces))
    assert len(pieces) <= max(at_least, rows // ROWS_PER_PARTITION + 1)


@given(positions, positions)
def test_an_offset_survives_the_checkpoint(sequence: int, lost: int) -> None:
    offset = at(sequence, lost)
    assert Offset.from_json(json.loads(json.dumps(offset.to_json()))) == offset


def test_an_offset_of_before_losses_were_counted_is_read() -> None:
    assert Offset.from_json({"stream": "S", "created": CREATED, "sequence": 7}) == at(7)


@given(st.integers(0, 5000), views(), st.none() | st.integers(1, 100), st.none() | st.integers(0, 5000))
def test_advance_keeps_its_limits(start: int, view: StreamView, most: int | None, stop: int | None) -> None:
    begin = at(start, 3)
    end = advance(begin, view, max_offsets=most, stop_at=stop)
    assert end.sequence >= begin.sequence
    assert end.lost >= begin.lost
    assert end == begin or end.sequence <= min(view.last, view.last if stop is None else stop)
    skipped = end.lost - begin.lost
    taken = end.sequence - begin.sequence - skipped
    assert taken >= 0
    if most is not None:
        assert taken <= most
    if taken:
        assert begin.sequence + skipped + 1 >= min(view.begins, begin.sequence + 1)


@given(st.integers(0, 3000), views(), st.integers(1, 100), st.none() | st.integers(0, 5000))
def test_batches_to_the_end_take_every_sequence_once(start: int, view: StreamView, most: int, stop: int | None) -> None:
    """Taken or lost, none twice, none left out; what is lost is what the stream no longer has."""
    here = at(start)
    taken: list[int] = []
    while (there := advance(here, view, max_offsets=most, stop_at=stop)) != here:
        skipped = there.lost - here.lost
        taken += range(here.sequence + skipped + 1, there.sequence + 1)
        here = there
    end = view.last if stop is None else min(view.last, stop)
    wanted = range(start + 1, end + 1)
    assert taken == [sequence for sequence in wanted if sequence >= view.begins]
    assert here.lost == sum(1 for sequence in wanted if sequence < view.begins)


@given(st.integers(0, 5000), views())
def test_the_lost_range_is_what_lies_between_the_offset_and_the_stream(start: int, view: StreamView) -> None:
    gone = lost_range(at(start), view)
    missing = list(range(start + 1, view.begins))
    assert (list(range(gone.first, gone.last + 1)) if gone else []) == missing


def test_a_stream_that_sheds_what_was_not_asked_for_tells_no_loss() -> None:
    view = StreamView("S", CREATED, first=50, last=60, messages=11, sheds_others=True)
    assert lost_range(at(10), view) is None
    assert advance(at(10), view, max_offsets=5, stop_at=None) == at(15)


def test_the_error_names_range_stream_and_what_to_do() -> None:
    error = loss(StreamView("S", CREATED, 10, 20, 11), SequenceRange(5, 9))
    assert isinstance(error, DataLost)
    assert "sequences 5 to 9 of stream 'S'" in str(error)
    assert "failOnDataLoss" in str(error)


def test_a_stream_made_again_is_told_with_both_times() -> None:
    check_identity(at(5), StreamView("S", CREATED, 1, 5, 5))
    with pytest.raises(DataLost) as caught:
        check_identity(at(5), StreamView("S", "2026-02-02T00:00:00Z", 1, 5, 5))
    assert CREATED in str(caught.value)
    assert "2026-02-02T00:00:00Z" in str(caught.value)
    assert "new checkpoint" in str(caught.value)

"""Rules of offsets: ranges are covered exactly, limits hold, losses count once, batches get the wanted length."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purveyor.model.errors import DataLost
from purveyor.spark.offsets import (
    FIRST_BATCH_ROWS,
    ROWS_PER_PARTITION,
    SMALLEST_BATCH_ROWS,
    BatchSizer,
    Offset,
    SequenceRange,
    StreamView,
    check_identity,
    data_lost_error,
    lost_range,
    next_end,
    split_range,
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
def test_split_range_covers_exactly_in_order_with_even_pieces(first: int, count: int, at_least: int) -> None:
    pieces = split_range(first, first + count - 1, at_least)
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
    pieces = split_range(first, first + count - 1, at_least, max_rows=rows)
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
def test_next_end_keeps_its_limits(start: int, view: StreamView, most: int | None, stop: int | None) -> None:
    begin = at(start, 3)
    end = next_end(begin, view, max_offsets=most, stop_at=stop)
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
    while (there := next_end(here, view, max_offsets=most, stop_at=stop)) != here:
        skipped = there.lost - here.lost
        taken += range(here.sequence + skipped + 1, there.sequence + 1)
        here = there
    end = view.last if stop is None else min(view.last, stop)
    wanted = range(start + 1, end + 1)
    assert taken == [sequence for sequence in wanted if sequence >= view.begins]
    assert here.lost == sum(1 for sequence in wanted if sequence < view.begins)


@given(st.integers(0, 5000), views())
def test_the_lost_range_is_between_the_offset_and_the_stream(start: int, view: StreamView) -> None:
    gone = lost_range(at(start), view)
    missing = list(range(start + 1, view.begins))
    assert (list(range(gone.first, gone.last + 1)) if gone else []) == missing


def test_a_stream_that_drops_other_subjects_reports_no_loss() -> None:
    view = StreamView("S", CREATED, first=50, last=60, messages=11, drops_other_subjects=True)
    assert lost_range(at(10), view) is None
    assert next_end(at(10), view, max_offsets=5, stop_at=None) == at(15)


def test_the_error_names_range_stream_and_what_to_do() -> None:
    error = data_lost_error(StreamView("S", CREATED, 10, 20, 11), SequenceRange(5, 9))
    assert isinstance(error, DataLost)
    assert "sequences 5 to 9 of stream 'S'" in str(error)
    assert "failOnDataLoss" in str(error)


def test_a_stream_created_again_is_an_error_with_both_times() -> None:
    check_identity(at(5), StreamView("S", CREATED, 1, 5, 5))
    with pytest.raises(DataLost) as caught:
        check_identity(at(5), StreamView("S", "2026-02-02T00:00:00Z", 1, 5, 5))
    assert CREATED in str(caught.value)
    assert "2026-02-02T00:00:00Z" in str(caught.value)
    assert "new checkpoint" in str(caught.value)


MOST = 500_000


def run(
    sizer: BatchSizer, seconds_per_row: float, batches: int, *, start_seconds: float = 0.0
) -> list[tuple[int, float]]:
    """Full batches one after the other: how large each is, and how long it takes."""
    now, done = 0.0, []
    for _ in range(batches):
        rows = sizer.limit(now)
        sizer.begin(rows, now)
        took = start_seconds + rows * seconds_per_row
        now += took
        done.append((rows, took))
    return done


@given(st.floats(1e-7, 1.0), st.floats(0.0, 0.5), st.integers(1, MOST))
def test_batches_come_to_take_as_long_as_wanted(cost: float, start: float, most: int) -> None:
    done = run(BatchSizer(5.0, most), cost, 30, start_seconds=start)
    rows, took = done[-1]
    assert all(1 <= each <= most for each, _ in done)
    assert rows in (min(most, SMALLEST_BATCH_ROWS), most) or took == pytest.approx(5.0, rel=0.2)


def test_a_batch_is_never_far_from_the_one_before() -> None:
    sizes = [rows for rows, _ in run(BatchSizer(5.0, MOST), 1e-7, 4)]
    assert sizes == [FIRST_BATCH_ROWS, 4 * FIRST_BATCH_ROWS, 16 * FIRST_BATCH_ROWS, MOST]
    shrinking = BatchSizer(5.0, MOST)
    run(shrinking, 1e-6, 6)
    assert [rows for rows, _ in run(shrinking, 1.0, 3)] == [MOST, MOST // 4, MOST // 16]


def test_what_is_not_full_changes_nothing() -> None:
    sizer = BatchSizer(5.0, MOST)
    sizer.begin(FIRST_BATCH_ROWS - 1, 0.0)
    assert sizer.limit(1000.0) == FIRST_BATCH_ROWS
    assert sizer.limit(2000.0) == FIRST_BATCH_ROWS

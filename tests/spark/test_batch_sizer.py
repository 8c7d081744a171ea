"""Batches come to take as long as wanted, whatever a row costs, and one that is not full says nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purveyor.spark.batch_sizer import FIRST, LEAST, Pace

MOST = 500_000


def run(pace: Pace, seconds_per_row: float, batches: int, *, start_seconds: float = 0.0) -> list[tuple[int, float]]:
    """Full batches one after the other: how large each is, and how long it takes."""
    now, done = 0.0, []
    for _ in range(batches):
        rows = pace.limit(now)
        pace.begin(rows, now)
        took = start_seconds + rows * seconds_per_row
        now += took
        done.append((rows, took))
    return done


@given(st.floats(1e-7, 1.0), st.floats(0.0, 0.5), st.integers(1, MOST))
def test_batches_come_to_take_as_long_as_wanted(cost: float, start: float, most: int) -> None:
    done = run(Pace(5.0, most), cost, 30, start_seconds=start)
    rows, took = done[-1]
    assert all(1 <= each <= most for each, _ in done)
    assert rows in (min(most, LEAST), most) or took == pytest.approx(5.0, rel=0.2)


def test_a_batch_is_never_far_from_the_one_before() -> None:
    sizes = [rows for rows, _ in run(Pace(5.0, MOST), 1e-7, 4)]
    assert sizes == [FIRST, 4 * FIRST, 16 * FIRST, MOST]
    shrinking = Pace(5.0, MOST)
    run(shrinking, 1e-6, 6)
    assert [rows for rows, _ in run(shrinking, 1.0, 3)] == [MOST, MOST // 4, MOST // 16]


def test_what_is_not_full_changes_nothing() -> None:
    pace = Pace(5.0, MOST)
    pace.begin(FIRST - 1, 0.0)
    assert pace.limit(1000.0) == FIRST
    assert pace.limit(2000.0) == FIRST

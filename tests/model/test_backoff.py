"""Delays double from the first to the longest, and jitter only shortens them."""

from hypothesis import given
from hypothesis import strategies as st

from purveyor.model.backoff import Backoff, RetryDelays, random_jitter


@given(st.floats(0.001, 100), st.floats(100, 1e6), st.integers(1, 100_000), st.floats(0, 1))
def test_a_delay_stays_within_its_limits(first: float, longest: float, failures: int, jitter: float) -> None:
    backoff = Backoff(first, longest)
    whole = backoff.delay_seconds(failures)
    assert first <= whole <= longest
    assert whole / 2 <= backoff.delay_seconds(failures, jitter=jitter) <= whole


def test_retry_delays_grow_and_begin_again_after_a_success() -> None:
    delays = RetryDelays(Backoff(1.0, 8.0))
    assert [delays.next_seconds() for _ in range(6)] == [1, 2, 4, 8, 8, 8]
    delays.reset()
    assert delays.next_seconds() == 1
    assert 1 <= delays.next_seconds(jitter=random_jitter()) <= 2


def test_no_failure_needs_no_delay() -> None:
    assert Backoff(1.0).delay_seconds(0) == 0

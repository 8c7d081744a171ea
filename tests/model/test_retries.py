"""The delays between attempts, and the restart rule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purveyor.model.errors import InvalidConfig
from purveyor.model.retries import (
    Backoff,
    GiveUp,
    RestartAfter,
    RestartPolicy,
    Restarts,
    RetryDelays,
    RunEnd,
    random_jitter,
)

POLICY = RestartPolicy(max_deaths=4, window_seconds=60, first_pause_seconds=1, max_pause_seconds=3)
UNLIMITED = RestartPolicy(max_deaths=None, window_seconds=60, first_pause_seconds=1, max_pause_seconds=5)


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


def decide(policy: RestartPolicy, deaths: list[float]) -> list[RestartAfter | GiveUp]:
    """Decide after each of these deaths; each run begins at the death before it."""
    restarts, before = Restarts(policy), 0.0
    decisions = []
    for now in deaths:
        decisions.append(restarts.decide(RunEnd(ran_seconds=now - before), now))
        before = now
    return decisions


def test_pauses_grow_to_a_limit() -> None:
    assert decide(POLICY, [0.0, 1.0, 2.0]) == [RestartAfter(1), RestartAfter(2), RestartAfter(3)]


def test_pauses_begin_again_after_a_healthy_run() -> None:
    deaths = [1.0, 2.0, 3.0, 4.0, 94.0, 95.0]
    assert decide(UNLIMITED, deaths) == [RestartAfter(pause) for pause in (1, 2, 4, 5, 1, 2)]
    assert decide(UNLIMITED, [float(second) for second in range(2000)])[-1] == RestartAfter(5)


def test_too_many_deaths_in_the_window_end_it() -> None:
    assert decide(POLICY, [0.0, 1.0, 2.0, 60.0])[-1] == GiveUp(4)


def test_deaths_before_the_window_do_not_end_it() -> None:
    assert decide(POLICY, [0.0, 1.0, 2.0, 61.5])[-1] == RestartAfter(3)
    assert decide(POLICY, [0.0, 1.0, 2.0, 62.5])[-1] == RestartAfter(1)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30))
def test_a_server_that_dies_rarely_is_always_restarted(times: list[float]) -> None:
    rare = [death + index * (POLICY.window_seconds + 1) for index, death in enumerate(sorted(times), start=1)]
    assert set(decide(POLICY, rare)) == {RestartAfter(POLICY.first_pause_seconds)}


def test_a_process_that_exits_with_an_error_before_it_was_ever_ready_is_given_up() -> None:
    never_ready = RunEnd(ran_seconds=1, was_ready=False, exit_code=1)
    assert Restarts(UNLIMITED).decide(never_ready, 1) == GiveUp(1)
    killed = RunEnd(ran_seconds=1, was_ready=False, exit_code=-9)
    assert isinstance(Restarts(UNLIMITED).decide(killed, 1), RestartAfter)
    restarts = Restarts(UNLIMITED)
    restarts.decide(RunEnd(ran_seconds=1, was_ready=True, exit_code=1), 1)
    assert restarts.decide(never_ready, 2) == RestartAfter(2)


def test_a_permanent_error_is_given_up_at_once() -> None:
    assert Restarts(UNLIMITED).decide(RunEnd(ran_seconds=90, is_permanent=True), 90) == GiveUp(1)


@pytest.mark.parametrize("wrong", [{"max_deaths": 0}, {"window_seconds": -1.0}, {"max_pause_seconds": -1.0}])
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidConfig):
        RestartPolicy(**wrong)  # type: ignore[arg-type]  # wrong on purpose

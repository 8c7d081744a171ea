"""The restart rule: a run that ends is followed by another after a growing pause, unless that cannot help."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purveyor.model.errors import InvalidConfig
from purveyor.model.restarts import GiveUp, RestartAfter, RestartPolicy, Restarts, RunEnd

POLICY = RestartPolicy(max_deaths=4, window_seconds=60, first_pause_seconds=1, max_pause_seconds=3)
UNLIMITED = RestartPolicy(max_deaths=None, window_seconds=60, first_pause_seconds=1, max_pause_seconds=5)


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

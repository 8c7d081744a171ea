"""A dead server comes back with growing pauses, and a hopeless one is left alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purveyor.jetstream.server.restart_policy import GiveUp, RestartAfter, RestartPolicy, decide
from purveyor.model.errors import InvalidConfig

POLICY = RestartPolicy(max_deaths=4, window_seconds=60, first_pause_seconds=1, max_pause_seconds=3)


def test_pauses_grow_to_a_limit() -> None:
    assert [decide(POLICY, [0.0, 1.0, 2.0][: count + 1]) for count in range(3)] == [
        RestartAfter(1),
        RestartAfter(2),
        RestartAfter(3),
    ]


def test_too_many_deaths_in_the_window_end_it() -> None:
    assert decide(POLICY, [0.0, 1.0, 2.0, 60.0]) == GiveUp(4)


def test_deaths_before_the_window_are_forgotten() -> None:
    assert decide(POLICY, [0.0, 1.0, 2.0, 61.5]) == RestartAfter(2)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30))
def test_a_server_that_dies_rarely_is_always_restarted(times: list[float]) -> None:
    rare = [death + index * (POLICY.window_seconds + 1) for index, death in enumerate(sorted(times))]
    assert decide(POLICY, rare) == RestartAfter(POLICY.first_pause_seconds)


@pytest.mark.parametrize("wrong", [{"max_deaths": 0}, {"window_seconds": -1.0}, {"max_pause_seconds": -1.0}])
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidConfig):
        RestartPolicy(**wrong)  # type: ignore[arg-type]  # wrong on purpose

"""Rates, times without change, and plots, in little memory."""

import itertools
import random

import pytest

from purveyor.app.console.time_series import RETENTION_SECONDS, History, Series, rates


def test_a_rate_is_what_was_added_in_the_last_seconds() -> None:
    series = Series()
    for second in range(0, 60, 2):
        series.add(second, second * 5)
    assert series.rate(58.0) == pytest.approx(5.0)
    for second in range(60, 90, 2):
        series.add(second, 290)
    assert series.rate(88.0) == 0
    assert series.still_seconds(88.0) == pytest.approx(28.0, abs=3)


def test_a_number_that_goes_back_is_no_negative_rate() -> None:
    series = Series()
    for second, value in ((0, 100), (5, 100), (10, 3)):
        series.add(second, value)
    assert series.rate(10.0) == 0


def test_one_point_has_no_rate() -> None:
    series = Series()
    assert series.rate(1.0) is None
    series.add(1.0, 7)
    assert series.rate(1.0) is None
    assert series.at(0.0) == 7


def test_an_idle_series_costs_two_points_and_a_busy_one_an_hour() -> None:
    idle, busy = Series(), Series()
    for look in range(5000):
        idle.add(look * 2, 3)
        busy.add(look * 2, look)
    assert len(idle.points()) == 2
    assert len(busy.points()) <= RETENTION_SECONDS / 8 + 3


def test_the_moment_when_a_sequence_came_is_known() -> None:
    series = Series()
    for second in range(0, 100, 10):
        series.add(second, second // 10)
    assert series.first_reached(5) == pytest.approx(50, abs=10)
    assert series.first_reached(0) is None  # it was there before we looked
    assert series.first_reached(50) is None


def test_what_is_gone_is_forgotten() -> None:
    history = History()
    history.add(1, {("last", "ox"): 1, ("last", "ux"): 1})
    history.add(2, {("last", "ux"): 2})
    assert history.of("last", "ox").points() == []
    assert len(history.of("last", "ux").points()) == 2


def test_values_between_points_are_interpolated() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    series, value, at = Series(), 0, 0.0
    for _ in range(300):
        at += draw.random() * 6
        value += draw.choice((0, 0, 1, 100))
        series.add(at, value)
    found = [series.at(at * share / 50) for share in range(51)]
    assert all(a is not None and b is not None and a <= b for a, b in itertools.pairwise(found))


def test_a_plot_is_empty_before_the_first_point() -> None:
    found = rates([(100.0, 0.0), (130.0, 30.0)], 10.0, 50.0, 130.0)
    assert [rate for _, rate in found] == [None, None, None, None, 0.0, 1.0, 1.0, 1.0]

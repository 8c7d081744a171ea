"""One step ahead: the same items, the same errors, and nobody left behind who makes more."""

import threading
from collections.abc import Iterator

import pytest

from purveyor.spark.read_ahead import read_ahead


def test_items_come_in_their_order() -> None:
    assert list(read_ahead(iter(range(1000)), most=3)) == list(range(1000))


def test_the_next_item_is_made_while_one_is_worked_on() -> None:
    second = threading.Event()

    def items() -> Iterator[int]:
        yield 1
        second.set()
        yield 2

    taken = read_ahead(items())
    assert next(taken) == 1
    assert second.wait(120), "the second item is made though nobody asked for it yet"
    assert list(taken) == [2]


def test_an_error_comes_behind_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("broken")

    taken = read_ahead(items())
    assert next(taken) == 1
    with pytest.raises(ValueError, match="broken"):
        next(taken)


def test_who_stops_reading_stops_the_making() -> None:
    ended = threading.Event()

    def items() -> Iterator[int]:
        try:
            number = 0
            while True:
                yield (number := number + 1)
        finally:
            ended.set()

    taken = read_ahead(items())
    assert next(taken) == 1
    taken.close()  # type: ignore[attr-defined]  # a generator
    assert ended.wait(120)

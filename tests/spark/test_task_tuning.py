"""Tuning of Python workers: items are read ahead in order, and the collector skips imports but not garbage."""

import gc
import threading
from collections.abc import Iterator

import pyarrow as pa
import pytest

from purveyor.spark.pyspark_internals import ArrowFunction, map_in_arrow
from purveyor.spark.task_tuning import read_ahead
from tests.support.broker import Broker
from tests.support.spark_session import Read
from tests.support.waiting import PATIENCE_SECONDS


def test_items_come_in_their_order() -> None:
    assert list(read_ahead(iter(range(1000)), waiting=3)) == list(range(1000))


def test_the_next_item_is_prepared_during_the_current_one() -> None:
    second = threading.Event()

    def items() -> Iterator[int]:
        yield 1
        second.set()
        yield 2

    taken = read_ahead(items())
    assert next(taken) == 1
    assert second.wait(PATIENCE_SECONDS), "the second item is prepared before the reader asks for it"
    assert list(taken) == [2]


def test_an_error_comes_behind_the_items_before_it() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise ValueError("broken")

    taken = read_ahead(items())
    assert next(taken) == 1
    with pytest.raises(ValueError, match="broken"):
        next(taken)


def test_the_thread_ends_when_the_reader_stops() -> None:
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
    assert ended.wait(PATIENCE_SECONDS)


SPARED = "spared bigint, looked_at bigint, garbage bigint"


def counter() -> ArrowFunction:
    """A function that goes to the workers as it is: they do not have this module."""

    class Knot:
        """Garbage that only the collector finds."""

        def __init__(self) -> None:
            self.myself = self

    def count(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        objects = gc.get_objects()
        knots = sum(type(each).__name__ == "Knot" for each in objects)
        Knot()
        columns = [[gc.get_freeze_count()], [len(objects)], [knots]]
        yield pa.RecordBatch.from_arrays([pa.array(each) for each in columns], ["spared", "looked_at", "garbage"])

    return count


def test_the_collector_skips_imports_but_not_garbage(broker: Broker, read: Read, unique: str) -> None:
    stream = broker.make(unique)
    broker.numbers(stream, 1, 3)
    seen = [
        map_in_arrow(read(stream).select("data"), counter(), SPARED).collect()[0]
        for _ in range(6)  # the same workers are used again
    ]
    assert all(row.spared > 20_000 for row in seen)
    assert seen[-1].looked_at < seen[-1].spared / 20  # nor what a task has imported while it ran
    assert all(row.garbage <= 1 for row in seen)

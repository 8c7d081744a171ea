"""Python workers of Spark: what they imported is not looked at after each task, and their garbage still is."""

import gc
from collections.abc import Iterator

import pyarrow as pa

from purveyor.spark.map_in_arrow import Mapping, map_in_arrow
from tests.spark.broker import Broker
from tests.spark.conftest import Read

SPARED = "spared bigint, looked_at bigint, garbage bigint"


def counter() -> Mapping:
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


def test_what_was_imported_is_spared_and_garbage_is_not(broker: Broker, read: Read, unique: str) -> None:
    stream = broker.make(unique)
    broker.numbers(stream, 1, 3)
    seen = [
        map_in_arrow(read(stream).select("data"), counter(), SPARED).collect()[0]
        for _ in range(6)  # the same workers are used again
    ]
    assert all(row.spared > 20_000 for row in seen)
    assert seen[-1].looked_at < seen[-1].spared / 20  # nor what a task has imported while it ran
    assert all(row.garbage <= 1 for row in seen)

"""The directory of one source in Spark's state: what runs on an executor for each batch of its messages.

The state is versioned with the batches. A batch that failed and is run again begins with the state of the batch before
it, so the old object of an event is the true one, whatever was written by the attempt that failed.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import MapState, StatefulProcessor, StatefulProcessorHandle, ValueState
from pyspark.sql.types import BinaryType, LongType, StructField, StructType

from purveyor.model.errors import DataLost, Unavailable
from purveyor.pipeline.transform.directory_pages import PagedDirectory
from purveyor.pipeline.transform.record_transform import Output, Rules, transform
from purveyor.pipeline.transform.row_chunks import pack_outputs, unpack

OUTPUT_ROW = StructType([StructField("chunk", BinaryType())])
_NUMBER = StructType([StructField("number", LongType())])
_BYTES = StructType([StructField("data", BinaryType())])


T = TypeVar("T")


def _asked(call: Callable[..., T], *values: object) -> T:
    """Spark's answer. Its errors are told apart from those of the rules: no message is to blame for them."""
    try:
        return call(*values)
    except Exception as error:
        raise Unavailable(f"the state of the directory cannot be used: {error!r}") from error


class StatePages:
    """Pages in the state of one key."""

    def __init__(self, index: ValueState, pages: MapState) -> None:
        self._index = index
        self._pages = pages

    def read_index(self) -> bytes | None:
        """The index, if there was ever one."""
        found = _asked(self._index.get)
        return None if found is None else bytes(found[0])

    def write_index(self, data: bytes) -> None:
        """Keep the index."""
        _asked(self._index.update, (data,))

    def read(self, number: int) -> bytes:
        """A page that is in the index."""
        found = _asked(self._pages.getValue, (number,))
        if found is None:
            raise DataLost(f"page {number} of the directory is missing in the state", fix="bring its checkpoint back")
        return bytes(found[0])

    def write(self, number: int, data: bytes) -> None:
        """Keep a page."""
        _asked(self._pages.updateValue, (number,), (data,))

    def remove(self, number: int) -> None:
        """Forget a page, if it was ever kept."""
        _asked(self._pages.removeKey, (number,))


class DirectoryProcessor(StatefulProcessor):
    """Applies the messages of a source to its directory, in order, and puts out what is to be written."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._index: ValueState
        self._pages: MapState

    def init(self, handle: StatefulProcessorHandle) -> None:
        """The state of a source: the index of its pages, and the pages."""
        self._index = handle.getValueState("index", _BYTES)
        self._pages = handle.getMapState("pages", _NUMBER, _BYTES)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:  # noqa: N802, N803 - Spark's
        """One batch of one source. The shuffle does not keep the order of the chunks: it is restored here."""
        del key, timerValues
        directory = PagedDirectory(StatePages(self._index, self._pages))
        for row in sorted(rows, key=lambda each: int(each.first)):
            outputs: list[Output] = []
            for message in unpack(bytes(row.chunk)):
                outputs += transform(directory, self._rules, message)
            for chunk in pack_outputs(outputs):
                yield Row(chunk=chunk)
        directory.flush()

    def close(self) -> None:
        """Nothing to do: the state belongs to Spark."""

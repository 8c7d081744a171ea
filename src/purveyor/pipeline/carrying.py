"""The headers of copies, for all rows at once: what an event's message carries along, and what is said of it. Pure.

Those of the server and those that a copy got on its way stay behind; the id of the event becomes `Purveyor-Id`, because
a copy has a message id of its own.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from purveyor.queues.bulk.headers import TYPE as HEADERS
from purveyor.queues.headers import EVENT_ID, MSG_ID

_LEFT_BEHIND: Final = ("nats-", "purveyor-")


def carried(headers: Any) -> Any:
    """The headers that go along."""
    per_row = headers.offsets.to_numpy().astype(np.int64)
    start, end = int(per_row[0]), int(per_row[-1])
    encoded = headers.keys.slice(start, end - start).dictionary_encode()
    renamed = [_renamed(name) for name in encoded.dictionary.to_pylist()]
    names = pa.array(renamed, pa.string()).take(encoded.indices)
    kept = pc.is_valid(names)
    counts = np.concatenate((np.zeros(1, np.int64), np.cumsum(kept.to_numpy(zero_copy_only=False))))
    offsets = pa.array(counts[per_row - start].astype(np.int32))
    lists = headers.items.slice(start, end - start).cast(HEADERS.item_type)
    return pa.MapArray.from_arrays(offsets, names.filter(kept), lists.filter(kept), type=HEADERS)


def with_more(headers: Any, more: Mapping[str, Any]) -> Any:
    """The same with more of them, whose names they do not have: to each name a text for each row.

    >>> one = pa.array([[("Trace", ["a"])], []], HEADERS)
    >>> with_more(one, {"Place": pa.array(["1", "2"])}).to_pylist()
    [[('Trace', ['a']), ('Place', ['1'])], [('Place', ['2'])]]
    """
    count, each = len(headers), np.arange(len(headers))
    per_row = np.diff(headers.offsets.to_numpy())
    rows = np.concatenate((np.repeat(each, per_row), *(each for _ in more)))
    names = [headers.keys, *(pa.repeat(pa.scalar(name, pa.string()), count) for name in more)]
    single = pa.array(np.arange(count + 1, dtype=np.int32))
    lists = [headers.items, *(pa.ListArray.from_arrays(single, text).cast(HEADERS.item_type) for text in more.values())]
    order = pa.array(np.argsort(rows, kind="stable"))
    ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(per_row + len(more)))).astype(np.int32)
    return pa.MapArray.from_arrays(
        pa.array(ends), pa.concat_arrays(names).take(order), pa.concat_arrays(lists).take(order), type=HEADERS
    )


def _renamed(name: str) -> str | None:
    if name == MSG_ID:
        return EVENT_ID
    return None if name.lower().startswith(_LEFT_BEHIND) else name

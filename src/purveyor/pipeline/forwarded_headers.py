"""The headers of copies, for all rows at once: what an event's message carries along, and what is said of it. Pure.

Those of the server and those that a copy got on its way stay behind. A copy has a message id of its own and carries the
id of the event as `Purveyor-Id`. Publishers set that header; where it is missing, the message id is the id.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from purveyor.jetstream.bulk.header_columns import TYPE as HEADERS
from purveyor.jetstream.headers import EVENT_ID, MSG_ID

_LEFT_BEHIND: Final = ("nats-", "purveyor-")


def carried(headers: Any) -> Any:
    """The headers that go along."""
    per_row = headers.offsets.to_numpy().astype(np.int64)
    start, end = int(per_row[0]), int(per_row[-1])
    encoded = headers.keys.slice(start, end - start).dictionary_encode()
    given = encoded.dictionary.to_pylist()
    names = pa.array([_renamed(name) for name in given], pa.string()).take(encoded.indices)
    keep = pc.is_valid(names).to_numpy(zero_copy_only=False)
    if EVENT_ID in given and MSG_ID in given:
        names_of_rows, rows = encoded.indices.to_numpy(), np.repeat(np.arange(len(headers)), np.diff(per_row))
        has_id = np.zeros(len(headers), np.bool_)
        has_id[rows[names_of_rows == given.index(EVENT_ID)]] = True
        keep = keep & ~((names_of_rows == given.index(MSG_ID)) & has_id[rows])
    counts = np.concatenate((np.zeros(1, np.int64), np.cumsum(keep)))
    offsets = pa.array(counts[per_row - start].astype(np.int32))
    lists = headers.items.slice(start, end - start).cast(HEADERS.item_type)
    kept = pa.array(keep)
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
    if name in (MSG_ID, EVENT_ID):
        return EVENT_ID
    return None if name.lower().startswith(_LEFT_BEHIND) else name

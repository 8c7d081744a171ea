"""The headers and bodies of messages that dispatch, catch-up, prefill and replay copy into subscription queues. Pure.

A copy keeps the headers of the event's message, except those of the server and those that belong to an earlier copy. It
has its own message id and carries the id of the event as `Purveyor-Id`. Publishers set that header; where it is
missing, the message id of the event is its id.

A body is copied byte by byte, except for fields that are hidden from the subscription. One pass of RE2 over all bytes
finds the rows that may contain such a field; only those are rewritten, by the rule of `model.redaction`.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from purveyor.jetstream.bulk.header_columns import HEADERS_TYPE as HEADERS
from purveyor.jetstream.headers import EVENT_ID, MSG_ID
from purveyor.model.redaction import candidate_pattern, redact

_NOT_COPIED_PREFIXES: Final = ("nats-", "purveyor-")


def copy_headers(headers: Any) -> Any:
    """Return the headers that a copy keeps."""
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


def add_headers(headers: Any, more: Mapping[str, Any]) -> Any:
    """Add headers with new names: for each name one value per row.

    >>> one = pa.array([[("Trace", ["a"])], []], HEADERS)
    >>> add_headers(one, {"Place": pa.array(["1", "2"])}).to_pylist()
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
    return None if name.lower().startswith(_NOT_COPIED_PREFIXES) else name


def redact_bodies(bodies: Any, hidden: Sequence[str]) -> Any:
    """Remove the fields that are hidden from one subscription from bodies of events, an array of bytes. Pure."""
    if not hidden or not len(bodies):
        return bodies
    suspicious = pc.match_substring_regex(bodies, pattern=candidate_pattern(tuple(hidden)))
    at = np.flatnonzero(suspicious.to_numpy(zero_copy_only=False))
    changed = [redact(body, hidden) for body in bodies.take(pa.array(at)).to_pylist()]
    if not changed:
        return bodies
    return pc.replace_with_mask(bodies, suspicious, pa.array(changed, bodies.type))

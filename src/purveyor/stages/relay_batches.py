"""Rows of the outbox as Arrow record batches for the bulk path: column by column, for thousands at once."""

import json
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Final

import pyarrow as pa

from purveyor.jetstream.bulk import OUTGOING_SCHEMA
from purveyor.model.errors import InvalidInput
from purveyor.stages.statement_protocol import Row

_ROWS_AT_ONCE: Final = 5000


def record_batches(rows: Sequence[Row]) -> Iterator[Any]:
    """All rows, in order."""
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        yield _record_batch(rows[start : start + _ROWS_AT_ONCE])


def _record_batch(rows: Sequence[Row]) -> Any:
    try:
        return _columns(rows)
    except (ValueError, TypeError, AttributeError, pa.ArrowException) as error:
        raise InvalidInput(f"a row of the outbox is no message: {error}", fix="look at its columns") from error


def _columns(rows: Sequence[Row]) -> Any:
    headers = [json.loads(row.headers) for row in rows]
    names = [name for each in headers for name in each]
    values = [value for each in headers for value in each.values()]
    ends = pa.array([0, *accumulate(map(len, headers))], pa.int32())
    one_each = pa.ListArray.from_arrays(pa.array(range(len(values) + 1), pa.int32()), pa.array(values, pa.string()))
    kinds = OUTGOING_SCHEMA.types
    columns = [
        pa.array([row.subject for row in rows], kinds[0]),
        pa.array([row.data for row in rows], kinds[1]),
        pa.MapArray.from_arrays(ends, pa.array(names, pa.string()), one_each).cast(kinds[2]),
        pa.array([row.message_id for row in rows], kinds[3]),
    ]
    return pa.record_batch(columns, schema=OUTGOING_SCHEMA)

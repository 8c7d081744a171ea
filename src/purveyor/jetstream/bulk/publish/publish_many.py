"""`publish_many`: publish record batches to streams, with a checked acknowledgement for each message."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias, assert_never
from uuid import uuid4

import pyarrow as pa

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk.options import (
    OUTGOING_SCHEMA,
    PublishMode,
    PublishOptions,
    PublishReport,
)
from purveyor.jetstream.bulk.publish.atomic import BATCH_HEADER_BYTES, AtomicPublisher
from purveyor.jetstream.bulk.publish.frame_builder import FrameOptions, prepare
from purveyor.jetstream.bulk.publish.pipelined import PipelinedPublisher
from purveyor.jetstream.bulk.publish.session import PublishSession, PublishTally
from purveyor.model.errors import InvalidInput, PublishRefused

Outgoing: TypeAlias = tuple[str, bytes, Mapping[str, str | Sequence[str]] | None, str | None]
"""Subject, data, headers and message id of one message."""

_DEFAULTS: Final = PublishOptions()
_MAX_BATCH_ROWS: Final = 10_000


def publish_many(
    address: Address, batches: Iterable[pa.RecordBatch], options: PublishOptions = _DEFAULTS
) -> PublishReport:
    """Publish all rows in order; return when the server has acknowledged each one.

    Columns: `subject` (string), `data` (binary), optionally `headers` (map<string, list<string>>) and `msg_id` (string,
    null allowed). An id in `msg_id` overrides one in the headers. A message without an id gets one: if it is sent again
    after a lost connection, it is stored once. In place of `headers`, `header_lines` (binary) holds them encoded, each
    as `Name: value` with a carriage return and a line feed.

    Raise `PublishRefused` (its `index` is the first refused message), `UnknownStream` (no stream takes a subject),
    `InvalidSubject` or `InvalidHeader` (before that row was sent), `PermissionDenied`, `AuthenticationFailed`,
    `ServerUnavailable` (for longer than `patience_seconds`) or `OutcomeUnknown` (for longer than the stream recognises
    duplicates). Messages before the named one are stored. Later ones may be stored if pipelined, never if atomic.

    >>> publish_many(address, outgoing([("orders.new", b"{}", None, "order-1")]))  # doctest: +SKIP
    PublishReport(stored=1, duplicates=0, last_sequences=mappingproxy({'ORDERS': 1}))
    """
    tally = PublishTally()
    session = PublishSession(address, options, tally)
    match options.mode:
        case PublishMode.PIPELINED:
            publisher: PipelinedPublisher | AtomicPublisher = PipelinedPublisher(session)
            room = 0
        case PublishMode.ATOMIC:
            publisher, room = AtomicPublisher(address, session), BATCH_HEADER_BYTES
        case _:
            assert_never(options.mode)
    id_prefix = f"{uuid4().hex}.".encode()
    index = 0
    try:
        for batch in _split_batches(batches):
            frame_options = FrameOptions(id_prefix, options.expected_stream, session.connection.info.max_payload - room)
            try:
                rows = prepare(batch, index, frame_options)
            except (InvalidInput, PublishRefused) as error:
                publisher.finish()  # rows before this batch are in flight: their outcome belongs to the error
                raise _with_stored(error, tally.acknowledged) from error
            publisher.send(rows)
            index += len(rows)
        publisher.finish()
        session.release()
    finally:
        session.close()
    return tally.report()


def outgoing(messages: Iterable[Outgoing], *, rows: int = 5000, size: int = 8 << 20) -> Iterator[pa.RecordBatch]:
    """Convert tuples `(subject, data, headers, msg_id)` to record batches for `publish_many`."""
    waiting: list[Outgoing] = []
    waiting_bytes = 0
    for message in messages:
        waiting.append(message)
        waiting_bytes += len(message[1])
        if len(waiting) >= rows or waiting_bytes >= size:
            yield _record_batch(waiting)
            waiting, waiting_bytes = [], 0
    if waiting:
        yield _record_batch(waiting)


def _record_batch(messages: list[Outgoing]) -> Any:
    try:
        subjects, data, headers, ids = zip(*messages, strict=True)
        columns = (subjects, data, _header_maps(headers), ids)
        arrays = [
            column if isinstance(column, pa.Array) else pa.array(column, kind)
            for column, kind in zip(columns, OUTGOING_SCHEMA.types, strict=True)
        ]
    except (pa.ArrowException, TypeError, ValueError, AttributeError) as error:
        raise InvalidInput(
            f"messages are not (subject, data, headers, msg_id): {error}",
            fix="give str, bytes, a mapping of str or None, and str or None",
        ) from error
    return pa.record_batch(arrays, schema=OUTGOING_SCHEMA)


def _header_maps(headers: Iterable[Mapping[str, str | Sequence[str]] | None]) -> Any:
    """Return headers as a map array. Arrow takes flat columns many times as fast as nested Python objects."""
    names: list[str] = []
    values: list[str] = []
    rows, lists = [0], [0]
    for each in headers:
        for name, value in (each or {}).items():
            names.append(name)
            values.append(value) if isinstance(value, str) else values.extend(value)
            lists.append(len(values))
        rows.append(len(names))
    kind = OUTGOING_SCHEMA.field("headers").type
    items = pa.ListArray.from_arrays(pa.array(lists, pa.int32()), pa.array(values, pa.string()), type=kind.item_type)
    return pa.MapArray.from_arrays(pa.array(rows, pa.int32()), pa.array(names, pa.string()), items, type=kind)


def _split_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[Any]:
    """Yield the same rows in batches of a bounded size, none of them empty."""
    for batch in batches:
        for start in range(0, batch.num_rows, _MAX_BATCH_ROWS):
            yield batch.slice(start, _MAX_BATCH_ROWS)


def _with_stored(error: InvalidInput | PublishRefused, stored: int) -> InvalidInput | PublishRefused:
    if isinstance(error, PublishRefused):
        error.stored = stored
    error.message = f"{error.message}; {stored} messages before it are stored"
    return error

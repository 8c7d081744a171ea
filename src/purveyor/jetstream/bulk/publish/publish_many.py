"""`publish_many`: record batches into streams, each message answered for."""

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
from purveyor.jetstream.bulk.publish.atomic import HEADER_ROOM, AtomicPublisher
from purveyor.jetstream.bulk.publish.frame_builder import Envelope, prepare
from purveyor.jetstream.bulk.publish.pipelined import Pipeline
from purveyor.jetstream.bulk.publish.session import Ledger, Outlet
from purveyor.model.errors import InvalidInput, PublishRefused

Outgoing: TypeAlias = tuple[str, bytes, Mapping[str, str | Sequence[str]] | None, str | None]
"""Subject, data, headers and message id of one message."""

_DEFAULTS: Final = PublishOptions()
_ROWS_AT_ONCE: Final = 10_000


def publish_many(
    address: Address, batches: Iterable[pa.RecordBatch], options: PublishOptions = _DEFAULTS
) -> PublishReport:
    """Publish all rows, in order, and return when the server has answered for each one.

    Columns: `subject` (string), `data` (binary), optionally `headers` (map<string, list<string>>) and `msg_id` (string,
    null allowed). An id in `msg_id` goes before one in the headers; a message without any gets one, so that sending it
    again after a lost connection stores it once.

    Fails with `PublishRefused` (its `index` is the first message refused), `UnknownStream` (no stream takes a subject),
    `InvalidSubject` or `InvalidHeader` (found before that row was sent), `PermissionDenied`, `AuthenticationFailed`,
    `ServerUnavailable` (away for longer than the patience) or `OutcomeUnknown` (away for longer than duplicates are
    recognised). Messages before the one named are stored; pipelined, some behind it may be, atomic, none.

    >>> publish_many(address, outgoing([("orders.new", b"{}", None, "order-1")]))  # doctest: +SKIP
    PublishReport(stored=1, duplicates=0, last_sequences=mappingproxy({'ORDERS': 1}))
    """
    ledger = Ledger()
    outlet = Outlet(address, options, ledger)
    match options.mode:
        case PublishMode.PIPELINED:
            publisher: Pipeline | AtomicPublisher = Pipeline(outlet)
            room = 0
        case PublishMode.ATOMIC:
            publisher, room = AtomicPublisher(address, outlet), HEADER_ROOM
        case _:
            assert_never(options.mode)
    id_prefix = f"{uuid4().hex}.".encode()
    index = 0
    try:
        for batch in _small(batches):
            envelope = Envelope(id_prefix, options.expected_stream, outlet.link.info.max_payload - room)
            try:
                rows = prepare(batch, index, envelope)
            except (InvalidInput, PublishRefused) as error:
                publisher.finish()  # rows before this batch are under way: what becomes of them belongs to the error
                raise _with_stored(error, ledger.acknowledged) from error
            publisher.send(rows)
            index += len(rows)
        publisher.finish()
        outlet.release()
    finally:
        outlet.drop()
    return ledger.report()


def outgoing(messages: Iterable[Outgoing], *, rows: int = 5000, size: int = 8 << 20) -> Iterator[pa.RecordBatch]:
    """Python tuples `(subject, data, headers, msg_id)` as record batches for `publish_many`."""
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
        maps = [
            [(name, [value] if isinstance(value, str) else list(value)) for name, value in (each or {}).items()]
            for each in headers
        ]
        columns = (subjects, data, maps, ids)
        arrays = [pa.array(column, kind) for column, kind in zip(columns, OUTGOING_SCHEMA.types, strict=True)]
    except (pa.ArrowException, TypeError, ValueError, AttributeError) as error:
        raise InvalidInput(
            f"messages are not (subject, data, headers, msg_id): {error}",
            fix="give str, bytes, a mapping of str or None, and str or None",
        ) from error
    return pa.record_batch(arrays, schema=OUTGOING_SCHEMA)


def _small(batches: Iterable[pa.RecordBatch]) -> Iterator[Any]:
    """The same rows in batches of a bounded size, none of them empty."""
    for batch in batches:
        for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
            yield batch.slice(start, _ROWS_AT_ONCE)


def _with_stored(error: InvalidInput | PublishRefused, stored: int) -> InvalidInput | PublishRefused:
    if isinstance(error, PublishRefused):
        error.stored = stored
    error.message = f"{error.message}; {stored} messages before it are stored"
    return error

"""Messages of `stream:incoming` as rows: events parsed into columns, and topic batches. Pure.

**Columns.** `parse_columns` parses the messages of a batch as events: realm and topic, and the other columns of the
archive. The result is that of `Event.decode`. Nearly every row passes a fast parser, which goes over the JSON once, in
C, and keeps only what the columns need. A row that does not pass is only doubtful, and `Event.decode` decides. One
thing passes the fast parser and not `Event.decode`: a number out of range in a field that no column uses.

**Topic batches.** A topic batch has messages of one topic in one row of Spark; `UnpackedMessages` makes single messages
again where they are written. The topic of an event decides which subscriptions get it (for a few of them also a
filter), so Spark need not handle each event: a row of any size costs the JVM several microseconds, and a topic
batch is one row for hundreds of events. It holds the bodies of its messages, joined, and the end offset of each; so a
filter in Spark SQL can still look at one.

The messages of one Arrow batch of the source are a portion. The topic batches of a portion cover the same range of
positions and overlap, so they are written together; portions follow each other.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import UNSET, UnsetType

from purveyor.jetstream.bulk.arrow_columns import bytes_and_offsets, read_blocks, regroup
from purveyor.model.control_events import CONTROL_SUBJECT
from purveyor.model.errors import InvalidInput
from purveyor.model.event import KEY_FIELDS, Event, Operation, check_realm_or_topic, event_key

COLUMN_TYPES: Final = {
    "realm": "string",
    "topic": "string",
    "key": "string",
    "publisher_name": "string",
    "ts": "timestamp",
    "operation": "string",
}
"""The columns with their Spark types. All of them are null for a message that is not an event."""
ROUTE_COLUMNS: Final = ("realm", "topic")
"""The columns that decide which subscriptions get an event. They are cheaper to parse."""

Columns: TypeAlias = list[list[Any]]
Parser: TypeAlias = Callable[[Sequence[bytes]], Columns]

_ARROW: Final = {"string": pa.string(), "timestamp": pa.timestamp("us", tz="UTC")}
_NonEmpty: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]


class _EventFields(msgspec.Struct, gc=False):
    """The fields of an event except its body. Unknown fields are skipped, but must be JSON."""

    publisher_name: _NonEmpty
    ts: str
    realm: str
    topic: str
    key: _NonEmpty | None = None
    attributes: dict[str, str] | None = None


class _Keys(msgspec.Struct, gc=False):
    """The fields of an object that may be its key."""

    uuid: str | int | None = None
    univentionObjectIdentifier: str | int | None = None  # noqa: N815 - its name in an object
    entryUUID: str | int | None = None  # noqa: N815
    id: str | int | None = None
    dn: str | int | None = None


class _Sides(msgspec.Struct, gc=False):
    old: _Keys | UnsetType = UNSET
    new: _Keys | UnsetType = UNSET


class _RouteEvent(_EventFields, kw_only=True, gc=False):
    body: _Sides


class _RawSides(msgspec.Struct, gc=False):
    old: msgspec.Raw = msgspec.Raw(b"{}")
    new: msgspec.Raw = msgspec.Raw(b"{}")


class _FullEvent(_EventFields, kw_only=True, gc=False):
    body: _RawSides


assert _Keys.__struct_fields__ == KEY_FIELDS
_decode_route: Final = msgspec.json.Decoder(_RouteEvent).decode
_decode_full: Final = msgspec.json.Decoder(_FullEvent).decode
_decode_keys: Final = msgspec.json.Decoder(_Keys).decode
_DOUBTFUL_ERRORS: Final = (msgspec.MsgspecError, InvalidInput, RecursionError, ValueError)
"""The errors of a fast parser about rows that may not be events."""
_PLACEHOLDER_EVENT: Final = Event.from_json(
    {"publisher_name": "-", "ts": "2026-01-01", "realm": "-", "topic": "-", "body": {"new": {"id": 1}}}
).encode()


def parse_columns(messages: pa.RecordBatch, columns: Sequence[str]) -> list[Any]:
    """Return these columns of `COLUMN_TYPES`, for messages with `subject` and `data`.

    A control event is not an event.
    """
    bodies = messages.column("data").to_pylist()
    control = pc.indices_nonzero(pc.equal(messages.column("subject"), CONTROL_SUBJECT)).to_pylist()
    for at in control:
        bodies[at] = _PLACEHOLDER_EVENT
    parser = _parse_route if set(columns) <= set(ROUTE_COLUMNS) else _parse_all
    found = dict(
        zip(
            COLUMN_TYPES,
            _parse_rows(bodies, parser if _is_utf8(messages.column("data")) else _with_utf8_check(parser)),
            strict=False,
        )
    )
    for name in columns:
        for at in control:
            found[name][at] = None
    return [pa.array(found[name], _ARROW[COLUMN_TYPES[name]]) for name in columns]


def _parse_rows(bodies: Sequence[bytes], parser: Parser) -> Columns:
    """Parse all rows at once, or in halves to find the doubtful ones, for which `Event.decode` decides."""
    try:
        return parser(bodies)
    except _DOUBTFUL_ERRORS:
        if len(bodies) == 1:
            return _parse_by_rule(bodies[0])
    middle = len(bodies) // 2
    halves = _parse_rows(bodies[:middle], parser), _parse_rows(bodies[middle:], parser)
    return [one + other for one, other in zip(*halves, strict=False)]  # the rule may give more columns


def invalid_reason(body: bytes) -> str | None:
    """Return why a message is not an event that can be dispatched and archived; None if it is one."""
    try:
        event = Event.decode(body)
        "".join([event.realm, event.topic, event.publisher_name, event.object_key or ""]).encode()
    except InvalidInput as error:
        return str(error)
    except UnicodeEncodeError:
        return "a name in the event holds half of a surrogate pair, which is no character; send the whole of it"
    return None


def _parse_by_rule(body: bytes) -> Columns:
    if invalid_reason(body) is not None:
        return [[None] for _ in COLUMN_TYPES]
    event = Event.decode(body)
    operation = event.operation.value
    return [[event.realm], [event.topic], [event.object_key], [event.publisher_name], [event.ts], [operation]]


def _parse_route(bodies: Sequence[bytes]) -> Columns:
    """Parse the first two columns. An object without any key field may be empty: such a row is parsed in full."""
    given = [_decode_route(body) for body in bodies]
    moment = datetime.fromisoformat
    for body, each in zip(bodies, given, strict=True):
        moment(each.ts)
        sides = each.body
        new = sides.new
        # The first test is enough for most rows, and the code that runs for every row must be short.
        if (new is UNSET or new.uuid is None) and not (_has_key(new) or _has_key(sides.old)):
            _objects(_decode_full(body).body)
    return _realms_and_topics(given)


def _has_key(side: _Keys | UnsetType) -> bool:
    return side is not UNSET and (
        side.uuid is not None
        or side.dn is not None
        or side.entryUUID is not None
        or side.id is not None
        or side.univentionObjectIdentifier is not None
    )


def _realms_and_topics(given: Sequence[_EventFields]) -> Columns:
    realms, topics = [each.realm for each in given], [each.topic for each in given]
    for word in {*realms, *topics}:
        check_realm_or_topic(word, "realm or topic")
    return [realms, topics]


def _parse_all(bodies: Sequence[bytes]) -> Columns:
    """Parse every column."""
    given = [_decode_full(body) for body in bodies]
    keys, operations = [], []
    for each in given:
        new, old = _objects(each.body)
        keys.append(event_key(new or {}, old or {}, given=each.key))
        operation = Operation.DELETE if new is None else Operation.CREATE if old is None else Operation.MODIFY
        operations.append(operation.value)
    moments = [_parse_time(each.ts) for each in given]
    return [*_realms_and_topics(given), keys, [each.publisher_name for each in given], moments, operations]


def _objects(body: _RawSides) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """Return new and old, as `_fields` has them; raise InvalidInput if both are empty."""
    new, old = _fields(body.new), _fields(body.old)
    if new is None and old is None:
        raise InvalidInput("neither an old nor a new object", fix="give at least one of them")
    return new, old


def _fields(side: msgspec.Raw) -> dict[str, Any] | None:
    """Return the key fields of an object; None if it has no fields at all."""
    text = bytes(side)
    found = _decode_keys(text)
    return msgspec.structs.asdict(found) if text[1:-1].strip() else None


def _parse_time(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _is_utf8(bodies: Any) -> bool:
    try:
        bodies.cast(pa.string())
    except pa.ArrowInvalid:
        return False
    return True


def _with_utf8_check(parser: Parser) -> Parser:
    """Make a parser that also checks the UTF-8 of texts that it skips."""

    def strict(bodies: Sequence[bytes]) -> Columns:
        for body in bodies:
            body.decode()
        return parser(bodies)

    return strict


TOPIC_BATCH_SCHEMA: Final = pa.schema(
    [
        ("portion", pa.int64()),
        ("subject", pa.string()),
        ("realm", pa.string()),
        ("topic", pa.string()),
        ("positions", pa.list_(pa.int64())),
        ("ends", pa.list_(pa.int32())),
        ("data", pa.binary()),
        ("header_ends", pa.list_(pa.int32())),
        ("headers", pa.binary()),
    ]
)
"""`portion` is a position that identifies the portion and gives the order of portions. A topic batch of messages that
are not events has no realm and no topic. `headers` are header blocks of the NATS protocol."""
TOPIC_BATCH_COLUMNS: Final = tuple(TOPIC_BATCH_SCHEMA.names)
TOPIC_BATCH_DDL: Final = (
    "portion bigint, subject string, realm string, topic string, positions array<bigint>, ends array<int>, "
    "data binary, header_ends array<int>, headers binary"
)
"""The same schema as DDL of Spark."""

_MAX_BATCH_BYTES: Final = 256 << 10
"""The approximate size of the bodies of a topic batch: Spark copies a row as one piece."""

Indices = npt.NDArray[np.int64]


def to_topic_batches(messages: pa.RecordBatch) -> pa.RecordBatch:
    """Group a portion: messages with `sequence`, `subject`, `headers` (blocks) and `data`.

    Control events are left out.
    """
    is_control = pc.equal(messages.column("subject"), CONTROL_SUBJECT)
    if is_control.true_count:
        messages = messages.filter(pc.invert(is_control))
    if not messages.num_rows:
        return pa.RecordBatch.from_pylist([], TOPIC_BATCH_SCHEMA)
    realms, topics = parse_columns(messages, ROUTE_COLUMNS)
    groups = _group_numbers([messages.column("subject"), realms, topics])
    sequences, data, headers = (messages.column(name) for name in ("sequence", "data", "headers"))
    order = np.arange(len(groups))
    if groups.any():
        order = np.argsort(groups, kind="stable")
        groups, rows = groups[order], pa.array(order)
        sequences, data, headers = sequences.take(rows), data.take(rows), headers.take(rows)
    pieces = bytes_and_offsets(data)[1][:-1] // _MAX_BATCH_BYTES
    firsts = np.flatnonzero(np.diff(groups, prepend=-1) | np.diff(pieces, prepend=-1))
    bounds = np.append(firsts, len(groups))
    leaders = pa.array(order[firsts])
    portion = messages.column("sequence")[0].as_py()
    columns = [
        pa.array(np.full(len(firsts), portion, np.int64)),
        messages.column("subject").take(leaders),
        realms.take(leaders),
        topics.take(leaders),
        pa.ListArray.from_arrays(pa.array(bounds.astype(np.int32)), sequences),
        _end_offsets(data, bounds),
        regroup(data, bounds),
        _end_offsets(headers, bounds),
        regroup(headers, bounds),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=TOPIC_BATCH_SCHEMA)


def _group_numbers(keys: list[Any]) -> Indices:
    """Return a number for each row: equal for rows with the same keys, and 0 if all rows have the same keys."""
    groups = np.zeros(len(keys[0]), np.int64)
    for key in keys:
        encoded = key.dictionary_encode(null_encoding="encode")
        if len(encoded.dictionary) > 1:
            groups = groups * len(encoded.dictionary) + encoded.indices.to_numpy()
    return groups


def _end_offsets(values: Any, bounds: Indices) -> Any:
    """Return where each value ends in the group that it is joined into."""
    _, offsets = bytes_and_offsets(values)
    ends = offsets[1:] - np.repeat(offsets[bounds[:-1]], np.diff(bounds))
    return pa.ListArray.from_arrays(pa.array(bounds.astype(np.int32)), pa.array(ends.astype(np.int32)))


def group_portions(batches: Iterable[pa.RecordBatch], max_rows: int, max_bytes: int) -> Iterator[list[pa.RecordBatch]]:
    """Yield the topic batches of whole portions, in order, about `max_rows` messages or `max_bytes` bytes at a time.

    Spark may divide a portion, so a portion is complete only when another one, or nothing, follows.
    """
    gathered: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        gathered.append(batch)
        rows += _messages_in(batch)
        size += batch.nbytes
        if rows >= max_rows or size >= max_bytes:
            whole, rest = _split_last_portion(gathered)
            if whole:
                yield whole
                gathered, rows, size = rest, sum(map(_messages_in, rest)), sum(each.nbytes for each in rest)
    if gathered:
        yield gathered


def _messages_in(batches: pa.RecordBatch) -> int:
    return len(batches.column("positions").flatten())


def _split_last_portion(batches: list[pa.RecordBatch]) -> tuple[list[pa.RecordBatch], list[pa.RecordBatch]]:
    """Separate the last portion from the ones before it."""
    last = batches[-1].column("portion")[-1].as_py()
    for index in range(len(batches) - 1, -1, -1):
        others = np.flatnonzero(batches[index].column("portion").to_numpy() != last)
        if len(others):
            until = int(others[-1]) + 1
            head, tail = batches[index].slice(0, until), batches[index].slice(until)
            return [*batches[:index], head], [*([tail] if tail.num_rows else []), *batches[index + 1 :]]
    return [], batches


class UnpackedMessages:
    """The messages of some topic batches, one row each, in the order of positions."""

    def __init__(self, batches: Sequence[pa.RecordBatch]) -> None:
        slim = [each.drop_columns(["data", "headers", "ends", "header_ends", "positions"]) for each in batches]
        self.topic_batches = pa.Table.from_batches(slim).combine_chunks().to_batches()[0]
        """The topic batches, without their messages."""
        counts = [np.asarray(each.column("positions").value_lengths()) for each in batches]
        batch_of_row = np.repeat(np.arange(self.topic_batches.num_rows), np.concatenate(counts))
        columns = {
            "position": [each.column("positions").flatten() for each in batches],
            "headers": [read_blocks(_split_values(each, "headers", "header_ends")) for each in batches],
            "data": [_split_values(each, "data", "ends") for each in batches],
        }
        rows = pa.table({name: pa.chunked_array(chunks) for name, chunks in columns.items()})
        positions = rows.column("position").to_numpy()
        if not (np.diff(positions) > 0).all():
            order = np.argsort(positions, kind="stable")
            rows, batch_of_row = rows.take(pa.array(order)), batch_of_row[order]
        self.rows = rows
        """`position`, `headers` and `data`."""
        self.batch_of_row: Indices = batch_of_row
        """The topic batch of each row."""

    def take_rows(self, rows: Indices) -> list[dict[str, Any]]:
        """Return some rows as dicts, with their `subject`."""
        subjects = self.topic_batches.column("subject").take(pa.array(self.batch_of_row[rows]))
        found: list[dict[str, Any]] = self.rows.take(pa.array(rows)).append_column("subject", subjects).to_pylist()
        return found


def _split_values(batches: pa.RecordBatch, name: str, ends_name: str) -> Any:
    """Return the values that were joined into those of a column."""
    data, offsets = bytes_and_offsets(batches.column(name).cast(pa.binary()))  # it may be large_binary
    ends = batches.column(ends_name)
    flat = np.asarray(ends.flatten()).astype(np.int64) + np.repeat(offsets[:-1], np.asarray(ends.value_lengths()))
    bounds = np.concatenate((np.zeros(1, np.int64), flat)).astype(np.int32)
    buffers = [None, pa.py_buffer(bounds), pa.py_buffer(np.ascontiguousarray(data))]
    return pa.BinaryArray.from_buffers(pa.binary(), len(flat), buffers)

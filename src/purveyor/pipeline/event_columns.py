"""Parses the messages of a batch as events: realm and topic, and the other columns of the archive. Pure.

The result is that of `Event.decode`. Nearly every row passes a fast parser, which goes over the JSON once, in C, and
keeps only what the columns need. A row that does not pass is only doubtful, and `Event.decode` decides. One thing
passes the fast parser and not `Event.decode`: a number out of range in a field that no column uses.
"""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import UNSET, UnsetType

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
"""What a fast parser raises about rows that may not be events."""
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

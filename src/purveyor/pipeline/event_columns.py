"""What messages say as events, for all rows of a batch: their realm and topic, and what else the archive keeps. Pure.

The verdict is that of `Event.decode`. Nearly every row passes a quick look, which goes over the JSON once, in C, and
keeps no more of it than is asked for. A row that does not pass is not wrong by that, only doubtful, and is judged by
the rule itself. One thing passes the look and not the rule: a number beyond all bounds in a field that nobody reads.
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
from purveyor.model.event import KEY_FIELDS, Event, Operation, check_word, event_key

TYPES: Final = {
    "realm": "string",
    "topic": "string",
    "key": "string",
    "publisher_name": "string",
    "ts": "timestamp",
    "operation": "string",
}
"""The columns there are, in Spark's words. All of a row are null if it is no event."""
ROUTE: Final = ("realm", "topic")
"""Those that say who gets it, which are had for less."""

Columns: TypeAlias = list[list[Any]]
Look: TypeAlias = Callable[[Sequence[bytes]], Columns]

_ARROW: Final = {"string": pa.string(), "timestamp": pa.timestamp("us", tz="UTC")}
_Some: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]


class _Given(msgspec.Struct, gc=False):
    """The fields of an event but its body. Fields that are not known are passed over, but must be JSON."""

    publisher_name: _Some
    ts: str
    realm: str
    topic: str
    key: _Some | None = None
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


class _ForRoute(_Given, kw_only=True, gc=False):
    body: _Sides


class _RawSides(msgspec.Struct, gc=False):
    old: msgspec.Raw = msgspec.Raw(b"{}")
    new: msgspec.Raw = msgspec.Raw(b"{}")


class _ForAll(_Given, kw_only=True, gc=False):
    body: _RawSides


assert _Keys.__struct_fields__ == KEY_FIELDS
_for_route: Final = msgspec.json.Decoder(_ForRoute).decode
_for_all: Final = msgspec.json.Decoder(_ForAll).decode
_keys: Final = msgspec.json.Decoder(_Keys).decode
_DOUBT: Final = (msgspec.MsgspecError, InvalidInput, RecursionError, ValueError)
"""What a look raises about rows that are perhaps no events."""
_ANY_EVENT: Final = Event.from_json(
    {"publisher_name": "-", "ts": "2026-01-01", "realm": "-", "topic": "-", "body": {"new": {"id": 1}}}
).encode()


def told(messages: pa.RecordBatch, columns: Sequence[str]) -> list[Any]:
    """These columns of `TYPES`, for messages with `subject` and `data`. A control event is no event."""
    bodies = messages.column("data").to_pylist()
    control = pc.indices_nonzero(pc.equal(messages.column("subject"), CONTROL_SUBJECT)).to_pylist()
    for at in control:
        bodies[at] = _ANY_EVENT
    look = _route if set(columns) <= set(ROUTE) else _all
    found = dict(zip(TYPES, _judged(bodies, look if _is_text(messages.column("data")) else _text(look)), strict=False))
    for name in columns:
        for at in control:
            found[name][at] = None
    return [pa.array(found[name], _ARROW[TYPES[name]]) for name in columns]


def _judged(bodies: Sequence[bytes], look: Look) -> Columns:
    """All in one look, or in halves: so those that are doubtful are found, and judged by the rule."""
    try:
        return look(bodies)
    except _DOUBT:
        if len(bodies) == 1:
            return _by_rule(bodies[0])
    middle = len(bodies) // 2
    halves = _judged(bodies[:middle], look), _judged(bodies[middle:], look)
    return [one + other for one, other in zip(*halves, strict=False)]  # the rule tells more than a look may


def why_none(body: bytes) -> str | None:
    """Why a message is no event that can be dispatched and archived, in words; None if it is one."""
    try:
        event = Event.decode(body)
        "".join([event.realm, event.topic, event.publisher_name, event.object_key or ""]).encode()
    except InvalidInput as error:
        return str(error)
    except UnicodeEncodeError:
        return "a name in the event holds half of a surrogate pair, which is no character; send the whole of it"
    return None


def _by_rule(body: bytes) -> Columns:
    if why_none(body) is not None:
        return [[None] for _ in TYPES]
    event = Event.decode(body)
    operation = event.operation.value
    return [[event.realm], [event.topic], [event.object_key], [event.publisher_name], [event.ts], [operation]]


def _route(bodies: Sequence[bytes]) -> Columns:
    """The first two columns. An object without any of the key fields may be empty: that is looked at once more."""
    given = [_for_route(body) for body in bodies]
    moment = datetime.fromisoformat
    for body, each in zip(bodies, given, strict=True):
        moment(each.ts)
        sides = each.body
        new = sides.new
        # The first question is enough for most, and what is asked of every row must be short.
        if (new is UNSET or new.uuid is None) and not (_has_key(new) or _has_key(sides.old)):
            _objects(_for_all(body).body)
    return _words(given)


def _has_key(side: _Keys | UnsetType) -> bool:
    return side is not UNSET and (
        side.uuid is not None
        or side.dn is not None
        or side.entryUUID is not None
        or side.id is not None
        or side.univentionObjectIdentifier is not None
    )


def _words(given: Sequence[_Given]) -> Columns:
    realms, topics = [each.realm for each in given], [each.topic for each in given]
    for word in {*realms, *topics}:
        check_word(word, "realm or topic")
    return [realms, topics]


def _all(bodies: Sequence[bytes]) -> Columns:
    """Every column."""
    given = [_for_all(body) for body in bodies]
    keys, operations = [], []
    for each in given:
        new, old = _objects(each.body)
        keys.append(event_key(new or {}, old or {}, given=each.key))
        operation = Operation.DELETE if new is None else Operation.CREATE if old is None else Operation.MODIFY
        operations.append(operation.value)
    moments = [_moment(each.ts) for each in given]
    return [*_words(given), keys, [each.publisher_name for each in given], moments, operations]


def _objects(body: _RawSides) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """New and old, as `_fields` has them; not both are empty."""
    new, old = _fields(body.new), _fields(body.old)
    if new is None and old is None:
        raise InvalidInput("neither an old nor a new object", fix="give at least one of them")
    return new, old


def _fields(side: msgspec.Raw) -> dict[str, Any] | None:
    """The fields of an object that may be its key; None if it has no fields at all."""
    text = bytes(side)
    found = _keys(text)
    return msgspec.structs.asdict(found) if text[1:-1].strip() else None


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _is_text(bodies: Any) -> bool:
    try:
        bodies.cast(pa.string())
    except pa.ArrowInvalid:
        return False
    return True


def _text(look: Look) -> Look:
    """A look that is as strict about UTF-8 where it passes over a text."""

    def strict(bodies: Sequence[bytes]) -> Columns:
        for body in bodies:
            body.decode()
        return look(bodies)

    return strict

"""Read many events at once, several times as fast as one by one.

One pass of msgspec parses all events, checks the types of their fields and leaves out nothing. Then each event goes
through the checks of every other event (`check_limits`, its schema). msgspec writes the body of its message.

`read_events` returns None for anything unusual: an unknown field, a text in UTF-16, an event in binary form, and
everything that is wrong. The caller then reads the events one by one, which accepts what is unusual and says what is
wrong. So only that way makes errors, and this one can only accept what that one accepts.
"""

import os
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from purveyor.model import json_fields
from purveyor.model.errors import PurveyorError
from purveyor.model.event import Event, check_event_id, check_limits
from purveyor.sources.http_events import MAX_EVENTS_PER_BATCH, IncomingEvent
from purveyor.sources.schemas.event_validator import EventValidator

_ID_BYTES: Final = 16
_VARIANTS: Final = "89ab"


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    old: dict[str, Any] = {}
    new: dict[str, Any] = {}


class _GivenEvent(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """An event as it is sent; without its id, and with `ts` in our form, it is the body of its message."""

    publisher_name: str
    ts: str
    realm: str
    topic: str
    body: _Body
    key: str | None = None
    attributes: dict[str, str] | None = None
    id: str | None = None


_ARRAY: Final = msgspec.json.Decoder(list[_GivenEvent])
_LINE: Final = msgspec.json.Decoder(_GivenEvent)
_encode: Final = msgspec.json.Encoder().encode


def read_events(
    given: bytes | Sequence[bytes],
    validator: EventValidator,
    *,
    realms: frozenset[str] | None = None,
    key: str | None = None,
) -> list[IncomingEvent] | None:
    """Return the checked events of an array, or of lines; None if they have to be read one by one.

    Only these realms are accepted; None: all. With an idempotency key, an event without an id gets the key and its
    number as its id, else a new one.
    """
    try:
        found = _ARRAY.decode(given) if isinstance(given, bytes) else [_LINE.decode(line) for line in given]
        if not 0 < len(found) <= MAX_EVENTS_PER_BATCH:
            return None
        new_ids = _new_ids(len(found)) if key is None else [f"{key}:{number}" for number in range(len(found))]
        if realms is not None and not realms.issuperset({each.realm for each in found}):
            return None
        return [_read(each, new_id, validator) for each, new_id in zip(found, new_ids, strict=True)]
    except (msgspec.MsgspecError, PurveyorError, ValueError, RecursionError):
        return None


def _read(given: _GivenEvent, new_id: str, validator: EventValidator) -> IncomingEvent:
    identity = check_event_id(new_id if given.id is None else given.id)
    body = given.body
    if given.key == "" or not (body.old or body.new):
        raise ValueError
    event = Event(
        publisher_name=given.publisher_name,
        ts=json_fields.to_moment(given.ts),
        realm=given.realm,
        topic=given.topic,
        old=body.old,
        new=body.new,
        key=given.key,
        attributes=given.attributes or {},
    )
    check_limits(event)
    schema = validator.find(event.realm, event.topic)
    if schema is not None and schema.is_binary:
        raise ValueError
    validator.check(event, schema)
    given.id, given.ts, given.attributes = None, event.ts.isoformat(), given.attributes or None
    return IncomingEvent(event, identity, _encode(given))


def _new_ids(count: int) -> list[str]:
    """Return random ids in the form of `new_id`, from one read of the system's random source.

    >>> import uuid
    >>> all(str(uuid.UUID(each)) == each and uuid.UUID(each).version == 4 for each in _new_ids(100))
    True
    """
    digits = os.urandom(count * _ID_BYTES).hex()
    size = 2 * _ID_BYTES
    return [_format_id(digits[start : start + size]) for start in range(0, count * size, size)]


def _format_id(digits: str) -> str:
    variant = _VARIANTS[int(digits[16], 16) % 4]
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"

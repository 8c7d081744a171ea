r"""An event: one change of one object, as stored in `stream:incoming` for dispatch, archive and every subscriber.

Its body is JSON: `publisher_name`, `ts`, `realm`, `topic`, `body {old, new}` and, if given, `key` and `attributes`. Its
id is in the message id header, because a retry repeats it; its position is its sequence in the stream. Neither is part
of the body.

The limits of an event are checked once where it enters: by the HTTP API, the CLI and the transform. Every part can
store, match, deliver and archive an event that passes `encode_checked`. Readers use `Event.decode`, which is more
lenient: an event that an older version accepted is still delivered, or parked.

| what | at most |
|---|---|
| `realm`, `publisher_name`, the id, the name of an attribute | 256 bytes of UTF-8 |
| `topic`, the key, the value of an attribute | 1024 bytes |
| attributes | 100 |
| the name of a field in `old` or `new` | 4096 bytes |
| levels of objects and lists in `old` or `new` | 100 |
| a number | the range of a double (about 1.8e308), also for a whole number |
| `ts` | the years 1900 to 2261, in UTC |

None of the texts in the first two rows holds a control character or a line break. A realm holds none of
`* ? [ ] { } | ^ $ \ .+`, because subscriptions name realms exactly. No text anywhere holds half of a
surrogate pair, which is no character and has no UTF-8.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Final

from purveyor.model import json_fields
from purveyor.model.errors import InvalidInput
from purveyor.model.json_fields import Json, check_json, check_optional_text, check_surrogates, check_text

KEY_FIELDS: Final = ("uuid", "univentionObjectIdentifier", "entryUUID", "id", "dn")
"""The fields that can be the key of an object; the first one found counts."""

SUBJECT: Final = "incoming"
"""The subject on which the API, the CLI and the outbox publish events."""
LDIF_SUBJECT: Final = "incoming.ldif"
"""The subject on which the transform publishes events."""
OUTBOX_SUBJECT: Final = "incoming.outbox"
"""The first tokens of the subjects on which outbox relays publish the events of stages."""
RESERVED_HEADER_BYTES: Final = 2048
"""Reserved for the headers of an event in its message: its ids, its login, its trace, the writer's conditions."""

_LINE_BREAKS: Final = frozenset("\x85\u2028\u2029")
_EXPRESSION_IN_REALM: Final = re.compile(r"[*?\[\]{}|^$\\]|\.\+")
LONGEST_REALM_BYTES: Final = 256
LONGEST_TOPIC_BYTES: Final = 1024
LONGEST_KEY_BYTES: Final = 1024
"""The limit of an ordering key of Google Pub/Sub."""
LONGEST_ID_BYTES: Final = 256
LONGEST_PUBLISHER_NAME_BYTES: Final = 256
LONGEST_ATTRIBUTE_NAME_BYTES: Final = 256
LONGEST_ATTRIBUTE_VALUE_BYTES: Final = 1024
MOST_ATTRIBUTES: Final = 100
EARLIEST_TS: Final = datetime(1900, 1, 1, tzinfo=UTC)
LATEST_TS: Final = datetime(2261, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)
"""The last year of readers of the archive that count in nanoseconds, such as Arrow and pandas."""


class Operation(Enum):
    """The kinds of changes of an object."""

    CREATE = "create"
    MODIFY = "modify"
    DELETE = "delete"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One change. `old` is empty for a new object, `new` for a deleted one; never both are empty."""

    publisher_name: str
    ts: datetime
    realm: str
    topic: str
    old: Mapping[str, Any] = field(default_factory=dict)
    new: Mapping[str, Any] = field(default_factory=dict)
    key: str | None = None
    """The key from the publisher; `object_key` is the effective one."""
    attributes: Mapping[str, str] = field(default_factory=dict)

    @property
    def object_key(self) -> str | None:
        """The key of the object; None if there is none."""
        return event_key(self.new, self.old, given=self.key)

    @property
    def operation(self) -> Operation:
        """The kind of change, derived from old and new."""
        if not self.new:
            return Operation.DELETE
        return Operation.MODIFY if self.old else Operation.CREATE

    def to_json(self) -> Json:
        """Return the stored fields; absent ones are omitted."""
        given: Json = {"key": self.key} if self.key is not None else {}
        if self.attributes:
            given["attributes"] = dict(self.attributes)
        return {
            "publisher_name": self.publisher_name,
            "ts": self.ts.isoformat(),
            "realm": self.realm,
            "topic": self.topic,
            "body": {"old": self.old, "new": self.new},
            **given,
        }

    @classmethod
    def from_json(cls, data: object) -> "Event":
        """Build it from checked fields; InvalidInput names the wrong one. Unknown fields are ignored.

        A missing `old` or `new` is empty; a time without a zone is in UTC.
        """
        fields = json_fields.mapping(data, "event")
        body = json_fields.mapping(fields.get("body"), "body of the event")
        old, new = (json_fields.mapping(body.get(side, {}), f"{side} object of the event") for side in ("old", "new"))
        if not old and not new:
            raise InvalidInput("the event has neither an old nor a new object", fix="give at least one of them")
        attributes = json_fields.mapping(fields.get("attributes") or {}, "attributes of the event")
        for name in attributes:
            if not isinstance(attributes[name], str):
                raise InvalidInput(f"the attribute {name!r} of the event is no string", fix="attributes are strings")
        return cls(
            publisher_name=json_fields.text(fields, "publisher_name", "event"),
            ts=json_fields.moment(fields, "ts", "event"),
            realm=check_realm_or_topic(json_fields.text(fields, "realm", "event"), "realm"),
            topic=check_realm_or_topic(json_fields.text(fields, "topic", "event"), "topic"),
            old=old,
            new=new,
            key=None if fields.get("key") is None else json_fields.text(fields, "key", "event"),
            attributes=attributes,
        )

    def encode(self) -> bytes:
        """Encode the body of its message."""
        return json_fields.dump(self.to_json())

    @classmethod
    def decode(cls, data: bytes | str) -> "Event":
        """Decode the body of a message, or a line of text."""
        return cls.from_json(json_fields.parse(data, "event"))


def event_key(new: Mapping[str, Any], old: Mapping[str, Any], *, given: str | None = None) -> str | None:
    """Return the key of the object: the given key, else the first of `KEY_FIELDS` in new, then the first in old.

    Only a non-empty string or a whole number can be a key.

    >>> event_key({"dn": "cn=a", "id": 7}, {"uuid": "u-1"})
    '7'
    """
    if given:
        return given
    for side in (new, old):
        for name in KEY_FIELDS:
            value = side.get(name)
            if isinstance(value, str) and value:
                return value
            if isinstance(value, int) and not isinstance(value, bool):
                return str(value)
    return None


def check_realm_or_topic(word: str, what: str) -> str:
    """Check a realm or topic: not empty, no control characters or line breaks (regular expressions differ in these)."""
    if not word:
        raise InvalidInput(f"the {what} is empty", fix="give one, such as udm or users/user")
    bad = next((ch for ch in word if ord(ch) < 32 or ord(ch) == 127 or ch in _LINE_BREAKS), None)
    if bad is not None:
        raise InvalidInput(f"the {what} {word!r} holds the control character {bad!r}", fix="leave it out")
    return word


def check_limits(event: Event) -> None:
    """Raise InvalidInput that names the first field beyond its limits. It does not look for halves of surrogates."""
    check_json(event.old, "body.old")
    check_json(event.new, "body.new")
    check_realm_topic(event.realm, event.topic)
    check_text(event.publisher_name, "publisher_name", LONGEST_PUBLISHER_NAME_BYTES)
    _check_key(event)
    _check_attributes(event.attributes)
    if not EARLIEST_TS <= event.ts <= LATEST_TS:
        raise InvalidInput(f"ts is {event.ts.isoformat()}", fix="give a time from the year 1900 to the year 2261")


def encode_checked(event: Event) -> bytes:
    """Return the body of the message for an event, or raise InvalidInput that names the field beyond its limits."""
    check_limits(event)
    try:
        return json_fields.dump_utf8(event.to_json())
    except UnicodeEncodeError:
        check_surrogates({"old": event.old, "new": event.new}, "body")
        raise


def check_event(given: object) -> tuple[Event, bytes]:
    """Return an event that a program made, checked, and the body of its message; InvalidInput names the wrong field.

    The fields of an `Event` may hold anything, so this reads them as if they came over HTTP.
    """
    if not isinstance(given, Event):
        raise InvalidInput(f"the event is {json_fields.describe_type(given)}", fix="give a purveyor.Event")
    ts: object = given.ts
    body = {"old": given.old, "new": given.new}
    _check_json_types(body, "body")
    event = Event.from_json(
        {
            "publisher_name": given.publisher_name,
            "ts": ts.isoformat() if isinstance(ts, datetime) else ts,
            "realm": given.realm,
            "topic": given.topic,
            "body": body,
            "key": given.key,
            "attributes": given.attributes,
        }
    )
    return event, encode_checked(event)


def _check_json_types(value: Mapping[str, object], what: str) -> None:
    """Raise InvalidInput, with the path, for a value that JSON does not have. `encode_checked` checks the depth."""
    level: list[tuple[object, str]] = [(value, what)]
    for _ in range(json_fields.MOST_LEVELS + 2):
        children: list[tuple[object, str]] = []
        for container, path in level:
            items = container.items() if isinstance(container, dict) else enumerate(container)  # type: ignore[arg-type]
            for name, inner in items:
                inner_path = f"{path}.{name}" if isinstance(name, str) else f"{path}[{name}]"
                if isinstance(container, dict) and not isinstance(name, str):
                    raise InvalidInput(f"{path} has {name!r} as the name of a field", fix="give it as a string")
                if isinstance(inner, dict | list | tuple):
                    children.append((inner, inner_path))
                elif not isinstance(inner, str | int | float | None):
                    kind = json_fields.describe_type(inner)
                    raise InvalidInput(f"{inner_path} is {kind}", fix="give text, numbers, true, false, lists, objects")
        level = children


class EventTooLarge(InvalidInput):
    """An event above the size limit of the server."""


def check_event_size(data: bytes, max_payload: int) -> None:
    """Raise EventTooLarge if the body of an event's message is above the size limit of the server."""
    largest = max_payload - RESERVED_HEADER_BYTES
    if len(data) > largest:
        raise EventTooLarge(f"an event of {len(data)} bytes; the server takes {largest}", fix="send less")


def check_realm_topic(realm: str, topic: str) -> None:
    """Raise InvalidInput if a realm or a topic is beyond its limits.

    A realm is exact in subscriptions, so one that looks like an expression would match nothing in silence.
    """
    check_text(realm, "realm", LONGEST_REALM_BYTES)
    found = _EXPRESSION_IN_REALM.search(realm)
    if found:
        raise InvalidInput(
            f"the realm {realm!r} looks like an expression because of {found.group()!r}, and a realm is exact",
            fix="name each realm without * ? [ ] { } | ^ $ \\ and .+, for example udm and shop",
        )
    check_text(topic, "topic", LONGEST_TOPIC_BYTES)


def check_event_id(identity: object) -> str:
    """Return the id that a publisher gave an event, or raise InvalidInput."""
    if not isinstance(identity, str):
        raise InvalidInput(f"id is {json_fields.describe_type(identity)}", fix="give id as a string")
    check_text(identity, "id", LONGEST_ID_BYTES)
    if identity != identity.strip():
        raise InvalidInput("id begins or ends with white space", fix="leave it out: a header would not keep it")
    return identity


def _check_key(event: Event) -> None:
    if event.key is not None:
        check_text(event.key, "key", LONGEST_KEY_BYTES)
        return
    found = event.object_key
    if found is None:
        return
    try:
        check_text(found, "the key found in the object", LONGEST_KEY_BYTES)
    except InvalidInput as error:
        raise InvalidInput(error.message, fix=f"give a 'key' of at most {LONGEST_KEY_BYTES} bytes") from None


def _check_attributes(attributes: Mapping[str, str]) -> None:
    if len(attributes) > MOST_ATTRIBUTES:
        raise InvalidInput(f"the event has {len(attributes)} attributes", fix=f"give at most {MOST_ATTRIBUTES}")
    for name, value in attributes.items():
        check_text(name, "an attribute name", LONGEST_ATTRIBUTE_NAME_BYTES)
        check_optional_text(value, f"attributes.{name}", LONGEST_ATTRIBUTE_VALUE_BYTES)

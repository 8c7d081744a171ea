"""An event: one change of one object, as stored in `stream:incoming` for dispatch, archive and every subscriber.

Its body is JSON: `publisher_name`, `ts`, `realm`, `topic`, `body {old, new}` and, if given, `key` and `attributes`. Its
id is in the message id header, because a retry repeats it; its position is its sequence in the stream. Neither is part
of the body.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import Enum
from typing import Any, Final

from purveyor.model import json_fields
from purveyor.model.errors import InvalidInput
from purveyor.model.json_fields import Json

KEY_FIELDS: Final = ("uuid", "univentionObjectIdentifier", "entryUUID", "id", "dn")
"""The fields that can be the key of an object; the first one found counts."""

SUBJECT: Final = "incoming"
"""The subject on which the API, the CLI and the outbox publish events."""
LDIF_SUBJECT: Final = "incoming.ldif"
"""The subject on which the transform publishes events."""

_LINE_BREAKS: Final = frozenset("\x85\u2028\u2029")


class Operation(Enum):
    """What happened to the object."""

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
        """What happened, derived from old and new."""
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

"""An event: one change of one object, as it lies in `stream:incoming` for dispatch, archive and every subscriber.

Its body there is JSON: `publisher_name`, `ts`, `realm`, `topic`, `body {old, new}` and, if given, `key` and
`attributes`. Its id travels in the message id header, because a retry repeats it; its position is its sequence in the
stream. Both are no part of the body.
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
"""Where the key of an object is looked for, in this order."""

SUBJECT: Final = "incoming"
"""Where the API, the command line and the outbox publish events."""
LDIF_SUBJECT: Final = "incoming.ldif"
"""Where the transform publishes them."""

_LINE_BREAKS: Final = frozenset("\x85\u2028\u2029")


class Operation(Enum):
    """What happened to the object."""

    CREATE = "create"
    MODIFY = "modify"
    DELETE = "delete"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One change. `old` is empty for a new object, `new` for a deleted one; never both."""

    publisher_name: str
    ts: datetime
    realm: str
    topic: str
    old: Mapping[str, Any] = field(default_factory=dict)
    new: Mapping[str, Any] = field(default_factory=dict)
    key: str | None = None
    """The key that the publisher gave; `object_key` is the one that counts."""
    attributes: Mapping[str, str] = field(default_factory=dict)

    @property
    def object_key(self) -> str | None:
        """Which object it is about, if that can be told."""
        return event_key(self.new, self.old, given=self.key)

    @property
    def operation(self) -> Operation:
        """What happened, as old and new tell it."""
        if not self.new:
            return Operation.DELETE
        return Operation.MODIFY if self.old else Operation.CREATE

    def to_json(self) -> Json:
        """As it lies in the queue; what is not given is left out."""
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
        """Checked; InvalidInput names the field that is wrong. Fields it does not know are ignored.

        `old` or `new` may be left out and is empty then; a time without a zone is in UTC.
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
            realm=check_word(json_fields.text(fields, "realm", "event"), "realm"),
            topic=check_word(json_fields.text(fields, "topic", "event"), "topic"),
            old=old,
            new=new,
            key=None if fields.get("key") is None else json_fields.text(fields, "key", "event"),
            attributes=attributes,
        )

    def encode(self) -> bytes:
        """The bytes of its message."""
        return json_fields.dump(self.to_json())

    @classmethod
    def decode(cls, data: bytes | str) -> "Event":
        """From the bytes of a message, or a line of text."""
        return cls.from_json(json_fields.parse(data, "event"))


def event_key(new: Mapping[str, Any], old: Mapping[str, Any], *, given: str | None = None) -> str | None:
    """Which object an event is about: the key given, else the first of `KEY_FIELDS` in new, then the first in old.

    Only a string that is not empty, or a whole number, can be a key.

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


def check_word(word: str, what: str) -> str:
    """A realm or topic: not empty, no control characters or line breaks (in which regular expressions disagree)."""
    if not word:
        raise InvalidInput(f"the {what} is empty", fix="give one, such as udm or users/user")
    bad = next((ch for ch in word if ord(ch) < 32 or ord(ch) == 127 or ch in _LINE_BREAKS), None)
    if bad is not None:
        raise InvalidInput(f"the {what} {word!r} holds the control character {bad!r}", fix="leave it out")
    return word

"""The label of a message in tables: its topic and its key, read from its body. Pure."""

import json
from dataclasses import dataclass
from typing import Final

from purveyor.model.event import event_key

_MAX_BYTES: Final = 262_144
"""A larger body is not parsed for a table, which pages draw every second."""


@dataclass(frozen=True, slots=True)
class MessageLabel:
    """The topic, as `realm:topic`, and the key of the object; None where the message has none."""

    topic: str | None = None
    key: str | None = None


def read_label(data: bytes) -> MessageLabel:
    """Return the topic and the key of an event, the name of a job or control event, or the DN of an LDIF record.

    >>> read_label(b'{"realm": "udm", "topic": "users/user", "body": {"old": {}, "new": {"uuid": "u-1"}}}')
    MessageLabel(topic='udm:users/user', key='u-1')
    >>> read_label(b'{"dn": "cn=a", "change": "add"}'), read_label(b"no JSON")
    (MessageLabel(topic=None, key='cn=a'), MessageLabel(topic=None, key=None))
    """
    if len(data) > _MAX_BYTES:
        return MessageLabel()
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return MessageLabel()
    if not isinstance(found, dict):
        return MessageLabel()
    realm, topic = found.get("realm"), found.get("topic")
    if isinstance(realm, str) and isinstance(topic, str):
        body = found.get("body")
        old, new = (body.get("old"), body.get("new")) if isinstance(body, dict) else (None, None)
        given = found.get("key")
        key = event_key(
            new if isinstance(new, dict) else {},
            old if isinstance(old, dict) else {},
            given=given if isinstance(given, str) else None,
        )
        return MessageLabel(f"{realm}:{topic}", key)
    return MessageLabel(key=next((found[name] for name in ("name", "dn") if isinstance(found.get(name), str)), None))

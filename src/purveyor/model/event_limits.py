"""The limits of an event, checked once where it enters: by the HTTP API, the CLI and the transform. Pure.

Every part can store, match, deliver and archive an event that passes `encode_checked`. Readers use `Event.decode`,
which is more lenient: an event that an older version accepted is still delivered, or parked.

| what | at most |
|---|---|
| `realm`, `publisher_name`, the id, the name of an attribute | 256 bytes of UTF-8 |
| `topic`, the key, the value of an attribute | 1024 bytes |
| attributes | 100 |
| the name of a field in `old` or `new` | 4096 bytes |
| levels of objects and lists in `old` or `new` | 100 |
| a number | the range of a double (about 1.8e308), also for a whole number |
| `ts` | the years 1900 to 2261, in UTC |

None of the texts in the first two rows holds a control character or a line break. No text anywhere holds half of a
surrogate pair, which is no character and has no UTF-8.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from purveyor.model import json_fields
from purveyor.model.errors import InvalidInput
from purveyor.model.event import Event
from purveyor.model.json_fields import check_json, check_optional_text, check_surrogates, check_text

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


def encode_checked(event: Event) -> bytes:
    """Return the body of the message for an event, or raise InvalidInput that names the field beyond its limits."""
    check_json(event.old, "body.old")
    check_json(event.new, "body.new")
    check_realm_topic(event.realm, event.topic)
    check_text(event.publisher_name, "publisher_name", LONGEST_PUBLISHER_NAME_BYTES)
    _check_key(event)
    _check_attributes(event.attributes)
    if not EARLIEST_TS <= event.ts <= LATEST_TS:
        raise InvalidInput(f"ts is {event.ts.isoformat()}", fix="give a time from the year 1900 to the year 2261")
    try:
        return json_fields.dump_utf8(event.to_json())
    except UnicodeEncodeError:
        check_surrogates({"old": event.old, "new": event.new}, "body")
        raise


def check_realm_topic(realm: str, topic: str) -> None:
    """Raise InvalidInput if a realm or a topic is beyond its limits."""
    check_text(realm, "realm", LONGEST_REALM_BYTES)
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

"""The body and headers of a push request, in one of three formats. Pure.

| format | body | metadata |
|---|---|---|
| `pubsub` | JSON around the message, its data in base64 | in the JSON |
| `raw` | the event | headers `x-purveyor-...` |
| `cloudevents` | the event | headers `ce-...`, binary mode of CloudEvents 1.0 |
"""

import binascii
import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, assert_never
from urllib.parse import quote

from purveyor.delivery.transitions import DeliveredMessage
from purveyor.jetstream.headers import EVENT_ID, first
from purveyor.model import json_fields
from purveyor.model.errors import InvalidInput
from purveyor.model.event import event_key
from purveyor.model.push_config import PushFormat

CONTENT_TYPE: Final = "application/json"
"""All formats are JSON: the event, or the JSON object around it."""
_PLAIN_CHARACTERS: Final = frozenset(map(chr, range(0x21, 0x7F))) - {'"', "%"}
"""Characters that a header carries as they are; all others are percent-encoded, as CloudEvents requires."""
_SAFE_CHARACTERS: Final = "".join(sorted(_PLAIN_CHARACTERS))
_MAX_QUOTED_CHARACTERS: Final = 100
"""An error message quotes at most this many characters of a text."""
_ID_HEADERS: Final = ("x-purveyor-id", "ce-id")
"""Headers that carry the id of an envelope, which is percent-encoded already: it is signed in that form."""
_dumps = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode
_text_json = json.encoder.encode_basestring_ascii


class Envelope(NamedTuple):
    """The metadata of a message. Texts come from the event, and are empty if it has none."""

    id: str
    realm: str
    topic: str
    time: str
    key: str | None
    attributes: Mapping[str, Any]
    """The values are strings in an event that the API accepted."""


def read_envelope(message: DeliveredMessage, subscription: str) -> Envelope:
    """Read the metadata of a message. Its id is the same in every attempt, and no other event has it.

    Two logins can give their events the same id, so the position of the event is a part of the id.
    """
    given = first(message.headers, EVENT_ID)
    id_ = header_text(given, errors="surrogateescape") if given else f"{subscription}-{message.sequence}"
    if given and message.position is not None:
        id_ = f"{id_}@{message.position}"
    event = _event(message.data)
    attributes = event.get("attributes")
    return Envelope(
        id=id_,
        realm=_text(event, "realm"),
        topic=_text(event, "topic"),
        time=_text(event, "ts"),
        key=_key(event),
        attributes=attributes if isinstance(attributes, dict) else {},
    )


def message_key(data: bytes) -> str | None:
    """Return the key of a message, as the endpoint receives it."""
    return _key(_event(data))


def encode(
    format_: PushFormat, message: DeliveredMessage, envelope: Envelope, subscription: str
) -> tuple[bytes, bytes]:
    """Return body and header lines; raise InvalidInput if the format cannot carry the message."""
    try:
        match format_:
            case PushFormat.PUBSUB:
                return _encode_pubsub(message, envelope, subscription), b""
            case PushFormat.RAW:
                return message.data, _encode_headers(_raw_headers(message, envelope, subscription))
            case PushFormat.CLOUDEVENTS:
                return message.data, _encode_headers(_cloudevents_headers(message, envelope, subscription))
            case _:
                assert_never(format_)
    except UnicodeEncodeError as error:
        text = error.object[:_MAX_QUOTED_CHARACTERS]
        raise InvalidInput(f"{text!r} holds half of a surrogate pair, which a header cannot carry") from None


def _encode_pubsub(message: DeliveredMessage, envelope: Envelope, subscription: str) -> bytes:
    # Built by hand: this runs for every message, and takes a third of the time of a JSON encoder.
    more = "".join(f",{_text_json(name)}:{_dumps(value)}" for name, value in envelope.attributes.items())
    key = "" if envelope.key is None else f',"orderingKey":{_text_json(envelope.key)}'
    about = (
        f'","attributes":{{"realm":{_text_json(envelope.realm)},"topic":{_text_json(envelope.topic)}{more}}}'
        f',"messageId":{_text_json(envelope.id)},"publishTime":{_text_json(envelope.time)}{key}}}'
        f',"subscription":{_text_json(subscription)},"deliveryAttempt":{message.num_delivered}}}'
    )
    return b"".join((b'{"message":{"data":"', binascii.b2a_base64(message.data, newline=False), about.encode()))


def _raw_headers(message: DeliveredMessage, envelope: Envelope, subscription: str) -> dict[str, str]:
    found = {
        "x-purveyor-id": envelope.id,
        "x-purveyor-subscription": subscription,
        "x-purveyor-realm": envelope.realm,
        "x-purveyor-topic": envelope.topic,
        "x-purveyor-time": envelope.time,
        "x-purveyor-attempt": str(message.num_delivered),
    }
    if message.position is not None:
        found["x-purveyor-position"] = str(message.position)
    if envelope.key is not None:
        found["x-purveyor-key"] = envelope.key
    for name, value in envelope.attributes.items():
        found[f"x-purveyor-attribute-{quote(name, safe='')}"] = _string(name, value)
    return found


def _cloudevents_headers(message: DeliveredMessage, envelope: Envelope, subscription: str) -> dict[str, str]:
    found = {
        "ce-specversion": "1.0",
        "ce-id": envelope.id,
        "ce-source": f"/{quote(envelope.realm)}/{quote(envelope.topic)}",
        "ce-type": f"{envelope.realm}.{envelope.topic.replace('/', '.')}",
        "ce-time": envelope.time,
        "ce-subscription": subscription,
        "ce-deliveryattempt": str(message.num_delivered),
    }
    if envelope.key is not None:
        found["ce-subject"] = envelope.key
        found["ce-partitionkey"] = envelope.key
    if message.position is not None:
        found["ce-position"] = str(message.position)
    for name, value in envelope.attributes.items():
        # A CloudEvent allows only lower-case letters and digits in the names of extensions.
        if name.isascii() and name.isalnum() and name.islower() and f"ce-{name}" not in found:
            found[f"ce-{name}"] = _string(name, value)
    return {name: value for name, value in found.items() if value}


def _string(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidInput(
            f"the attribute {name[:_MAX_QUOTED_CHARACTERS]!r} is {json_fields.describe_type(value)}, not a string"
        )
    return value


def header_text(text: str, *, errors: str = "strict") -> str:
    """Percent-encode a text as a header value.

    >>> header_text("a/1"), header_text("Köln: 1")
    ('a/1', 'K%C3%B6ln:%201')
    """
    return text if _PLAIN_CHARACTERS.issuperset(text) else quote(text, safe=_SAFE_CHARACTERS, errors=errors)


def _encode_headers(headers: Mapping[str, str]) -> bytes:
    encoded = ((name, value if name in _ID_HEADERS else header_text(value)) for name, value in headers.items())
    return "".join(f"{name}: {value}\r\n" for name, value in encoded).encode()


def _event(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data.decode())  # decoded here: json.loads would first detect the encoding of bytes
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _text(event: Mapping[str, Any], name: str) -> str:
    value = event.get(name)
    return value if isinstance(value, str) else ""


def _key(event: Mapping[str, Any]) -> str | None:
    given = event.get("key")
    if isinstance(given, str) and given:
        return given
    body = event.get("body")
    sides = body if isinstance(body, dict) else {}
    new, old = sides.get("new"), sides.get("old")
    return event_key(new if isinstance(new, dict) else {}, old if isinstance(old, dict) else {})

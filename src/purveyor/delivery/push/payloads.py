"""A message as an endpoint gets it: the body and the headers of one POST, in one of three forms. Pure.

| form | body | what is known about it |
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

from purveyor.delivery.transitions import Delivered
from purveyor.jetstream.headers import EVENT_ID, first
from purveyor.model import json_fields
from purveyor.model.errors import InvalidInput
from purveyor.model.event import event_key
from purveyor.model.push_config import PushFormat

CONTENT_TYPE: Final = "application/json"
"""Of all forms: an event is JSON, and so is what is wrapped around it."""
_PLAIN: Final = frozenset(map(chr, range(0x21, 0x7F))) - {'"', "%"}
"""What stands for itself in a header; anything else is percent-encoded, as CloudEvents say."""
_SAFE: Final = "".join(sorted(_PLAIN))
_SHOWN: Final = 100
"""How many characters of a text an error quotes."""
_IDS: Final = ("x-purveyor-id", "ce-id")
"""Headers whose value is the id of a letter, which is percent-encoded already: it is signed in that form."""
_dumps = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode
_text_json = json.encoder.encode_basestring_ascii


class Letter(NamedTuple):
    """What is known about a message. Texts are as the event has them, empty where it has none."""

    id: str
    realm: str
    topic: str
    time: str
    key: str | None
    attributes: Mapping[str, Any]
    """Strings, in an event that the API took."""


def read(message: Delivered, subscription: str) -> Letter:
    """What an endpoint is told. The id is that of the event, and the same however often it is sent."""
    given = first(message.headers, EVENT_ID)
    id_ = header_text(given, errors="surrogateescape") if given else f"{subscription}-{message.sequence}"
    event = _event(message.data)
    attributes = event.get("attributes")
    return Letter(
        id=id_,
        realm=_text(event, "realm"),
        topic=_text(event, "topic"),
        time=_text(event, "ts"),
        key=_key(event),
        attributes=attributes if isinstance(attributes, dict) else {},
    )


def key_of(data: bytes) -> str | None:
    """Which object a message is about, as an endpoint is told."""
    return _key(_event(data))


def write(form: PushFormat, message: Delivered, letter: Letter, subscription: str) -> tuple[bytes, bytes]:
    """Body and header lines. InvalidInput says what the form cannot carry."""
    try:
        match form:
            case PushFormat.PUBSUB:
                return _wrapped(message, letter, subscription), b""
            case PushFormat.RAW:
                return message.data, _lines(_raw(message, letter, subscription))
            case PushFormat.CLOUDEVENTS:
                return message.data, _lines(_cloud_event(message, letter, subscription))
            case _:
                assert_never(form)
    except UnicodeEncodeError as error:
        text = error.object[:_SHOWN]
        raise InvalidInput(f"{text!r} holds half of a surrogate pair, which a header cannot carry") from None


def _wrapped(message: Delivered, letter: Letter, subscription: str) -> bytes:
    # By hand: it is done for every message, and takes a third of the time.
    more = "".join(f",{_text_json(name)}:{_dumps(value)}" for name, value in letter.attributes.items())
    key = "" if letter.key is None else f',"orderingKey":{_text_json(letter.key)}'
    about = (
        f'","attributes":{{"realm":{_text_json(letter.realm)},"topic":{_text_json(letter.topic)}{more}}}'
        f',"messageId":{_text_json(letter.id)},"publishTime":{_text_json(letter.time)}{key}}}'
        f',"subscription":{_text_json(subscription)},"deliveryAttempt":{message.num_delivered}}}'
    )
    return b"".join((b'{"message":{"data":"', binascii.b2a_base64(message.data, newline=False), about.encode()))


def _raw(message: Delivered, letter: Letter, subscription: str) -> dict[str, str]:
    found = {
        "x-purveyor-id": letter.id,
        "x-purveyor-subscription": subscription,
        "x-purveyor-realm": letter.realm,
        "x-purveyor-topic": letter.topic,
        "x-purveyor-time": letter.time,
        "x-purveyor-attempt": str(message.num_delivered),
    }
    if message.position is not None:
        found["x-purveyor-position"] = str(message.position)
    if letter.key is not None:
        found["x-purveyor-key"] = letter.key
    for name, value in letter.attributes.items():
        found[f"x-purveyor-attribute-{quote(name, safe='')}"] = _string(name, value)
    return found


def _cloud_event(message: Delivered, letter: Letter, subscription: str) -> dict[str, str]:
    found = {
        "ce-specversion": "1.0",
        "ce-id": letter.id,
        "ce-source": f"/{quote(letter.realm)}/{quote(letter.topic)}",
        "ce-type": f"{letter.realm}.{letter.topic.replace('/', '.')}",
        "ce-time": letter.time,
        "ce-subscription": subscription,
        "ce-deliveryattempt": str(message.num_delivered),
    }
    if letter.key is not None:
        found["ce-subject"] = letter.key
        found["ce-partitionkey"] = letter.key
    if message.position is not None:
        found["ce-position"] = str(message.position)
    for name, value in letter.attributes.items():
        # Names of extensions are lower-case letters and digits; others have no place in a CloudEvent.
        if name.isascii() and name.isalnum() and name.islower() and f"ce-{name}" not in found:
            found[f"ce-{name}"] = _string(name, value)
    return {name: value for name, value in found.items() if value}


def _string(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidInput(f"the attribute {name[:_SHOWN]!r} is {json_fields.kind(value)}, and no string")
    return value


def header_text(text: str, *, errors: str = "strict") -> str:
    """Any text as the value of a header: what is not plain is percent-encoded.

    >>> header_text("a/1"), header_text("Köln: 1")
    ('a/1', 'K%C3%B6ln:%201')
    """
    return text if _PLAIN.issuperset(text) else quote(text, safe=_SAFE, errors=errors)


def _lines(headers: Mapping[str, str]) -> bytes:
    told = ((name, value if name in _IDS else header_text(value)) for name, value in headers.items())
    return "".join(f"{name}: {value}\r\n" for name, value in told).encode()


def _event(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data.decode())  # as text: given bytes, it would find out first what they are
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

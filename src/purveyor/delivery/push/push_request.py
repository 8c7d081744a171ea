"""A push request: its body and headers in one of three formats, its signature, and the secrets that sign it.

| format | body | metadata |
|---|---|---|
| `pubsub` | JSON around the message, its data in base64 | in the JSON |
| `raw` | the event | headers `x-purveyor-...` |
| `cloudevents` | the event | headers `ce-...`, binary mode of CloudEvents 1.0 |

Requests are signed after the Standard Webhooks scheme: an endpoint can verify the sender and the body. While a secret
is being changed, requests are signed with the new and the old one: an endpoint may know either.

A stored secret is encrypted with a key file in the data directory; the worker decrypts it. A secret may also stay in
the environment of the push worker; then a definition only names the variable.
"""

import base64
import binascii
import hmac
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, assert_never
from urllib.parse import quote

from cryptography.fernet import Fernet, InvalidToken

from purveyor.delivery.transitions import DeliveredMessage
from purveyor.jetstream.headers import first
from purveyor.model import json_fields
from purveyor.model.delivery_policy import FROM_ENVIRONMENT, SEALED, Push, PushFormat, secret_variable
from purveyor.model.errors import InvalidConfig, InvalidInput, SetupError
from purveyor.model.event import event_key
from purveyor.model.message_headers import EVENT_ID

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
KEY_FILE_NAME: Final = "push.key"
SIGNING_SECRET_PREFIX: Final = "whsec_"
_MIN_KEY_BYTES: Final = 24
_MAX_KEY_BYTES: Final = 64


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
    event = _parse_event(message.data)
    attributes = event.get("attributes")
    return Envelope(
        id=id_,
        realm=_text_of_event(event, "realm"),
        topic=_text_of_event(event, "topic"),
        time=_text_of_event(event, "ts"),
        key=_key_of_event(event),
        attributes=attributes if isinstance(attributes, dict) else {},
    )


def message_key(data: bytes) -> str | None:
    """Return the key of a message, as the endpoint receives it."""
    return _key_of_event(_parse_event(data))


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


def _parse_event(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data.decode())  # decoded here: json.loads would first detect the encoding of bytes
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _text_of_event(event: Mapping[str, Any], name: str) -> str:
    value = event.get(name)
    return value if isinstance(value, str) else ""


def _key_of_event(event: Mapping[str, Any]) -> str | None:
    given = event.get("key")
    if isinstance(given, str) and given:
        return given
    body = event.get("body")
    sides = body if isinstance(body, dict) else {}
    new, old = sides.get("new"), sides.get("old")
    return event_key(new if isinstance(new, dict) else {}, old if isinstance(old, dict) else {})


class SecretCipher:
    """Encrypts and decrypts secrets. It looks up `env:PURVEYOR_PUSH_SECRET_...` in `environment`."""

    def __init__(self, key: str, environment: Mapping[str, str] | None = None) -> None:
        try:
            self._fernet = Fernet(key)
        except ValueError:
            raise InvalidConfig(
                "the key for push secrets is not a Fernet key",
                fix="give 32 bytes in URL-safe base64, or leave it out and Purveyor creates one",
            ) from None
        self._environment = os.environ if environment is None else environment

    @classmethod
    def from_directory(cls, directory: Path) -> "SecretCipher":
        """Use the key file of a directory, readable by its owner only; create it if there is none.

        When several processes create it at once, one succeeds and all use its key.
        """
        path = directory / KEY_FILE_NAME
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                _create_key_file(path, Fernet.generate_key())
            return cls(path.read_text("ascii").strip())
        except (OSError, UnicodeDecodeError) as error:
            raise SetupError(f"cannot use the key for push secrets in {path}: {error}", fix="check the file") from error

    def encrypt(self, secret: str) -> str:
        """Encrypt a secret and return the reference that a definition stores."""
        return SEALED + self._fernet.encrypt(secret.encode()).decode()

    def decrypt(self, reference: str) -> str:
        """Return the secret of a reference; raise InvalidInput if it is not available."""
        if reference.startswith(FROM_ENVIRONMENT):
            name = secret_variable(reference)
            found = self._environment.get(name)
            if not found:
                raise InvalidInput(f"the environment variable {name} is not set", fix="set it for the push worker")
            return found
        try:
            return self._fernet.decrypt(reference.removeprefix(SEALED)).decode()
        except (InvalidToken, UnicodeDecodeError):
            raise InvalidInput(
                "a secret was encrypted with another key",
                fix=f"use the {KEY_FILE_NAME} of the data directory it was given in, or give the secret again",
            ) from None


def _create_key_file(path: Path, key: bytes) -> None:
    """Write a temporary file and link it to the path, so that the key file is complete; keep an existing one."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(fd, key)
        os.fsync(fd)
    finally:
        os.close(fd)
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass  # another process was faster: all use its key
    finally:
        temporary.unlink()


def generate_secret() -> str:
    """Generate a random secret."""
    return SIGNING_SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def parse_signing_key(secret: str) -> bytes:
    """Return the key in a secret; raise InvalidInput if it is malformed."""
    try:
        if not secret.startswith(SIGNING_SECRET_PREFIX):
            raise ValueError("prefix")
        text = secret.removeprefix(SIGNING_SECRET_PREFIX)
        key = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (ValueError, binascii.Error):
        key = b""
    if not _MIN_KEY_BYTES <= len(key) <= _MAX_KEY_BYTES:
        size = f"{_MIN_KEY_BYTES} to {_MAX_KEY_BYTES} bytes"
        raise InvalidInput(
            "not a signing secret", fix=f"give {SIGNING_SECRET_PREFIX} and {size} in base64, or generate one"
        )
    return key


class Signer:
    """Signs requests with one or several keys; without a key requests are not signed."""

    def __init__(self, keys: tuple[bytes, ...]) -> None:
        self._keys = keys

    def headers(self, message_id: str, timestamp: int, body: bytes) -> bytes:
        """Return the header lines: always id and time, by which an endpoint detects duplicates; then signatures."""
        head = f"webhook-id: {message_id}\r\nwebhook-timestamp: {timestamp}\r\n".encode()
        if not self._keys:
            return head
        signed = b"%s.%d.%s" % (message_id.encode(), timestamp, body)
        signatures = b" ".join(
            b"v1," + binascii.b2a_base64(hmac.digest(key, signed, "sha256"), newline=False) for key in self._keys
        )
        return head + b"webhook-signature: " + signatures + b"\r\n"


@dataclass(frozen=True, slots=True)
class PushSecrets:
    """The decrypted secrets of a subscription."""

    keys: tuple[bytes, ...] = ()
    old_keys: tuple[bytes, ...] = ()
    """Keys that are valid until `old_until`."""
    old_until: float = 0.0
    bearer_token: str | None = None

    @classmethod
    def decrypt(cls, push: Push, cipher: SecretCipher) -> "PushSecrets":
        """Decrypt the secrets of a definition; raise InvalidInput if one is not available."""
        token = None if push.bearer_token is None else cipher.decrypt(push.bearer_token)
        if token is not None and not (token.isascii() and token.isprintable()):
            raise InvalidInput("a header cannot carry this bearer token", fix="use printable ASCII")
        until = push.old_secret_until
        return cls(
            keys=() if push.secret is None else (parse_signing_key(cipher.decrypt(push.secret)),),
            old_keys=() if push.old_secret is None else (parse_signing_key(cipher.decrypt(push.old_secret)),),
            old_until=0.0 if until is None else until.timestamp(),
            bearer_token=token,
        )

    def signer(self, now: float) -> Signer:
        """Return a signer with all keys that are valid at a Unix time."""
        return Signer(self.keys + (self.old_keys if now < self.old_until else ()))

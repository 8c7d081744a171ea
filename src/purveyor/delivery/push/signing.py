"""Signatures of push requests after the Standard Webhooks scheme: an endpoint can verify the sender and the body.

While a secret is being changed, requests are signed with the new and the old one: an endpoint may know either.
"""

import base64
import binascii
import hmac
import secrets
from dataclasses import dataclass
from typing import Final

from purveyor.delivery.push.secret_encryption import SecretCipher
from purveyor.model.errors import InvalidInput
from purveyor.model.push_config import Push

SECRET_PREFIX: Final = "whsec_"
_MIN_KEY_BYTES: Final = 24
_MAX_KEY_BYTES: Final = 64


def generate_secret() -> str:
    """Generate a random secret."""
    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def parse_signing_key(secret: str) -> bytes:
    """Return the key in a secret; raise InvalidInput if it is malformed."""
    try:
        if not secret.startswith(SECRET_PREFIX):
            raise ValueError("prefix")
        text = secret.removeprefix(SECRET_PREFIX)
        key = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (ValueError, binascii.Error):
        key = b""
    if not _MIN_KEY_BYTES <= len(key) <= _MAX_KEY_BYTES:
        raise InvalidInput(
            "not a signing secret",
            fix=f"give {SECRET_PREFIX} and {_MIN_KEY_BYTES} to {_MAX_KEY_BYTES} bytes in base64, or generate one",
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

"""Signatures by the Standard Webhooks scheme, so that an endpoint knows who sent a message, and that nobody changed it.

While a secret is changed, messages are signed with both: an endpoint may know either.
"""

import base64
import binascii
import hmac
import secrets
from typing import Final

from purveyor.model.errors import InvalidInput

PREFIX: Final = "whsec_"
_SHORTEST: Final = 24
_LONGEST: Final = 64


def new_secret() -> str:
    """A secret that nobody has."""
    return PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def key_of(secret: str) -> bytes:
    """The key in a secret; InvalidInput if it is none."""
    try:
        if not secret.startswith(PREFIX):
            raise ValueError("prefix")
        text = secret.removeprefix(PREFIX)
        key = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (ValueError, binascii.Error):
        key = b""
    if not _SHORTEST <= len(key) <= _LONGEST:
        raise InvalidInput(
            "not a secret to sign with",
            fix=f"give {PREFIX} and {_SHORTEST} to {_LONGEST} bytes in base64, or have one made",
        )
    return key


class Signer:
    """Signs with one or several keys; with none, messages go unsigned."""

    def __init__(self, keys: tuple[bytes, ...]) -> None:
        self._keys = keys

    def headers(self, message_id: str, timestamp: int, body: bytes) -> bytes:
        """The lines of a request: id and time always, which tell a message that comes twice; signatures if any."""
        head = f"webhook-id: {message_id}\r\nwebhook-timestamp: {timestamp}\r\n".encode()
        if not self._keys:
            return head
        signed = b"%s.%d.%s" % (message_id.encode(), timestamp, body)
        signatures = b" ".join(
            b"v1," + binascii.b2a_base64(hmac.digest(key, signed, "sha256"), newline=False) for key in self._keys
        )
        return head + b"webhook-signature: " + signatures + b"\r\n"

"""The secrets of push: encrypted at rest, decrypted by the worker, used to sign requests.

A stored secret is encrypted with a key file in the data directory. A secret may also stay in the environment of the
push worker; then a definition only names the variable.

Requests are signed after the Standard Webhooks scheme: an endpoint can verify the sender and the body. While a secret
is being changed, requests are signed with the new and the old one: an endpoint may know either.
"""

import base64
import binascii
import hmac
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography.fernet import Fernet, InvalidToken

from purveyor.model.errors import InvalidConfig, InvalidInput, SetupError
from purveyor.model.push_config import FROM_ENVIRONMENT, SEALED, Push, secret_variable

KEY_FILE_NAME: Final = "push.key"
SIGNING_SECRET_PREFIX: Final = "whsec_"
_MIN_KEY_BYTES: Final = 24
_MAX_KEY_BYTES: Final = 64


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

"""Encryption of push secrets at rest, with a key file in the data directory.

A secret may also stay in the environment of the push worker; then a definition only names the variable.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from cryptography.fernet import Fernet, InvalidToken

from purveyor.model.errors import InvalidConfig, InvalidInput, SetupError
from purveyor.model.push_config import FROM_ENVIRONMENT, SEALED, secret_variable

KEY_FILE_NAME: Final = "push.key"


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

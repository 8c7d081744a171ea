"""Secrets at rest: encrypted with a key that lies beside the data, or left in the environment and named there."""

import os
from collections.abc import Mapping
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken

from purveyor.model.errors import InvalidConfig, InvalidInput, SetupError
from purveyor.model.push_config import FROM_ENVIRONMENT, SEALED, secret_variable

FILE_NAME = "push.key"


class SecretBox:
    """Seals and opens secrets. `environment` is where `env:PURVEYOR_PUSH_SECRET_...` is looked up."""

    def __init__(self, key: str, environment: Mapping[str, str] | None = None) -> None:
        try:
            self._fernet = Fernet(key)
        except ValueError:
            raise InvalidConfig(
                "the key of push secrets is none", fix="32 bytes in URL-safe base64; or leave it out to have one made"
            ) from None
        self._environment = os.environ if environment is None else environment

    @classmethod
    def at(cls, directory: Path) -> "SecretBox":
        """With the key in a directory, for its owner alone; made with the first use. Of many at once one makes it."""
        path = directory / FILE_NAME
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                _create(path, Fernet.generate_key())
            return cls(path.read_text("ascii").strip())
        except (OSError, UnicodeDecodeError) as error:
            raise SetupError(f"the key of push secrets in {path} cannot be used: {error}", fix="check it") from error

    def seal(self, secret: str) -> str:
        """A reference for a definition."""
        return SEALED + self._fernet.encrypt(secret.encode()).decode()

    def open(self, reference: str) -> str:
        """The secret that is meant; InvalidInput if it cannot be had."""
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
                fix=f"use the {FILE_NAME} of the data directory it was given in, or give the secret again",
            ) from None


def _create(path: Path, key: bytes) -> None:
    """Whole or not at all: written aside and linked, which fails if somebody was quicker."""
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(fd, key)
        os.fsync(fd)
    finally:
        os.close(fd)
    try:
        os.link(aside, path)
    except FileExistsError:
        pass  # the other one's is used by all
    finally:
        aside.unlink()

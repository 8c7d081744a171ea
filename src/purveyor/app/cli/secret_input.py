"""Passwords and other secrets for a command: read from a file, typed, or generated and shown once. Never a flag."""

import secrets
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from purveyor.model.errors import InvalidInput

_MAX_PASSWORD_CHARACTERS = 1024
STDIN = "-"

PasswordFile = Annotated[
    str | None,
    typer.Option(
        "--password-file", metavar="FILE|-", help="Read the password for the API from the first line of a file."
    ),
]
AskPassword = Annotated[bool, typer.Option("--ask-password", help="Ask for the password.")]
GeneratePassword = Annotated[bool, typer.Option("--generate-password", help="Generate the password, and show it once.")]


@dataclass(frozen=True, slots=True)
class Password:
    """The chosen password. Only a generated one is shown."""

    text: str = field(repr=False)
    generated: bool = False

    def password_json(self) -> dict[str, str]:
        """Return a generated password for JSON output."""
        return {"password": self.text} if self.generated else {}

    def password_line(self) -> str:
        """Return a generated password as a line of text."""
        return f"The password, which is not shown again: {self.text}" if self.generated else ""


def choose_password(file: str | None, *, ask: bool, generate: bool) -> Password | None:
    """Return the password that the flags choose; None without such flags."""
    if (file is not None) + ask + generate > 1:
        raise InvalidInput(
            "more than one password is given", fix="give one of --password-file, --ask-password, --generate-password"
        )
    if generate:
        return Password(secrets.token_urlsafe(24), generated=True)
    if ask:
        if not sys.stdin.isatty():
            raise InvalidInput("there is no terminal to ask for a password on", fix="use --password-file")
        return _check_password(typer.prompt("Password", hide_input=True, confirmation_prompt=True, err=True))
    return None if file is None else _check_password(read_first_line(file))


def read_first_line(file: str, what: str = "password", flag: str = "--password-file") -> str:
    """Read a secret from the first line of a file, or of standard input for `-`."""
    try:
        if file == STDIN:
            return sys.stdin.readline().rstrip("\r\n")
        with Path(file).open(encoding="utf-8") as lines:
            return lines.readline().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"no {what} can be read from {file}: {error}", fix=f"check {flag}") from None


def _check_password(text: str) -> Password:
    if not 0 < len(text) <= _MAX_PASSWORD_CHARACTERS:
        raise InvalidInput("the password is empty or too long", fix=f"give 1 to {_MAX_PASSWORD_CHARACTERS} characters")
    return Password(text)

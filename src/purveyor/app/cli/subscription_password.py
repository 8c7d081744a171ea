"""`purveyor subscription password`: set a password that is read from a file, typed, or generated and shown once."""

import contextlib
import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from purveyor.app.cli.context import Cli, JsonFlag
from purveyor.app.cli.output import write, write_json
from purveyor.app.cli.parsers import parse_duration
from purveyor.app.settings import Settings
from purveyor.delivery.credentials import Credentials, PasswordHasher
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.model.errors import InvalidInput, InvalidName
from purveyor.queues.client import Queues

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


def check_not_login(name: str, settings: Settings) -> None:
    """Raise InvalidName if a login of the settings has this name: a subscription logs in with its name."""
    own = (settings.admin_username, settings.events_username, settings.prefill_username)
    if name in {*own, *(each.username for each in settings.publishers)}:
        raise InvalidName(f"the name {name!r} belongs to a login of the settings", fix="choose another name")


@contextlib.contextmanager
def credentials(queues: Queues, replicas: int) -> Iterator[Credentials]:
    """Open the credentials with a thread pool for hashing."""
    hasher = PasswordHasher()
    try:
        yield Credentials(queues, hasher, replicas=replicas)
    finally:
        hasher.close()


def password(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The subscription.")],
    password_file: PasswordFile = None,
    ask_password: AskPassword = False,
    generate_password: GeneratePassword = False,
    keep: Annotated[
        str | None, typer.Option(metavar="DURATION", help="How long the last password stays valid.")
    ] = None,
    keep_tokens: Annotated[
        bool, typer.Option("--keep-tokens", help="Keep the tokens valid; else they end with the last password.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Set the password with which a subscription pulls its messages from the API.

    The tokens of the subscription end with its last password: at once, or after --keep. With --keep-tokens they stay
    valid.
    """
    cli = Cli.of(ctx, as_json)
    given = choose_password(password_file, ask=ask_password, generate=generate_password)
    if given is None:
        raise InvalidInput("no password is given", fix="give --password-file, --ask-password or --generate-password")
    seconds = 0.0 if keep is None else parse_duration(keep).total_seconds()
    settings = cli.settings()
    check_not_login(name, settings)

    async def work(queues: Queues) -> None:
        found = await Subscriptions(queues, replicas=settings.replicas).get(name)
        with credentials(queues, settings.replicas) as known:
            await known.set_password(name, found.incarnation, given.text, keep_seconds=seconds, keep_tokens=keep_tokens)

    cli.call(work)
    if cli.json:
        write_json({"name": name, **given.password_json()})
    else:
        write("\n".join(filter(None, (f"Set the password of {name}", given.password_line()))))


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

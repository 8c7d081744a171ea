"""The password of a subscription from the command line: read from a file, asked for, or made up and shown once."""

import contextlib
import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from purveyor.app.cli.context import Cli, JsonFlag
from purveyor.app.cli.parsers import parse_duration
from purveyor.app.cli.render import write, write_json
from purveyor.app.settings import Settings
from purveyor.delivery.credentials import Credentials
from purveyor.delivery.password_hashing import Hasher
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.model.errors import InvalidInput, InvalidName
from purveyor.queues.client import Queues

_LONGEST = 1024
STDIN = "-"

PasswordFile = Annotated[
    str | None,
    typer.Option("--password-file", metavar="FILE|-", help="Its password for the API: the first line of a file."),
]
AskPassword = Annotated[bool, typer.Option("--ask-password", help="Ask for its password.")]
GeneratePassword = Annotated[
    bool, typer.Option("--generate-password", help="Make up its password, and show it this once.")
]


@dataclass(frozen=True, slots=True)
class Password:
    """What was chosen. One that was made up is shown, and no other."""

    text: str = field(repr=False)
    generated: bool = False

    def shown(self) -> dict[str, str]:
        """For JSON."""
        return {"password": self.text} if self.generated else {}

    def line(self) -> str:
        """For people."""
        return f"Its password, which is not shown again: {self.text}" if self.generated else ""


def chosen_password(file: str | None, *, ask: bool, generate: bool) -> Password | None:
    """The password by the flags of a command; None without any."""
    if (file is not None) + ask + generate > 1:
        raise InvalidInput("more than one way to a password", fix="give one of the --...password flags")
    if generate:
        return Password(secrets.token_urlsafe(24), generated=True)
    if ask:
        if not sys.stdin.isatty():
            raise InvalidInput("there is no terminal to ask for a password on", fix="use --password-file")
        return _checked(typer.prompt("Password", hide_input=True, confirmation_prompt=True, err=True))
    return None if file is None else _checked(read_first_line(file))


def check_not_login(name: str, settings: Settings) -> None:
    """A subscription logs in with its name, so it cannot have that of a login of the settings."""
    own = (settings.admin_username, settings.events_username, settings.prefill_username)
    if name in {*own, *(each.username for each in settings.publishers)}:
        raise InvalidName(f"the name {name!r} is that of a login", fix="choose another name")


@contextlib.contextmanager
def credentials(queues: Queues, replicas: int) -> Iterator[Credentials]:
    """The credentials, with threads to hash in."""
    hasher = Hasher()
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
        str | None, typer.Option(metavar="DURATION", help="For so long the last password is valid as well.")
    ] = None,
    keep_tokens: Annotated[
        bool, typer.Option("--keep-tokens", help="Keep its tokens valid; without it, they end with the last password.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Give a subscription another password, or its first one: with it, it fetches its messages from the API.

    Its tokens end with the last password: at once, or after --keep. With --keep-tokens they stay valid.
    """
    cli = Cli.of(ctx, as_json)
    given = chosen_password(password_file, ask=ask_password, generate=generate_password)
    if given is None:
        raise InvalidInput("no password", fix="give --password-file, --ask-password or --generate-password")
    seconds = 0.0 if keep is None else parse_duration(keep).total_seconds()
    settings = cli.settings()
    check_not_login(name, settings)

    async def work(queues: Queues) -> None:
        found = await Subscriptions(queues, replicas=settings.replicas).get(name)
        with credentials(queues, settings.replicas) as known:
            await known.set_password(name, found.incarnation, given.text, keep_seconds=seconds, keep_tokens=keep_tokens)

    cli.call(work)
    if cli.json:
        write_json({"name": name, **given.shown()})
    else:
        write("\n".join(filter(None, (f"Set the password of {name}", given.line()))))


def read_first_line(file: str, what: str = "password", flag: str = "--password-file") -> str:
    """A secret from a file or, if that is `-`, from standard input."""
    try:
        if file == STDIN:
            return sys.stdin.readline().rstrip("\r\n")
        with Path(file).open(encoding="utf-8") as lines:
            return lines.readline().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"no {what} can be read from {file}: {error}", fix=f"check {flag}") from None


def _checked(text: str) -> Password:
    if not 0 < len(text) <= _LONGEST:
        raise InvalidInput("the password is empty or too long", fix=f"give 1 to {_LONGEST} characters")
    return Password(text)

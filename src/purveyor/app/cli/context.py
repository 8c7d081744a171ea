"""The context of a command: the settings in force, the form of its output, and a connection to the server."""

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from purveyor.app.settings import Settings, load
from purveyor.jetstream.address import Address
from purveyor.jetstream.server import find_running_server
from purveyor.model.errors import InvalidInput, ServerMissing
from purveyor.queues.client import Queues, connect

T = TypeVar("T")

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
YesFlag = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
StreamName = Annotated[str, typer.Argument(metavar="STREAM", help="The stream.")]
ConsumerName = Annotated[str, typer.Argument(metavar="NAME", help="The consumer.")]
Topics = Annotated[
    list[str] | None,
    typer.Option(
        "--topic",
        "-t",
        metavar="REALM:TOPIC",
        help="A topic: exact, or a regular expression that matches all of it; repeatable.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RootOptions:
    """The options that stand before the command."""

    flags: dict[str, object]
    config: Path | None = None
    json: bool = False
    timeout_seconds: float = 10


@dataclass(frozen=True, slots=True)
class Cli:
    """The settings, the connection and the output of a command."""

    root: RootOptions
    json: bool

    @classmethod
    def of(cls, ctx: typer.Context, as_json: bool = False) -> "Cli":
        """Return the context of a command; `--json` may stand before or after its name."""
        root: RootOptions = ctx.find_root().obj
        return cls(root, as_json or root.json)

    def settings(self, **flags: object) -> Settings:
        """Load the settings; flags of this command override them."""
        return load(self.root.flags | flags, config=self.root.config)

    def root_words(self) -> tuple[str, ...]:
        """Return the options before the command, for a child process. None of them is a secret: no flag takes one."""
        words: list[str] = []
        for name, value in self.root.flags.items():
            if value is not None:
                words += [f"--{name.replace('_', '-')}", str(value)]
        if self.root.config is not None:
            words += ["--config", str(self.root.config)]
        return tuple(words)

    def address(self, component: str | None = None) -> Address:
        """Return the address of the server that is set, else of the embedded server on the data directory.

        On the embedded server each component has its own NATS user; None is the user without restrictions.
        """
        settings = self.settings()
        found = settings.nats_address or find_running_server(settings.nats_dir, component)
        if found is None:
            alone = "" if settings.api_url is None else "; this command does not work over HTTP"
            raise ServerMissing(
                f"no NATS server is set, and none runs on {settings.nats_dir}{alone}",
                fix="start one with `purveyor serve nats`, or set PURVEYOR_NATS_URL",
            )
        return found

    def address_finder(self, component: str) -> Callable[[], Address]:
        """Return a function that finds the server again; raise ServerMissing at once if there is none now.

        An operator may restart the embedded server on another port. While it is away, the function returns the last
        address.
        """
        last = self.address(component)

        def find() -> Address:
            nonlocal last
            with contextlib.suppress(ServerMissing):
                last = self.address(component)
            return last

        return find

    def call(self, work: Callable[[Queues], Awaitable[T]], component: str | None = None) -> T:
        """Run the work of a command with a connection to the server."""
        address = self.address(component)

        async def connected() -> T:
            async with connect(address, name="purveyor-cli", patience_seconds=self.root.timeout_seconds) as queues:
                return await work(queues)

        return asyncio.run(connected())


def confirm(question: str, *, yes: bool) -> None:
    """Ask before a step that cannot be undone; without a terminal, require `--yes`."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidInput(f"there is no terminal to confirm on: {question}", fix="add --yes")
    if not typer.confirm(question, err=True):
        raise typer.Exit(1)


def examples(*lines: str) -> str:
    r"""Return the examples at the end of a help page; \b keeps Typer from joining the lines."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)

"""What every command is given: the settings in force, the form of its output, and a connection while it works."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from purveyor.app.settings import Settings, load
from purveyor.jetstream.address import Address
from purveyor.jetstream.server import running
from purveyor.model.errors import InvalidInput, ServerMissing
from purveyor.queues.client import Queues, connect

T = TypeVar("T")

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
YesFlag = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
StreamName = Annotated[str, typer.Argument(metavar="STREAM", help="The stream.")]
ConsumerName = Annotated[str, typer.Argument(metavar="NAME", help="The consumer.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RootOptions:
    """The options before the command."""

    flags: dict[str, object]
    config: Path | None = None
    json: bool = False
    timeout_seconds: float = 10


@dataclass(frozen=True, slots=True)
class Cli:
    """See the module."""

    root: RootOptions
    json: bool

    @classmethod
    def of(cls, ctx: typer.Context, as_json: bool = False) -> "Cli":
        """For a command: `--json` may stand before or after its name."""
        root: RootOptions = ctx.find_root().obj
        return cls(root, as_json or root.json)

    def settings(self, **flags: object) -> Settings:
        """The settings, with the flags of this command added."""
        return load(self.root.flags | flags, config=self.root.config)

    def address(self, component: str | None = None) -> Address:
        """The server that is set, else the embedded one that runs on the data directory.

        There a component has a user of its own; None is the one that may do everything.
        """
        settings = self.settings()
        found = settings.nats_address or running(settings.nats_dir, component)
        if found is None:
            raise ServerMissing(
                f"no NATS server is set, and none runs on {settings.nats_dir}",
                fix="start one with `purveyor serve nats`, or set PURVEYOR_NATS_URL",
            )
        return found

    def call(self, work: Callable[[Queues], Awaitable[T]], component: str | None = None) -> T:
        """Run the work of a command on a connection."""
        address = self.address(component)

        async def connected() -> T:
            async with connect(address, name="purveyor-cli", patience_seconds=self.root.timeout_seconds) as queues:
                return await work(queues)

        return asyncio.run(connected())


def confirm(question: str, *, yes: bool) -> None:
    """Ask before something that cannot be undone; without a terminal to ask on, `--yes` must be given."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidInput(f"not done without a yes: {question}", fix="add --yes")
    if not typer.confirm(question, err=True):
        raise typer.Exit(1)


def examples(*lines: str) -> str:
    """The end of a help page; the mark keeps its lines apart."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)

"""A group of commands whose modules are imported when they are called, so that `purveyor --help` comes at once."""

import importlib
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("purveyor.app.cli.up", "Run everything on this machine, and keep it running."),
    "demo": ("purveyor.app.cli.demo", "Run the whole system on sample data, and verify it."),
    "serve": ("purveyor.app.cli.serve", "Run one part of Purveyor in the foreground."),
    "stream": ("purveyor.app.cli.stream", "Make, look at, change, empty, seal and remove streams."),
    "consumer": ("purveyor.app.cli.consumer", "Make, look at, read from, pause and remove consumers."),
    "import": ("purveyor.app.cli.import_ldif", "Read LDIF files into the queue, each record once."),
    "publish": ("purveyor.app.cli.publish", "Publish events, one or many, and see their positions."),
    "topic": ("purveyor.app.cli.topic", "Declare topics; see which there are and who asks for them."),
    "schema": ("purveyor.app.cli.schema", "Say what objects of a topic must look like, and check it."),
    "subscription": ("purveyor.app.cli.subscription", "Add, look at, pause, replay and delete subscriptions."),
    "dlq": ("purveyor.app.cli.dlq", "Dead letters: list, show, put back and discard them."),
    "archive": ("purveyor.app.cli.archive", "Ask the archive in SQL, make a snapshot, merge small files."),
    "stages": ("purveyor.app.cli.stages", "Transactional stages: their tables, and how they are doing."),
    "pub": ("purveyor.app.cli.pub", "Publish messages and see where they are stored."),
    "sub": ("purveyor.app.cli.sub", "Watch a subject, or replay a stream."),
    "queues": ("purveyor.app.cli.queues", "The queue catalogue beside what the server holds."),
    "doctor": ("purveyor.app.cli.doctor", "Look for what is wrong, and say what to do."),
}
"""Each command: the module whose `app` it is, and its line in the overview."""


class LazyGroup(TyperGroup):
    """Lists commands by their line in `COMMANDS`; imports one when it is resolved to be run (or asked for help)."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A stand-in for the overview."""
        known = COMMANDS.get(cmd_name)
        return TyperCommand(name=cmd_name, help=known[1]) if known else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The real command."""
        name, found, rest = super().resolve_command(ctx, args)
        if found is None or name is None:
            return name, found, rest
        module = importlib.import_module(COMMANDS[name][0])
        command = typer.main.get_command(module.app)
        command.name = name
        return name, command, rest

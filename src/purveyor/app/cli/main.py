"""The root of the command line: the table of commands, the options before a command, and the handling of errors.

Modules of commands are imported when a command is called, so that `purveyor --help` is fast. A refusal is one `error:`
line, with a `fix:` line where there is a remedy, and exit code 1; wrong usage is exit code 2, Ctrl-C 130. Only --debug
shows a traceback.
"""

import importlib
import logging
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from purveyor import __version__
from purveyor.app.cli.command_groups import CommandGroup
from purveyor.app.cli.output import escape
from purveyor.model.errors import InvalidInput, PurveyorError
from purveyor.model.extras import missing_extra

COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("purveyor.app.cli.up", "Run all parts on this machine, and keep them running."),
    "demo": ("purveyor.app.cli.demo", "Run the whole system on sample data, and verify it."),
    "serve": ("purveyor.app.cli.serve", "Run one part of Purveyor in the foreground."),
    "stream": ("purveyor.app.cli.stream", "Add, show, edit, purge, seal and remove streams."),
    "consumer": ("purveyor.app.cli.consumer", "Add, show, read, pause and remove consumers."),
    "import": ("purveyor.app.cli.import_ldif", "Import LDIF files, each record once."),
    "source": ("purveyor.app.cli.source", "Show the sources that follow directories, and refresh one."),
    "publish": ("purveyor.app.cli.publish", "Publish one event or many, and print their positions."),
    "next": ("purveyor.app.cli.consume:next_app", "Get the next messages of a subscription."),
    "ack": ("purveyor.app.cli.consume:ack_app", "Acknowledge messages of a subscription."),
    "topic": ("purveyor.app.cli.topic", "Declare and list topics, with the subscriptions to them."),
    "schema": ("purveyor.app.cli.schema", "Define and check the schemas of topics."),
    "subscription": ("purveyor.app.cli.subscription", "Add, show, edit, pause, replay and delete subscriptions."),
    "dlq": ("purveyor.app.cli.dlq", "List, show, redrive and discard dead letters."),
    "archive": ("purveyor.app.cli.archive", "Query the archive in SQL, make snapshots, compact, audit."),
    "stages": ("purveyor.app.cli.stages", "Print tables and status of transactional stages."),
    "pub": ("purveyor.app.cli.pub_sub:pub_app", "Publish messages, and print where they are stored."),
    "sub": ("purveyor.app.cli.pub_sub:sub_app", "Watch a subject, or read a stream."),
    "queues": ("purveyor.app.cli.queues", "Compare the queue catalogue with the server, and migrate."),
    "env": ("purveyor.app.cli.env", "Print what other programs need, as shell variables."),
    "doctor": ("purveyor.app.cli.doctor", "Find problems of the installation, with their fixes."),
}
"""For each command the module that defines its `app` (or `module:name` of it), and its line in the overview."""


def load_command(name: str) -> typer.Typer:
    """Import the module of a command, and return its application; a group gets the aliases."""
    module, _, attribute = COMMANDS[name][0].partition(":")
    loaded: typer.Typer = getattr(importlib.import_module(module), attribute or "app")
    loaded.info.cls = CommandGroup
    return loaded


class LazyGroup(CommandGroup):
    """A group that lists `COMMANDS`, and imports the module of a command only to run it or to print its help."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a placeholder with the help line for the overview."""
        known = COMMANDS.get(cmd_name)
        return TyperCommand(name=cmd_name, help=known[1]) if known else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import and return the command."""
        name, found, rest = super().resolve_command(ctx, args)
        if found is None or name is None:
            return name, found, rest
        command = typer.main.get_command(load_command(name))
        command.name = name
        return name, command, rest


_ROOT_OPTIONS = (
    "--data-dir",
    "--nats-url",
    "--nats-credentials",
    "--api",
    "--api-user",
    "--api-password-file",
    "--api-token-file",
    "--api-tls-ca",
    "--config",
    "--timeout",
    "--debug",
    "--version",
)
OVER_HTTP = ("subscription", "publish", "next", "ack", "dlq", "topic", "schema")
"""The commands that work with --api."""

app = typer.Typer(
    cls=LazyGroup,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="\b\nExamples:\n"
    "  purveyor up\n"
    "  purveyor subscription add mail-server --topic udm:users/user\n"
    '  purveyor publish --realm udm --topic users/user --new \'{"uid": "ada"}\'\n'
    "  purveyor next mail-server --wait 60s\n"
    "\nIn every group, `ls` and `list`, `info` and `show`, `rm` and `delete` are the same command.\n"
    "\nEach setting is also an environment variable (PURVEYOR_DATA_DIR, PURVEYOR_NATS_URL, ...) and a key of "
    "purveyor.toml.",
)


@app.callback()
def root(
    ctx: typer.Context,
    data_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="The data directory.")] = None,
    nats_url: Annotated[
        str | None, typer.Option(metavar="URL", help="A NATS server; default: the embedded one.")
    ] = None,
    nats_credentials: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A .creds or nkey seed file for it.")
    ] = None,
    api: Annotated[
        str | None,
        typer.Option(metavar="URL", help=f"An HTTP API in place of the NATS server, for {', '.join(OVER_HTTP)}."),
    ] = None,
    api_user: Annotated[
        str | None, typer.Option(metavar="NAME", help="The login there; its password is PURVEYOR_API_PASSWORD.")
    ] = None,
    api_password_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with that password in its first line.")
    ] = None,
    api_token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with a token; default: PURVEYOR_API_TOKEN.")
    ] = None,
    api_tls_ca: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The certificate authority of that API (PEM).")
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Settings; default: ./purveyor.toml.")] = None,
    timeout: Annotated[str, typer.Option(metavar="DURATION", help="How long to wait for the server.")] = "10s",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Every change, to every subscriber, in order, once."""
    if version:
        typer.echo(f"purveyor {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit
    # Here and not at the top: the overview needs neither settings nor a server.
    from purveyor.app.cli.context import RootOptions  # noqa: PLC0415
    from purveyor.app.cli.parsers import parse_duration  # noqa: PLC0415
    from purveyor.app.settings import refuse_secret_flag  # noqa: PLC0415

    refuse_secret_flag(nats_url, api)
    if api is not None and ctx.invoked_subcommand not in OVER_HTTP:
        raise InvalidInput(
            f"`purveyor {ctx.invoked_subcommand}` does not work over HTTP; --api is for {', '.join(OVER_HTTP)}",
            fix="leave --api out: the command needs the NATS server (PURVEYOR_NATS_URL) or the data directory",
        )
    logging.basicConfig(level=logging.DEBUG if debug else logging.CRITICAL, format="%(levelname)s %(name)s %(message)s")
    flags: dict[str, object] = {
        "data_dir": data_dir,
        "nats_url": nats_url,
        "nats_credentials": nats_credentials,
        "api_url": api,
        "api_username": api_user,
        "api_password_file": api_password_file,
        "api_token_file": api_token_file,
        "api_tls_ca": api_tls_ca,
    }
    timeout_seconds = parse_duration(timeout).total_seconds()
    ctx.obj = RootOptions(flags=flags, config=config, json=as_json, timeout_seconds=timeout_seconds)


def run(argv: Sequence[str]) -> int:
    """Run a command line and return its exit code."""
    debug = "--debug" in argv
    try:
        result = typer.main.get_command(app).main(args=list(argv), prog_name="purveyor", standalone_mode=False)
    except PurveyorError as error:
        return _fail(error.message, error.fix, trace=debug)
    except typer.Abort:
        return 130  # Ctrl-C or the end of input at a question; Typer handles Ctrl-C elsewhere, and a closed pipe
    except ModuleNotFoundError as error:
        missing = missing_extra(error, "this command")
        return _unexpected(error, debug) if missing is None else _fail(missing.message, missing.fix, trace=debug)
    except Exception as error:  # noqa: BLE001 - a user sees no traceback of a defect
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # wrong usage, in Typer's own classes
            return _usage(error)
        return _unexpected(error, debug)
    return result if isinstance(result, int) else 0


def main() -> None:
    """Run the program with the arguments of the process."""
    sys.exit(run(sys.argv[1:]))


def _unexpected(error: Exception, debug: bool) -> int:
    fix = None if debug else "this is a defect; `purveyor --debug ...` shows the traceback"
    return _fail(f"unexpected {type(error).__name__}: {error}", fix, trace=debug)


def _fail(message: str, fix: str | None, *, trace: bool) -> int:
    if trace:
        traceback.print_exc()
    first, *rest = message.strip().splitlines() or [""]
    lines = [f"error: {first}", *(f"  {line}" for line in rest), *([f"fix: {fix}"] if fix else [])]
    typer.echo("\n".join(escape(line) for line in lines), err=True)
    return 1


def _usage(error: Exception) -> int:
    message: str = getattr(error, "format_message")()  # noqa: B009 - Typer's vendored class has no public name
    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else "purveyor"
    line = " ".join(message.split())
    option = getattr(error, "option_name", None)
    fix = (
        f"write {option} before the command: purveyor {option} ..."
        if option in _ROOT_OPTIONS
        else f"see `{where} --help`"
    )
    typer.echo(f"error: {escape(line)}\nfix: {fix}", err=True)
    return int(getattr(error, "exit_code", 2))

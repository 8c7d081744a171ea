"""The root of the command line: options that stand before the command, and how errors end.

A mistake or a refusal is one `error:` line, with a `fix:` line where there is a remedy, and exit code 1; wrong
usage is 2, Ctrl-C 130. A trace is shown only with --debug.
"""

import logging
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from purveyor import __version__
from purveyor.app.cli.lazy_commands import LazyGroup
from purveyor.app.cli.sanitize import safe
from purveyor.model.errors import PurveyorError

_BEFORE = ("--data-dir", "--nats-url", "--nats-credentials", "--config", "--timeout", "--debug", "--version")

app = typer.Typer(
    cls=LazyGroup,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="\b\nExamples:\n"
    "  purveyor serve nats\n"
    "  purveyor stream add ORDERS --subjects 'ORDERS.*'\n"
    "  purveyor pub ORDERS.new 'order 1'\n"
    "\nEach setting is also an environment variable (PURVEYOR_DATA_DIR, PURVEYOR_NATS_URL, ...) and a key of "
    "purveyor.toml.",
)


@app.callback()
def root(
    ctx: typer.Context,
    data_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Where data is kept.")] = None,
    nats_url: Annotated[
        str | None, typer.Option(metavar="URL", help="A NATS server; default: the embedded one.")
    ] = None,
    nats_credentials: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A .creds or nkey seed file for it.")
    ] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="Settings; default: ./purveyor.toml.")] = None,
    timeout: Annotated[str, typer.Option(metavar="DURATION", help="How long to wait for a server.")] = "10s",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the trace of an error.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Every change, to every subscriber, in order, once."""
    if version:
        typer.echo(f"purveyor {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit
    # Here and not at the top: an overview needs neither settings nor a server.
    from purveyor.app.cli.context import RootOptions  # noqa: PLC0415
    from purveyor.app.cli.parsers import parse_duration  # noqa: PLC0415
    from purveyor.app.settings import refuse_secret_flag  # noqa: PLC0415

    refuse_secret_flag(nats_url)
    logging.basicConfig(level=logging.DEBUG if debug else logging.CRITICAL, format="%(levelname)s %(name)s %(message)s")
    flags: dict[str, object] = {"data_dir": data_dir, "nats_url": nats_url, "nats_credentials": nats_credentials}
    patience = parse_duration(timeout).total_seconds()
    ctx.obj = RootOptions(flags=flags, config=config, json=as_json, timeout_seconds=patience)


def run(argv: Sequence[str]) -> int:
    """Run a command line and return its exit code."""
    debug = "--debug" in argv
    try:
        result = typer.main.get_command(app).main(args=list(argv), prog_name="purveyor", standalone_mode=False)
    except PurveyorError as error:
        return _fail(error.message, error.fix, trace=debug)
    except typer.Abort:
        return 130  # Ctrl-C or the end of input at a question; Ctrl-C elsewhere, and a closed pipe, Typer has seen to
    except Exception as error:  # noqa: BLE001 - the last line of defence
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # wrong usage, in Typer's own classes
            return _usage(error)
        return _fail(
            f"unexpected {type(error).__name__}: {error}",
            None if debug else "this is a defect; run again with `purveyor --debug ...` to see where",
            trace=debug,
        )
    return result if isinstance(result, int) else 0


def main() -> None:
    """The entry point of the program."""
    sys.exit(run(sys.argv[1:]))


def _fail(message: str, fix: str | None, *, trace: bool) -> int:
    if trace:
        traceback.print_exc()
    first, *rest = message.strip().splitlines() or [""]
    lines = [f"error: {first}", *(f"  {line}" for line in rest), *([f"fix: {fix}"] if fix else [])]
    typer.echo("\n".join(safe(line) for line in lines), err=True)
    return 1


def _usage(error: Exception) -> int:
    message: str = getattr(error, "format_message")()  # noqa: B009 - Typer's vendored class has no public name
    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else "purveyor"
    line = " ".join(message.split())
    option = getattr(error, "option_name", None)
    fix = f"{option} stands before the command: purveyor {option} ..." if option in _BEFORE else f"see `{where} --help`"
    typer.echo(f"error: {safe(line)}\nfix: {fix}", err=True)
    return int(getattr(error, "exit_code", 2))

"""`purveyor serve ldap`: follow directories in the foreground, each as a source of its own."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from purveyor.app import running_parts
from purveyor.app.cli.context import Cli, JsonFlag
from purveyor.app.cli.output import StatusPrinter
from purveyor.app.ldap_settings import find_directories
from purveyor.app.process_setup import freeze_imports
from purveyor.app.running_parts import announce
from purveyor.model.errors import InvalidConfig
from purveyor.queues.permissions import SOURCES
from purveyor.sources.ldap.directory import Mode

if TYPE_CHECKING:  # importing the runner imports Arrow: help pages do without it
    from purveyor.sources.ldap.source_runner import SourceRunner

_PROGRESS_SECONDS: Final = 10.0
_REDRAW_SECONDS: Final = 0.5


def ldap(
    ctx: typer.Context,
    uri: Annotated[str | None, typer.Option(metavar="URI", help="The directory: ldap:// or ldaps://host:port.")] = None,
    base: Annotated[str | None, typer.Option(metavar="DN", help="The entry below which to read.")] = None,
    bind_dn: Annotated[
        str | None, typer.Option(metavar="DN", help="The account; its password is PURVEYOR_LDAP_PASSWORD.")
    ] = None,
    password_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with that password in its first line.")
    ] = None,
    source: Annotated[str | None, typer.Option(metavar="NAME", help="The name of the source; default: ldap.")] = None,
    filter_: Annotated[
        str | None, typer.Option("--filter", metavar="FILTER", help="Which entries; default: (objectClass=*).")
    ] = None,
    mode: Annotated[
        Mode | None, typer.Option(help="How to read changes; default: what the server has.", show_choices=True)
    ] = None,
    accesslog_base: Annotated[
        str | None, typer.Option(metavar="DN", help="The entry of the accesslog; default: cn=accesslog.")
    ] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The certificate authority of the directory (PEM).")
    ] = None,
    starttls: Annotated[bool, typer.Option("--starttls", help="Use StartTLS on an ldap:// connection.")] = False,
    metrics_port: Annotated[
        int | None, typer.Option(metavar="PORT", help="Serve Prometheus metrics there; default: not at all.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Follow directories: first all entries, then each change as it happens, into the queue ldif.

    Options describe one directory; `[[ldap]]` tables of the settings file name further ones, each a source with its
    own name. The command continues where it stopped: the place in the directory is stored when the queue has everything
    before it. A second process with the same source stands by, and takes over when the first one stops. The command
    waits for a directory or a NATS server that is away. Ctrl-C or SIGTERM stops it.

    `purveyor source refresh NAME` makes it read a directory as a whole again.
    """
    cli = Cli.of(ctx, as_json)
    settings = cli.settings(
        ldap_uri=uri,
        ldap_base=base,
        ldap_bind_dn=bind_dn,
        ldap_password_file=password_file,
        ldap_source=source,
        ldap_filter=filter_,
        ldap_mode=mode,
        ldap_accesslog_base=accesslog_base,
        ldap_tls_ca=tls_ca,
        ldap_starttls=starttls or None,
        metrics_port=metrics_port,
    )
    directories = find_directories(settings)
    if not directories:
        raise InvalidConfig(
            "no directory is set", fix="give --uri and --base, set PURVEYOR_LDAP_URI and _BASE, or add [[ldap]] tables"
        )
    find_address = cli.address_finder(SOURCES)
    # Here and not at the top: help pages need none of them.
    from purveyor.app.telemetry.setup import telemetry  # noqa: PLC0415
    from purveyor.app.telemetry.source_metrics import read_source_metrics  # noqa: PLC0415
    from purveyor.pipeline.transform import load_mapping  # noqa: PLC0415
    from purveyor.sources.ldap.source_runner import RunnerOptions, SourceRunner  # noqa: PLC0415

    printer = StatusPrinter(json=cli.json)
    stop = asyncio.Event()

    def on_event(name: str, event: str, detail: str, fields: Mapping[str, Any]) -> None:
        try:
            printer.print(event, f"{name} {detail}", **fields)
        except OSError:  # the program that read our output has ended
            stop.set()

    options = RunnerOptions(
        find_address=find_address,
        replicas=settings.replicas,
        is_secret=load_mapping(settings.mapping).dropped_secrets.__contains__,
        on_event=on_event,
    )
    runners = [SourceRunner(directory, options) for directory in directories]
    statuses = [runner.status for runner in runners]
    with (
        telemetry(settings, "ldap", lambda: read_source_metrics(statuses)) as metrics_url,
        announce(settings.data_dir, running_parts.LDAP, metrics_url=metrics_url),
    ):
        asyncio.run(_serve(runners, stop, printer, is_json=cli.json))
    printer.print("stopped", "LDAP")


async def _serve(
    runners: "Sequence[SourceRunner]", stop: asyncio.Event, printer: StatusPrinter, *, is_json: bool
) -> None:
    """Run all directories until a signal. An error of one does not stop the others: its runner begins again."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)

    async def report_ready() -> None:
        for runner in runners:
            await runner.ready.wait()
        names = ", ".join(runner.directory.source for runner in runners)
        printer.print("ready", f"LDAP: source{'s' if len(runners) > 1 else ''} {names}")

    freeze_imports()
    drawn = not is_json and sys.stderr.isatty()
    watching = [
        asyncio.create_task(report_ready()),
        asyncio.create_task(_draw_progress(runners) if drawn else _report_progress(runners, printer)),
    ]
    try:
        async with asyncio.TaskGroup() as group:
            for runner in runners:
                group.create_task(runner.run(stop))
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)


async def _report_progress(runners: "Sequence[SourceRunner]", printer: StatusPrinter) -> None:
    """Print from time to time how far the refreshes are."""
    while True:
        await asyncio.sleep(_PROGRESS_SECONDS)
        for runner in runners:
            status = runner.status
            if status.is_refreshing:
                source, read, rate = runner.directory.source, status.read, status.rate
                printer.print(
                    "refreshing",
                    f"{source} {read:,} entries read, {rate:,.0f} per second",
                    source=source,
                    entries=read,
                    entries_per_second=round(rate),
                )


async def _draw_progress(runners: "Sequence[SourceRunner]") -> None:
    """Show on the terminal how far the refreshes are, in one line that disappears."""
    from rich.console import Console  # noqa: PLC0415 - a pipe never needs it
    from rich.status import Status  # noqa: PLC0415

    console = Console(stderr=True)
    with contextlib.ExitStack() as stack:
        shown: Status | None = None
        while True:
            parts = [
                f"{runner.directory.source}: {runner.status.read:,} entries, {runner.status.rate:,.0f}/s"
                for runner in runners
                if runner.status.is_refreshing
            ]
            if parts and shown is None:
                shown = stack.enter_context(Status("", console=console))
            if shown is not None and parts:
                shown.update("; ".join(parts))
            elif shown is not None:
                stack.close()
                shown = None
            await asyncio.sleep(_REDRAW_SECONDS)

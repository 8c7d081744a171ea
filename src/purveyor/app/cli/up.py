"""`purveyor up`: run all parts on this machine, until a signal stops them."""

import asyncio
import signal
import sys
from typing import Annotated

import typer

from purveyor.app.cli.context import Cli, JsonFlag, examples
from purveyor.app.cli.output import EXIT_INTERRUPTED, StatusPrinter
from purveyor.app.ldap_settings import find_directories, has_directories
from purveyor.app.process_setup import private_umask, restrict_permissions
from purveyor.app.settings import Settings
from purveyor.app.up.supervisor import ALL, LOG, PartEvent, Supervisor, UpOptions, hold_data_dir, make_parts
from purveyor.jetstream.server import find_server
from purveyor.model.extras import require_extras

app = typer.Typer(help="Run all parts on this machine.", rich_markup_mode=None, add_completion=False)


@app.command(
    "up",
    epilog=examples(
        "purveyor up",
        "purveyor --data-dir ./data up --port 8080 --master 'local[2]'",
        "PURVEYOR_NATS_URL=nats://nats.example:4222 purveyor up --json",
    ),
)
def up(
    ctx: typer.Context,
    host: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="The address of the API; default: 127.0.0.1.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(metavar="PORT", help="The port of the API; default: 7777; 0: a free port.")
    ] = None,
    master: Annotated[str | None, typer.Option(metavar="URL", help="The Spark master; default: local[*].")] = None,
    standby: Annotated[
        bool | None,
        typer.Option("--standby/--no-standby", help="Run a second pipeline that takes over if the first one dies."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Run all parts on this machine: the NATS server (unless one is set), the pipeline, push and the HTTP API.

    If the settings name directories (PURVEYOR_LDAP_URI, or `[[ldap]]` tables), `up` follows them as well.

    With `--standby` (PURVEYOR_STANDBY), a second pipeline starts and loads everything, and takes over within seconds if
    the first one dies. It needs about 1.5 GB of memory.

    Each part prints a line with its address when it is ready, and each line begins with its time (UTC). `up` restarts a
    part that dies. Ctrl-C or SIGTERM stops the API, then push and the pipeline, and the NATS server last; a second
    Ctrl-C stops all at once. Passwords that are not set are generated into files of the data directory that only their
    owner can read.
    """
    cli = Cli.of(ctx, as_json)
    settings = cli.settings(api_host=host, api_port=port, spark_master=master, standby=standby)
    flags = {"--host": host, "--port": port}
    options = UpOptions(
        options=cli.root_words(),
        with_nats=settings.nats_url is None,
        with_ldap=has_directories(settings),
        with_standby=settings.standby,
        pipeline=(*(() if master is None else ("--master", master)), *_metrics_port(settings, 0)),
        push=_metrics_port(settings, 1),
        ldap=_metrics_port(settings, 2),
        api=tuple(word for flag, value in flags.items() if value is not None for word in (flag, str(value))),
    )
    require_extras("`purveyor up`", "spark")
    _check_settings(settings)
    if options.with_nats:
        find_server()
    ctx.with_resource(private_umask())
    restrict_permissions(settings.data_dir)
    with hold_data_dir(settings.data_dir.absolute()):
        _check_port(settings)
        if asyncio.run(_supervise(options, EventPrinter(json=cli.json))):
            raise typer.Exit(EXIT_INTERRUPTED)


def _metrics_port(settings: Settings, number: int) -> tuple[str, ...]:
    """Return the flag for the metrics of a part: free ports, whose pages the API includes, or those that are set."""
    return "--metrics-port", str(settings.metrics_port + number if settings.metrics_port else 0)


async def _supervise(options: UpOptions, printer: "EventPrinter") -> bool:
    """Run the parts until a signal; return whether a second signal came before all were stopped."""
    supervisor = Supervisor(make_parts(options), printer.print)
    signals = 0

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        printer.print(PartEvent(ALL, "stopping", "in order" if signals == 1 else "at once"))
        supervisor.stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    await supervisor.run()
    printer.print(PartEvent(ALL, "stopped", ""))
    return signals > 1


class EventPrinter:
    """Prints the events of the parts, and passes their log lines on to standard error."""

    def __init__(self, *, json: bool) -> None:
        self._json = json
        self._status = StatusPrinter(json=json, timestamps=True)

    def print(self, event: PartEvent) -> None:
        """Print one event; the text names the part unless its detail begins with it."""
        if event.event == LOG:
            sys.stderr.write(f"{event.detail}\n")
            sys.stderr.flush()
            return
        detail = "" if event.detail == f"the {event.part}" else event.detail  # `stopped: the API`
        if self._json:
            # A part of the pipeline has its own name, which is in its detail as well.
            self._status.print(event.event, detail, **{**event.fields, "part": event.part})
        elif detail.startswith(event.part):  # `ready: API at ...`
            self._status.print(event.event, detail)
        else:
            self._status.print(event.event, f"{event.part}{': ' if detail else ''}{detail}")


def _check_settings(settings: Settings) -> None:
    """Raise the errors of settings before any part starts."""
    # Here and not at the top: a help page needs nothing of the API.
    from purveyor.app.http.server import check_tls  # noqa: PLC0415
    from purveyor.app.static_logins import check_logins  # noqa: PLC0415

    check_tls(settings.api_tls_cert, settings.api_tls_key)
    check_logins(settings)
    find_directories(settings)
    if settings.nats_address is None and settings.nats_server_tls is not None:
        settings.nats_server_tls.client.context()


def _check_port(settings: Settings) -> None:
    """Raise SetupError if the API cannot listen, before Spark and the other parts have started for nothing."""
    from purveyor.app.http.server import listen  # noqa: PLC0415 - as above

    listen(settings.api_host, settings.api_port).close()

"""`purveyor serve`: run one part of Purveyor in the foreground, until a signal stops it."""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Final

import typer

from purveyor.app.cli.context import Cli, JsonFlag, examples
from purveyor.app.cli.output import StatusPrinter, write_note
from purveyor.app.cli.serve_ldap import ldap
from purveyor.app.cli.serve_pipeline import pipeline
from purveyor.app.process_setup import event_loop_factory, freeze_imports, private_umask, restrict_permissions
from purveyor.app.running_parts import API, NATS, PUSH, announce
from purveyor.app.settings import Settings
from purveyor.jetstream.address import Address
from purveyor.jetstream.server import EmbeddedServer, EventKind, ServerEvent, ServerOptions
from purveyor.jetstream.server.config import local_address
from purveyor.model.errors import PurveyorError
from purveyor.queues import permissions

if TYPE_CHECKING:
    from purveyor.app.console.console import ConsoleOptions


app = typer.Typer(help="Run one part of Purveyor in the foreground.", rich_markup_mode=None, add_completion=False)
_SERVER_CHECK_SECONDS: Final = 0.2
_RECONNECT_SECONDS: Final = 1.0
_CONNECT_PATIENCE_SECONDS: Final = 10.0


@app.callback()
def serve(ctx: typer.Context) -> None:
    """Run one part of Purveyor in the foreground."""
    ctx.with_resource(private_umask())


@app.command(
    "nats",
    epilog=examples(
        "purveyor serve nats",
        "purveyor --data-dir ./data serve nats --port 4222 --sync 2m",
        "purveyor serve nats --subscription-user ox",
    ),
)
def nats(
    ctx: typer.Context,
    port: Annotated[int | None, typer.Option(metavar="PORT", help="Default: the last port, or a free one.")] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="The address to listen on.")] = "127.0.0.1",
    sync: Annotated[
        str | None, typer.Option(metavar="always|DURATION", help="How often the server syncs writes to disk.")
    ] = None,
    subscription_user: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Create a user that can read only this subscription; repeatable."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Run the NATS server on the data directory, and restart it when it dies. Ctrl-C or SIGTERM stops it."""
    cli = Cli.of(ctx, as_json)
    settings = cli.settings(sync=sync, nats_subscription_users=subscription_user)
    restrict_permissions(settings.data_dir)
    users = (*permissions.component_users(), *map(permissions.subscription_user, settings.nats_subscription_users))
    options = ServerOptions(port=port, host=host, sync=settings.sync, tls=settings.nats_server_tls, users=users)
    stop = threading.Event()
    printer = StatusPrinter(json=cli.json)

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    def on_event(event: ServerEvent) -> None:
        if event.kind is EventKind.STARTED or event.kind is EventKind.FAILED:
            return  # the ready line and the error line report those
        printer.print(event.kind.value, event.detail, pid=event.pid)

    server = EmbeddedServer(settings.nats_dir, options, on_event=on_event)
    previous_handlers = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.start()
        printer.print(
            "ready",
            f"NATS at {server.address}, data and passwords in {server.directory}, process {server.pid}",
            address=str(server.address),
            data_directory=server.directory,
            pid=server.pid,
        )
        with announce(settings.data_dir, NATS, url=str(server.address)):
            while not stop.wait(_SERVER_CHECK_SECONDS):
                if server.failure is not None:
                    raise server.failure
    finally:
        server.stop()
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


@app.command(
    "api",
    epilog=examples(
        "purveyor serve api",
        "purveyor serve api --host 0.0.0.0 --port 443 --tls-cert api.pem --tls-key api.key",
        "purveyor serve api --port 0 --json",
    ),
)
def api(
    ctx: typer.Context,
    host: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="The address to listen on; default: 127.0.0.1.")
    ] = None,
    port: Annotated[int | None, typer.Option(metavar="PORT", help="Default: 7777; 0: a free port.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(metavar="FILE", help="A certificate (PEM), for HTTPS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its key.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Run the HTTP API: subscriptions, events, and messages for consumers that pull them.

    The API listens at once; while the NATS server is away, it answers requests with 503. It generates passwords that
    are not set into passwords.toml of the data directory; if other machines can reach its address, all passwords must
    be set. Ctrl-C or SIGTERM stops it, after it has answered the requests that are under way.
    """
    cli = Cli.of(ctx, as_json)
    settings = cli.settings(api_host=host, api_port=port, api_tls_cert=tls_cert, api_tls_key=tls_key)
    find_address = cli.address_finder(permissions.API)
    # Here and not at the top: every other command would wait for the import.
    from purveyor.app.http.application import ApiOptions  # noqa: PLC0415
    from purveyor.app.http.connections import ConnectionLimits  # noqa: PLC0415
    from purveyor.app.http.server import ApiServer, check_tls, listen  # noqa: PLC0415
    from purveyor.app.static_logins import is_loopback, load_logins  # noqa: PLC0415
    from purveyor.app.subscription_input import PushInput  # noqa: PLC0415
    from purveyor.app.telemetry.setup import telemetry  # noqa: PLC0415
    from purveyor.app.wiring import build_api  # noqa: PLC0415
    from purveyor.delivery.push.egress_policy import parse_ranges  # noqa: PLC0415

    tls = check_tls(settings.api_tls_cert, settings.api_tls_key)
    logins = load_logins(settings)
    console = _console(cli, settings)
    if tls is None and not is_loopback(settings.api_host):
        write_note(
            f"clients send passwords to {settings.api_host} unencrypted: set --tls-cert and --tls-key, or use a proxy"
        )
    listener = listen(settings.api_host, settings.api_port)
    name, number = listener.getsockname()[:2]
    url = url_of(tls is not None, name, number)
    printer = StatusPrinter(json=cli.json)
    status = ApiStatus(printer, url, logins.file, console=console is not None)

    async def serve() -> None:
        api = build_api(
            ApiOptions(
                find_address=find_address,
                logins=logins.logins,
                replicas=settings.replicas,
                dead_letter_retention=None
                if settings.dead_letter_days is None
                else timedelta(days=settings.dead_letter_days),
                on_state=status.on_connection_state,
                push=PushInput.from_settings(settings),
                console=console,
                data_dir=settings.data_dir,
                dispatcher_group=settings.dispatcher_group,
                archive_seconds=settings.archive_seconds,
            )
        )
        server = ApiServer(
            api,
            tls=tls,
            limits=ConnectionLimits(connections=settings.api_connections),
            trusted_proxies=parse_ranges(settings.trusted_proxies),
            on_ready=status.on_listening,
        )
        loop = asyncio.get_running_loop()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, server.stop)
        freeze_imports()
        await server.serve([listener])

    with (
        telemetry(settings, "api"),
        listener,
        announce(settings.data_dir, API, url=url_of(tls is not None, local_address(name), number)),
        asyncio.Runner(loop_factory=event_loop_factory()) as runner,
    ):
        runner.run(serve())
    printer.print("stopped", "the API")


def url_of(is_tls: bool, host: str, port: int) -> str:
    """Return the URL of the API at an address.

    >>> url_of(False, "::1", 7777)
    'http://[::1]:7777'
    """
    return f"{'https' if is_tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


class ApiStatus:
    """Prints when the API is ready (it listens and has reached the NATS server), and when that server is away."""

    def __init__(self, printer: StatusPrinter, url: str, password_file: Path | None, *, console: bool) -> None:
        self._printer = printer
        self._url = url
        self._console = console
        self._password_file = password_file
        self._is_listening = self._was_connected = self._is_ready = self._is_waiting = False

    def on_listening(self) -> None:
        """Note that the API answers requests, with 503 if the NATS server is away."""
        self._is_listening = True
        self._print_ready()

    def on_connection_state(self, state: str, detail: str) -> None:
        """Note that the NATS server is away (`waiting`) or there (`connected`)."""
        if state == "waiting" and not self._is_waiting:
            self._printer.print("waiting", detail)
        elif state == "connected" and self._is_waiting and self._is_ready:
            self._printer.print("connected", "the NATS server answers")
        self._is_waiting = state == "waiting"
        self._was_connected = self._was_connected or state == "connected"
        self._print_ready()

    def _print_ready(self) -> None:
        if self._is_ready or not self._is_listening or not self._was_connected:
            return
        self._is_ready = True
        file = self._password_file
        passwords = "" if file is None else f", passwords in {file}"
        console = f"{self._url}/" if self._console else None
        self._printer.print(
            "ready",
            f"API at {self._url}{f', console at {console}' if console else ''}{passwords}",
            url=self._url,
            console=console,
            passwords=None if file is None else str(file),
        )


def _console(cli: Cli, settings: Settings) -> "ConsoleOptions | None":
    """Return the options of the console; None if it is switched off."""
    from purveyor.app.console.console import ConsoleOptions  # noqa: PLC0415 - as above
    from purveyor.app.console.console_login import read_secret  # noqa: PLC0415

    if not settings.console:
        return None
    return ConsoleOptions(
        secret=read_secret(settings.data_dir.absolute()),
        find_operator=cli.address,
        data_dir=settings.data_dir.absolute(),
        replicas=settings.replicas,
        group=settings.dispatcher_group,
    )


@app.command("push", epilog=examples("purveyor serve push", "purveyor serve push --allow 10.1.0.0/16 --json"))
def push(
    ctx: typer.Context,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="RANGE", help="Also deliver to these private addresses, such as 10.0.0.0/8; repeatable."),
    ] = None,
    per_host: Annotated[
        int | None, typer.Option(metavar="N", help="Most connections at a time to one host; default: 256.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(metavar="PORT", help="Serve Prometheus metrics there; default: not at all.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Deliver all push subscriptions. Several workers may run at once: they share the work and replace each other.

    The worker waits for a NATS server that is away. Ctrl-C or SIGTERM stops it, after the endpoints have answered the
    requests that are under way.
    """
    cli = Cli.of(ctx, as_json)
    settings = cli.settings(push_allow=allow, push_per_host=per_host, metrics_port=metrics_port)
    find_address = cli.address_finder(permissions.PUSH)
    # Here and not at the top: every other command would wait for the import.
    from purveyor.app.telemetry.setup import telemetry  # noqa: PLC0415

    printer = StatusPrinter(json=cli.json)
    with (
        telemetry(settings, "push", lambda: ()) as metrics_url,
        announce(settings.data_dir, PUSH, metrics_url=metrics_url),
        asyncio.Runner(loop_factory=event_loop_factory()) as runner,
    ):
        runner.run(_run_push(settings, find_address, printer))
    printer.print("stopped", "push")


async def _run_push(settings: Settings, find_address: Callable[[], Address], printer: StatusPrinter) -> None:
    """Run a push worker until a signal; connect again whenever the NATS server was away."""
    from purveyor.app.subscription_input import open_cipher  # noqa: PLC0415 - as above
    from purveyor.delivery.push.egress_policy import parse_ranges  # noqa: PLC0415
    from purveyor.delivery.push.push_worker import PushOptions, PushWorker  # noqa: PLC0415
    from purveyor.queues.client import connect  # noqa: PLC0415

    stop = asyncio.Event()
    last_error = ""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)

    def on_event(subscription: str, event: str, detail: str) -> None:
        try:
            printer.print(event, f"{subscription}: {detail}", subscription=subscription)
        except OSError:  # the program that read our output has ended
            stop.set()

    async def report_ready(ready: asyncio.Event) -> None:
        nonlocal last_error
        await ready.wait()
        last_error = ""
        printer.print("ready", "push delivers")

    options = PushOptions(
        cipher=open_cipher(settings),
        allowed=parse_ranges(settings.push_allow),
        per_host=settings.push_per_host,
        replicas=settings.replicas,
        on_event=on_event,
    )
    freeze_imports()
    while not stop.is_set():
        try:
            async with connect(
                find_address(), name="purveyor-push", patience_seconds=_CONNECT_PATIENCE_SECONDS
            ) as queues:
                worker = PushWorker(queues, options)
                readiness = asyncio.create_task(report_ready(worker.ready))
                try:
                    await worker.run(stop)
                finally:
                    readiness.cancel()
        except PurveyorError as error:
            if str(error) != last_error:
                printer.print("waiting", str(error))
            last_error = str(error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _RECONNECT_SECONDS)


app.command(
    "pipeline",
    epilog=examples(
        "purveyor serve pipeline",
        "purveyor serve pipeline --master spark://host:7077 --json",
        "purveyor serve pipeline --parts dispatch --group backup",
    ),
)(pipeline)
app.command(
    "ldap",
    epilog=examples(
        "purveyor serve ldap --uri ldap://localhost --base dc=example,dc=org --bind-dn cn=reader,dc=example,dc=org"
        " --password-file reader.password",
        "purveyor serve ldap --uri ldaps://ldap.example --base dc=example,dc=org --tls-ca ca.pem --source people",
        "purveyor --config purveyor.toml serve ldap --json",
    ),
)(ldap)

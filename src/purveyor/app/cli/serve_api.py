"""`purveyor serve api`: run the HTTP API in the foreground, in one process or in several on one port."""

import asyncio
import contextlib
import signal
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from purveyor.app.cli.context import Cli, JsonFlag
from purveyor.app.cli.output import StatusPrinter, write_note
from purveyor.app.process_setup import event_loop_factory, freeze_imports
from purveyor.app.running_parts import API, announce
from purveyor.app.settings import Settings
from purveyor.app.up.api_workers import ApiWorkers
from purveyor.app.up.supervisor import PROGRAM
from purveyor.jetstream.server.config import local_address
from purveyor.queues import permissions

if TYPE_CHECKING:
    from purveyor.app.console.console import ConsoleOptions
    from purveyor.app.static_logins import StaticLogins


def api(
    ctx: typer.Context,
    host: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="The address to listen on; default: 127.0.0.1.")
    ] = None,
    port: Annotated[int | None, typer.Option(metavar="PORT", help="Default: 7777; 0: a free port.")] = None,
    workers: Annotated[
        int | None, typer.Option(metavar="N", help="The number of API processes that share the port; default: 1.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(metavar="FILE", help="A certificate (PEM), for HTTPS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its key.")] = None,
    worker: Annotated[int | None, typer.Option(hidden=True, help="The number of this worker.")] = None,
    listener: Annotated[int | None, typer.Option(hidden=True, help="The socket that workers inherit.")] = None,
    console_socket: Annotated[
        Path | None, typer.Option(hidden=True, help="The Unix socket for requests to the console.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Run the HTTP API: subscriptions, events, and messages for consumers that pull them.

    The API listens at once; while the NATS server is away, it answers requests with 503. It generates passwords that
    are not set into passwords.toml of the data directory; if other machines can reach its address, all passwords must
    be set. Ctrl-C or SIGTERM stops it, after it has answered the requests that are under way.

    With --workers, several processes share the port and the CPUs, and one that dies is started again.
    """
    cli = Cli.of(ctx, as_json)
    settings = cli.settings(
        api_host=host, api_port=port, api_workers=workers, api_tls_cert=tls_cert, api_tls_key=tls_key
    )
    cli.address(permissions.API)
    # Here and not at the top: every other command would wait for the import.
    from purveyor.app.http.server import check_tls, listen  # noqa: PLC0415
    from purveyor.app.static_logins import is_loopback, load_logins  # noqa: PLC0415

    is_tls = check_tls(settings.api_tls_cert, settings.api_tls_key) is not None
    logins = load_logins(settings)
    console = _console(cli, settings)
    if not is_tls and worker is None and not is_loopback(settings.api_host):
        write_note(
            f"clients send passwords to {settings.api_host} unencrypted: set --tls-cert and --tls-key, or use a proxy"
        )
    bound = listen(settings.api_host, settings.api_port) if listener is None else socket.socket(fileno=listener)
    printer = StatusPrinter(json=cli.json)
    with bound:
        if worker is None and settings.api_workers > 1:
            flags = {"--host": host, "--tls-cert": tls_cert, "--tls-key": tls_key}
            words = tuple(word for flag, value in flags.items() if value is not None for word in (flag, str(value)))
            command = (*PROGRAM, *cli.root_words(), "serve", "api", "--json", *words)
            _run_workers(command, settings.api_workers, bound, printer)
        else:
            _run_api(cli, _Process(settings, logins, console, bound, is_tls, worker, console_socket), printer)
    printer.print("stopped", "the API")


def _run_workers(command: tuple[str, ...], count: int, listener: socket.socket, printer: StatusPrinter) -> None:
    """Run several API processes until a signal."""

    def on_event(event: str, detail: str, fields: Mapping[str, Any]) -> None:
        printer.print(event, detail, **fields)

    async def supervise(console_socket: Path) -> None:
        fd = listener.fileno()
        words = ("--listener", str(fd), "--console-socket", str(console_socket))
        commands = [(*command, *words, "--worker", str(number)) for number in range(1, count + 1)]
        workers = ApiWorkers(commands, fd, on_event)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, workers.stop)
        await workers.run()

    # Not in the data directory: the path of a Unix socket may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="purveyor-") as private:
        asyncio.run(supervise(Path(private) / "console"))


@dataclass(frozen=True, slots=True)
class _Process:
    """What one API process serves, and where."""

    settings: Settings
    logins: "StaticLogins"
    console: "ConsoleOptions | None"
    listener: socket.socket
    is_tls: bool
    worker: int | None
    """Its number among the processes that share the socket; None: it shares it with no other."""
    console_socket: Path | None
    """Where one of these processes serves the console to the others."""


def _run_api(cli: Cli, process: _Process, printer: StatusPrinter) -> None:
    """Run one API process until a signal."""
    # Here and not at the top, as above.
    from purveyor.app.console.forwarding import serve_forwarded  # noqa: PLC0415
    from purveyor.app.http.application import ApiOptions  # noqa: PLC0415
    from purveyor.app.http.connections import ConnectionLimits  # noqa: PLC0415
    from purveyor.app.http.server import ApiServer, check_tls  # noqa: PLC0415
    from purveyor.app.subscription_input import PushInput  # noqa: PLC0415
    from purveyor.app.telemetry.prometheus import serve_metrics  # noqa: PLC0415
    from purveyor.app.telemetry.setup import telemetry  # noqa: PLC0415
    from purveyor.app.wiring import build_api  # noqa: PLC0415
    from purveyor.delivery.push.egress_policy import parse_ranges  # noqa: PLC0415

    settings, worker = process.settings, process.worker
    find_address = cli.address_finder(permissions.API)
    name, number = process.listener.getsockname()[:2]
    url = url_of(process.is_tls, name, number)
    local_url = url_of(process.is_tls, local_address(name), number)
    status = ApiStatus(printer, url, process.logins.file, console=process.console is not None)

    async def serve() -> None:
        api = build_api(
            ApiOptions(
                find_address=find_address,
                logins=process.logins.logins,
                replicas=settings.replicas,
                dead_letter_retention=None
                if settings.dead_letter_days is None
                else timedelta(days=settings.dead_letter_days),
                on_state=status.on_connection_state,
                push=PushInput.from_settings(settings),
                console=process.console,
                data_dir=settings.data_dir,
                dispatcher_group=settings.dispatcher_group,
                archive_seconds=settings.archive_seconds,
                worker=worker,
                url=local_url,
                console_socket=process.console_socket,
            )
        )
        server = ApiServer(
            api,
            tls=check_tls(settings.api_tls_cert, settings.api_tls_key),
            limits=ConnectionLimits(connections=settings.api_connections),
            trusted_proxies=parse_ranges(settings.trusted_proxies),
            on_ready=status.on_listening,
        )
        loop = asyncio.get_running_loop()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, server.stop)
        freeze_imports()
        path = process.console_socket
        async with contextlib.AsyncExitStack() as stack:
            if path is not None and api.serves_console:
                await stack.enter_async_context(serve_forwarded(server.app, path))
            await server.serve([process.listener])

    with (
        telemetry(settings, "api"),
        serve_metrics(None if worker is None else 0) as metrics_url,
        announce(settings.data_dir, API, url=local_url, metrics_url=metrics_url, worker=worker),
        asyncio.Runner(loop_factory=event_loop_factory()) as runner,
    ):
        runner.run(serve())


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

"""`purveyor serve api`: the HTTP API in the foreground."""

import asyncio
import signal
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from purveyor.app.cli.context import Cli, JsonFlag
from purveyor.app.cli.render import note, write, write_json
from purveyor.app.cli.sanitize import safe
from purveyor.app.cli.serve_pipeline import address_finder
from purveyor.app.runtime_tuning import loop_factory, spare_imports
from purveyor.app.settings import Settings
from purveyor.queues.permissions import API

if TYPE_CHECKING:
    from purveyor.app.console.console import ConsoleOptions


def api(
    ctx: typer.Context,
    host: Annotated[str | None, typer.Option(metavar="ADDRESS", help="Where to listen; default: 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(metavar="PORT", help="Default: 7777; 0: a free one.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(metavar="FILE", help="A certificate (PEM), for HTTPS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its key.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Run the HTTP API: subscriptions, events, and messages for those who fetch them.

    It listens at once; while the NATS server is away, requests get 503. Passwords that are not set are generated into
    passwords.toml of the data directory; on an address that others can reach, all must be set. Stops on Ctrl-C or
    SIGTERM when the requests under way are answered.
    """
    cli = Cli.of(ctx, as_json)
    settings = cli.settings(api_host=host, api_port=port, api_tls_cert=tls_cert, api_tls_key=tls_key)
    find_address = address_finder(cli, API)
    # Here and not at the top: every other command would wait for it.
    from purveyor.app.http.application import Api, ApiOptions  # noqa: PLC0415
    from purveyor.app.http.connections import ConnectionLimits  # noqa: PLC0415
    from purveyor.app.http.server import ApiServer, check_tls, listen  # noqa: PLC0415
    from purveyor.app.push_input import PushEdge  # noqa: PLC0415
    from purveyor.app.static_logins import is_loopback, logins_of  # noqa: PLC0415
    from purveyor.app.telemetry.setup import telemetry  # noqa: PLC0415
    from purveyor.delivery.push.egress_policy import parse_ranges  # noqa: PLC0415

    tls = check_tls(settings.api_tls_cert, settings.api_tls_key)
    logins = logins_of(settings)
    console = _console(cli, settings)
    if tls is None and not is_loopback(settings.api_host):
        note(f"passwords go to {settings.api_host} unencrypted: set --tls-cert and --tls-key, or use a proxy")
    listener = listen(settings.api_host, settings.api_port)
    name, number = listener.getsockname()[:2]
    url = f"{'http' if tls is None else 'https'}://{f'[{name}]' if ':' in name else name}:{number}"
    teller = Teller(cli, url, logins.file, console=console is not None)

    async def serve() -> None:
        api = Api(
            ApiOptions(
                find_address=find_address,
                logins=logins.logins,
                replicas=settings.replicas,
                letters_kept=None if settings.dead_letter_days is None else timedelta(days=settings.dead_letter_days),
                on_state=teller.on_state,
                push=PushEdge.of(settings),
                console=console,
            )
        )
        server = ApiServer(
            api,
            tls=tls,
            limits=ConnectionLimits(connections=settings.api_connections),
            trusted_proxies=parse_ranges(settings.trusted_proxies),
            on_ready=teller.listens,
        )
        loop = asyncio.get_running_loop()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, server.stop)
        spare_imports()
        await server.serve([listener])

    with telemetry(settings, "api"), listener, asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve())
    teller.say("stopped", "the API")


class Teller:
    """What the API says of itself on standard output: that it is ready when it listens and has reached the server."""

    def __init__(self, cli: Cli, url: str, passwords: Path | None, *, console: bool) -> None:
        self._json = cli.json
        self._url = url
        self._console = console
        self._passwords = passwords
        self._listens = self._connected = self._ready = self._waiting = False

    def say(self, event: str, detail: str, **more: object) -> None:
        """One line."""
        if self._json:
            write_json({"event": event, "detail": detail, **more})
        else:
            write(f"{event}: {safe(detail)}")

    def listens(self) -> None:
        """Requests are answered, with 503 if need be."""
        self._listens = True
        self._say_ready()

    def on_state(self, state: str, detail: str) -> None:
        """The NATS server is away, or there (again)."""
        if state == "waiting" and not self._waiting:
            self.say("waiting", detail)
        elif state == "connected" and self._waiting and self._ready:
            self.say("connected", "the NATS server answers")
        self._waiting = state == "waiting"
        self._connected = self._connected or state == "connected"
        self._say_ready()

    def _say_ready(self) -> None:
        if self._ready or not self._listens or not self._connected:
            return
        self._ready = True
        file = self._passwords
        where = "" if file is None else f", passwords in {file}"
        console = f"{self._url}/" if self._console else None
        self.say(
            "ready",
            f"API at {self._url}{f', console at {console}' if console else ''}{where}",
            url=self._url,
            console=console,
            passwords=None if file is None else str(file),
        )


def _console(cli: Cli, settings: Settings) -> "ConsoleOptions | None":
    """The console, unless it is switched off."""
    from purveyor.app.console.console import ConsoleOptions  # noqa: PLC0415 - as above
    from purveyor.app.console.sessions import read_secret  # noqa: PLC0415

    if not settings.console:
        return None
    return ConsoleOptions(
        secret=read_secret(settings.data_dir.absolute()),
        find_operator=cli.address,
        data_dir=settings.data_dir.absolute(),
        replicas=settings.replicas,
        group=settings.dispatcher_group,
    )

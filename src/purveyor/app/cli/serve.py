"""`purveyor serve`: run one part of Purveyor in the foreground, until a signal stops it."""

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Annotated, Final

import typer

from purveyor.app.cli.context import Cli, JsonFlag, examples
from purveyor.app.cli.output import StatusPrinter
from purveyor.app.cli.serve_api import api
from purveyor.app.cli.serve_ldap import ldap
from purveyor.app.cli.serve_pipeline import pipeline
from purveyor.app.process_setup import event_loop_factory, freeze_imports, private_umask, restrict_permissions
from purveyor.app.running_parts import NATS, PUSH, announce
from purveyor.app.settings import Settings
from purveyor.jetstream.address import Address
from purveyor.jetstream.server import EmbeddedServer, EventKind, ServerEvent, ServerOptions
from purveyor.model.errors import PurveyorError
from purveyor.queues import permissions

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


app.command(
    "api",
    epilog=examples(
        "purveyor serve api",
        "purveyor serve api --host 0.0.0.0 --port 443 --tls-cert api.pem --tls-key api.key",
        "purveyor serve api --port 0 --workers 4 --json",
    ),
)(api)


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

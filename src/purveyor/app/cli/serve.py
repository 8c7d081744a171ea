"""`purveyor serve`: one part of Purveyor in the foreground, until it is told to stop."""

import signal
import threading
from types import FrameType
from typing import Annotated

import typer

from purveyor.app.cli.context import Cli, JsonFlag, examples
from purveyor.app.cli.render import write, write_json
from purveyor.app.cli.sanitize import safe
from purveyor.app.cli.serve_api import api
from purveyor.app.cli.serve_pipeline import pipeline
from purveyor.app.cli.serve_push import push
from purveyor.app.private_files import private_umask, tighten
from purveyor.jetstream.server import EmbeddedServer, EventKind, ServerEvent, ServerOptions
from purveyor.queues import permissions

app = typer.Typer(help="Run one part of Purveyor in the foreground.", rich_markup_mode=None, add_completion=False)
_LOOK_SECONDS = 0.2


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
    port: Annotated[int | None, typer.Option(metavar="PORT", help="Default: the last one, or a free one.")] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Where to listen.")] = "127.0.0.1",
    sync: Annotated[
        str | None, typer.Option(metavar="always|DURATION", help="How often writes are synced to disk.")
    ] = None,
    subscription_user: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Make a user that is bound to this subscription; repeatable."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Run the NATS server on the data directory; it is started again when it dies. Stops on Ctrl-C or SIGTERM."""
    cli = Cli.of(ctx, as_json)
    settings = cli.settings(sync=sync, nats_subscription_users=subscription_user)
    tighten(settings.data_dir)
    users = (*permissions.components(), *map(permissions.subscription_user, settings.nats_subscription_users))
    options = ServerOptions(port=port, host=host, sync=settings.sync, tls=settings.nats_server_tls, users=users)
    stop = threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    def on_event(event: ServerEvent) -> None:
        if event.kind is EventKind.STARTED or event.kind is EventKind.FAILED:
            return  # the ready line and the error line tell those
        if cli.json:
            write_json({"event": event.kind, "detail": event.detail, "pid": event.pid})
        else:
            write(f"{event.kind.value}: {safe(event.detail)}")

    server = EmbeddedServer(settings.nats_dir, options, on_event=on_event)
    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.start()
        _ready(cli, server)
        while not stop.wait(_LOOK_SECONDS):
            if server.failure is not None:
                raise server.failure
    finally:
        server.stop()
        for number, handler in before.items():
            signal.signal(number, handler)


app.command(
    "api",
    epilog=examples(
        "purveyor serve api",
        "purveyor serve api --host 0.0.0.0 --port 443 --tls-cert api.pem --tls-key api.key",
        "purveyor serve api --port 0 --json",
    ),
)(api)

app.command(
    "push",
    epilog=examples(
        "purveyor serve push",
        "purveyor serve push --allow 10.1.0.0/16 --json",
    ),
)(push)

app.command(
    "pipeline",
    epilog=examples(
        "purveyor serve pipeline",
        "purveyor serve pipeline --master spark://host:7077 --json",
        "purveyor serve pipeline --parts dispatch --group backup",
    ),
)(pipeline)


def _ready(cli: Cli, server: EmbeddedServer) -> None:
    if cli.json:
        about = {"address": str(server.address), "data_directory": server.directory, "pid": server.pid}
        write_json({"event": "ready", **about})
    else:
        write(f"ready: NATS at {server.address}, data in {safe(str(server.directory))}, process {server.pid}")

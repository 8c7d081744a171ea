"""`purveyor serve push`: deliver push subscriptions to their endpoints, in the foreground."""

import asyncio
import signal
from collections.abc import Callable
from typing import Annotated, Final

import typer

from purveyor.app.cli.context import Cli, JsonFlag
from purveyor.app.cli.render import write, write_json
from purveyor.app.cli.sanitize import safe
from purveyor.app.cli.serve_pipeline import address_finder
from purveyor.app.runtime_tuning import loop_factory, spare_imports
from purveyor.app.settings import Settings
from purveyor.jetstream.address import Address
from purveyor.model.errors import PurveyorError
from purveyor.queues.permissions import PUSH

_AGAIN_SECONDS: Final = 1.0
_PATIENCE_SECONDS: Final = 10.0


def push(
    ctx: typer.Context,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RANGE", help="Addresses that it may reach beyond public ones, as 10.0.0.0/8; repeatable."
        ),
    ] = None,
    per_host: Annotated[
        int | None, typer.Option(metavar="N", help="So many connections at a time to one host; default: 256.")
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(metavar="PORT", help="Answer Prometheus there; default: nowhere.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Deliver all push subscriptions. Several may run at once: they share the work, and stand in for one another.

    A server that is away is waited for. Stops on Ctrl-C or SIGTERM when the answers under way are there.
    """
    cli = Cli.of(ctx, as_json)
    settings = cli.settings(push_allow=allow, push_per_host=per_host, metrics_port=metrics_port)
    find_address = address_finder(cli, PUSH)
    # Here and not at the top: every other command would wait for it.
    from purveyor.app.telemetry.setup import telemetry  # noqa: PLC0415

    teller = Teller(json=cli.json)
    with telemetry(settings, "push", lambda: ()), asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(settings, find_address, teller))
    teller.say("stopped", "push")


async def _serve(settings: Settings, find_address: Callable[[], Address], teller: "Teller") -> None:
    from purveyor.app.push_input import box_of  # noqa: PLC0415 - as above
    from purveyor.delivery.push.egress_policy import parse_ranges  # noqa: PLC0415
    from purveyor.delivery.push.push_worker import PushOptions, Worker  # noqa: PLC0415
    from purveyor.queues.client import connect  # noqa: PLC0415

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)

    def tell(name: str, event: str, words: str) -> None:
        try:
            teller.tell(name, event, words)
        except OSError:  # the reader of our output is gone: so is whoever wanted this
            stop.set()

    options = PushOptions(
        box=box_of(settings),
        allowed=parse_ranges(settings.push_allow),
        per_host=settings.push_per_host,
        replicas=settings.replicas,
        tell=tell,
    )
    spare_imports()
    while not stop.is_set():
        try:
            async with connect(find_address(), name="purveyor-push", patience_seconds=_PATIENCE_SECONDS) as queues:
                worker = Worker(queues, options)
                readiness = asyncio.create_task(teller.ready(worker.ready))
                try:
                    await worker.run(stop)
                finally:
                    readiness.cancel()
        except PurveyorError as error:
            teller.waiting(str(error))
            await _wait(stop, _AGAIN_SECONDS)


async def _wait(stop: asyncio.Event, seconds: float) -> None:
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except TimeoutError:
        return


class Teller:
    """What the worker says of itself on standard output."""

    def __init__(self, *, json: bool) -> None:
        self._json = json
        self._waiting = ""

    def say(self, event: str, detail: str, **more: object) -> None:
        """One line."""
        if self._json:
            write_json({"event": event, "detail": detail, **more})
        else:
            write(f"{event}: {safe(detail)}")

    def tell(self, name: str, event: str, words: str) -> None:
        """About one subscription."""
        self.say(event, f"{name}: {words}", subscription=name)

    def waiting(self, why: str) -> None:
        """The server is away."""
        if why != self._waiting:
            self.say("waiting", why)
        self._waiting = why

    async def ready(self, known: asyncio.Event) -> None:
        """When all subscriptions are known."""
        await known.wait()
        self._waiting = ""
        self.say("ready", "push delivers")

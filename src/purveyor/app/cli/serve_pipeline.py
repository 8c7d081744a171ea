"""`purveyor serve pipeline`: transform, dispatch, archive and prefill on Spark, in the foreground."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Self

import typer

from purveyor.app.cli.context import Cli, JsonFlag
from purveyor.app.cli.pipeline_report import reporter_for
from purveyor.app.cli.render import note
from purveyor.app.private_files import tighten
from purveyor.jetstream.address import Address
from purveyor.model.errors import InvalidInput, ServerMissing
from purveyor.queues.permissions import PIPELINE

_AGAIN_SECONDS = 3.0
_INTERRUPTED = 130
PARTS = "transform,dispatch,archive,prefill"


def pipeline(
    ctx: typer.Context,
    master: Annotated[str | None, typer.Option(metavar="URL", help="The Spark master; default: local[*].")] = None,
    group: Annotated[
        str | None, typer.Option(metavar="NAME", help="The dispatcher group; each gets all events.")
    ] = None,
    parts: Annotated[str, typer.Option(metavar="NAMES", help="Only these parts.")] = PARTS,
    mapping: Annotated[
        Path | None, typer.Option(metavar="FILE", help="How entries become objects (TOML); default: built in.")
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Stand by while another process runs these parts.")
    ] = True,
    metrics_port: Annotated[
        int | None, typer.Option(metavar="PORT", help="Answer Prometheus there; default: nowhere.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Run the pipeline: entries become events, events reach the queue of every subscription, and the archive.

    A part that fails is started again by itself; a server that is away is waited for. Stops on Ctrl-C or SIGTERM after
    the batches that are under way; a second Ctrl-C stops at once. What Spark logs is in logs/ of the data directory.
    """
    cli = Cli.of(ctx, as_json)
    settings = cli.settings(
        spark_master=master, dispatcher_group=group, transform_mapping=mapping, metrics_port=metrics_port
    )
    find_address = address_finder(cli, PIPELINE)
    # Here and not at the top: Spark takes a second to import, and `serve nats` and every help page would wait for it.
    from purveyor.app.telemetry.pipeline_metrics import PipelineFigures  # noqa: PLC0415
    from purveyor.app.telemetry.setup import telemetry  # noqa: PLC0415
    from purveyor.pipeline.engine import EngineLost, start_engine  # noqa: PLC0415
    from purveyor.pipeline.part_factories import check_files, make_parts  # noqa: PLC0415
    from purveyor.pipeline.service import PartName, PipelineSettings, Service  # noqa: PLC0415

    chosen = []
    for word in parts.split(","):
        try:
            chosen.append(PartName(word.strip()))
        except ValueError:
            raise InvalidInput(f"there is no part {word.strip()!r}", fix=f"choose of {PARTS}") from None
    wanted = PipelineSettings(
        data_dir=settings.data_dir.absolute(),
        find_address=find_address,
        parts=tuple(dict.fromkeys(chosen)),
        master=settings.spark_master,
        group=settings.dispatcher_group,
        mapping=settings.transform_mapping,
        archive_seconds=settings.archive_seconds,
        replicas=settings.replicas,
        migrate=settings.migrate,
        wait=wait,
    )
    check_files(wanted)
    tighten(settings.data_dir)
    stop = threading.Event()
    with reporter_for(json=cli.json) as reporter, Signals(stop):
        figures = PipelineFigures(reporter)
        try:
            with telemetry(settings, "pipeline", figures.read, draws=True):
                Service(wanted, make_parts, figures, start_engine=partial(start_engine, ui=settings.spark_ui)).run(stop)
        except EngineLost as lost:
            if not stop.is_set():
                reporter.say("restarting", f"{lost.message}; starting again in {_AGAIN_SECONDS:g} s")
            if not stop.wait(_AGAIN_SECONDS):
                start_again()
        reporter.say("stopped", "the pipeline")


def address_finder(cli: Cli, component: str) -> Callable[[], Address]:
    """Where the server is for a component: told at once if there is none, later the last place where there was one.

    The server on the data directory may be started again by hand, at another port; until then it is just away.
    """
    last = cli.address(component)

    def find() -> Address:
        nonlocal last
        with contextlib.suppress(ServerMissing):
            last = cli.address(component)
        return last

    return find


def start_again() -> None:
    """A new process in the place of this one: Spark cannot be started twice with confidence in one."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - ourselves


class Signals:
    """Ctrl-C and SIGTERM ask for a stop; a second Ctrl-C ends at once."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal() gave back

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._stop.is_set() and number == signal.SIGINT:
            if sys.stdout.isatty():
                sys.stdout.write("\x1b[?25h\n")  # the live table hides the cursor
                sys.stdout.flush()
            note("stopped at once: what was under way is done again at the next start")
            os._exit(_INTERRUPTED)
        self._stop.set()

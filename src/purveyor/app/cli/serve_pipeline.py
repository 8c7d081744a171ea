"""`purveyor serve pipeline`: transform, dispatch, archive and prefill on Spark, in the foreground."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Protocol, Self

import typer

from purveyor.app import running_parts
from purveyor.app.cli.context import Cli, JsonFlag
from purveyor.app.cli.output import EXIT_INTERRUPTED, escape, write, write_json, write_note
from purveyor.app.process_setup import restrict_permissions
from purveyor.app.running_parts import announce
from purveyor.model.errors import InvalidInput
from purveyor.model.extras import require_extras
from purveyor.queues.permissions import PIPELINE

if TYPE_CHECKING:  # importing the pipeline imports Spark: only the command itself does that
    from rich.live import Live
    from rich.table import Table

    from purveyor.pipeline.part_status import PartStatus

_RESTART_SECONDS = 3.0
_SUMMARY_INTERVAL_SECONDS = 30.0
PARTS = "transform,dispatch,archive,prefill"


def pipeline(
    ctx: typer.Context,
    master: Annotated[str | None, typer.Option(metavar="URL", help="The Spark master; default: local[*].")] = None,
    group: Annotated[
        str | None, typer.Option(metavar="NAME", help="The dispatcher group; each group gets all events.")
    ] = None,
    parts: Annotated[str, typer.Option(metavar="NAMES", help="Run only these parts.")] = PARTS,
    mapping: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="How entries become objects: udm (the default), plain, or a TOML file."),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Stand by while another process runs these parts, or fail.")
    ] = True,
    metrics_port: Annotated[
        int | None, typer.Option(metavar="PORT", help="Serve Prometheus metrics there; default: not at all.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Run the pipeline: it makes events of directory entries, and writes events to subscriptions and the archive.

    The pipeline restarts a part that fails, and waits for a NATS server that is away. Ctrl-C or SIGTERM stops it after
    the running batches; a second Ctrl-C stops it at once. Spark logs to logs/ in the data directory.

    A second process on the same data directory starts Spark, stands by, and takes over when the first one ends.
    """
    require_extras("`purveyor serve pipeline`", "spark")
    cli = Cli.of(ctx, as_json)
    settings = cli.settings(spark_master=master, dispatcher_group=group, mapping=mapping, metrics_port=metrics_port)
    find_address = cli.address_finder(PIPELINE)
    # Here and not at the top: Spark takes a second to import, and `serve nats` and every help page would wait for it.
    from purveyor.app.telemetry.pipeline_metrics import PipelineMetrics  # noqa: PLC0415
    from purveyor.app.telemetry.setup import telemetry  # noqa: PLC0415
    from purveyor.pipeline.engine import EngineLost, start_engine  # noqa: PLC0415
    from purveyor.pipeline.part_starts import check_files, make_parts  # noqa: PLC0415
    from purveyor.pipeline.pipeline_settings import PartName, PipelineSettings  # noqa: PLC0415
    from purveyor.pipeline.service import PipelineService  # noqa: PLC0415

    chosen = []
    for word in parts.split(","):
        try:
            chosen.append(PartName(word.strip()))
        except ValueError:
            raise InvalidInput(f"there is no part {word.strip()!r}", fix=f"choose from {PARTS}") from None
    wanted = PipelineSettings(
        data_dir=settings.data_dir.absolute(),
        find_address=find_address,
        parts=tuple(dict.fromkeys(chosen)),
        master=settings.spark_master,
        group=settings.dispatcher_group,
        mapping=settings.mapping,
        archive_seconds=settings.archive_seconds,
        replicas=settings.replicas,
        migrate=settings.migrate,
        wait=wait,
        warm_up=settings.warm_up,
    )
    check_files(wanted)
    restrict_permissions(settings.data_dir)
    stop = threading.Event()
    with reporter_for(json=cli.json) as reporter, Signals(stop):
        metrics = PipelineMetrics(reporter)
        try:
            with (
                telemetry(settings, "pipeline", metrics.read, draws=True) as metrics_url,
                announce(settings.data_dir, running_parts.PIPELINE, metrics_url=metrics_url),
            ):
                PipelineService(
                    wanted, make_parts, metrics, start_engine=partial(start_engine, ui=settings.spark_ui)
                ).run(stop)
        except EngineLost as lost:
            if not stop.is_set():
                reporter.report_step("restarting", f"{lost.message}; starting again in {_RESTART_SECONDS:g} s")
            if not stop.wait(_RESTART_SECONDS):
                restart_process()
        reporter.report_step("stopped", "the pipeline")


def restart_process() -> None:
    """Replace this process by a new one: Spark does not start twice reliably in one process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - the same program


class Signals:
    """Handlers that set `stop` on Ctrl-C and SIGTERM; a second Ctrl-C ends the process at once."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._previous_handlers: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous_handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal() returned

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._stop.is_set() and number == signal.SIGINT:
            if sys.stdout.isatty():
                sys.stdout.write("\x1b[?25h\n")  # the live table hides the cursor
                sys.stdout.flush()
            write_note("stopped at once: the next start repeats the batches that were running")
            os._exit(EXIT_INTERRUPTED)
        self._stop.set()


class Reporter(Protocol):
    """Shows what the pipeline does."""

    def report_step(self, event: str, text: str) -> None:
        """Report a step of the service, such as `ready`."""

    def report_parts(self, parts: "Sequence[PartStatus]") -> None:
        """Report the status of all parts."""


class JsonLines:
    """Reports one JSON object for each step and for each change of a part, each batch included."""

    def __init__(self) -> None:
        self._last: dict[str, PartStatus] = {}

    def report_step(self, event: str, text: str) -> None:
        """Report a step of the service."""
        write_json({"event": event, "detail": text})

    def report_parts(self, parts: "Sequence[PartStatus]") -> None:
        """Write the parts that have changed."""
        for part in parts:
            if self._last.get(part.name) != part:
                self._last[part.name] = part
                write_json({"event": "progress", **part.to_json()})


class Lines:
    """Reports a line when the state or error of a part changes, and all parts at an interval."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[object, ...]] = {}
        self._next_summary = time.monotonic() + _SUMMARY_INTERVAL_SECONDS

    def report_step(self, event: str, text: str) -> None:
        """Report a step of the service."""
        write(f"{event}: {escape(text)}")

    def report_parts(self, parts: "Sequence[PartStatus]") -> None:
        """Write the parts that have changed, or all of them when the interval has passed."""
        due = time.monotonic() >= self._next_summary
        for part in parts:
            seen = (part.state, part.error, part.restarts)
            if due or self._last.get(part.name) != seen:
                write(escape(part.line()))
            self._last[part.name] = seen
        if due:
            self._next_summary = time.monotonic() + _SUMMARY_INTERVAL_SECONDS


class LiveTable:
    """Reports the parts as a table that is redrawn in place, with the steps above it."""

    def __init__(self) -> None:
        self._live: Live | None = None

    def report_step(self, event: str, text: str) -> None:
        """Report a step of the service."""
        if self._live is not None:
            self._live.console.print(f"{event}: {escape(text)}", markup=False, highlight=False)
        else:
            write(f"{event}: {escape(text)}")

    def report_parts(self, parts: "Sequence[PartStatus]") -> None:
        """Redraw the table. It starts with the first part, because Spark starts with our output redirected."""
        if self._live is None:
            from rich.live import Live  # noqa: PLC0415 - a pipe never needs it

            self._live = Live(auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
            self._live.start()
        self._live.update(_table(parts), refresh=True)

    def close(self) -> None:
        """End the redrawing; the last state stays on the screen."""
        if self._live is not None:
            self._live.stop()


@contextlib.contextmanager
def reporter_for(*, json: bool) -> Iterator[Reporter]:
    """Choose the reporter for JSON, a pipe or a terminal."""
    if json:
        yield JsonLines()
    elif not sys.stdout.isatty():
        yield Lines()
    else:
        table = LiveTable()
        try:
            yield table
        finally:
            table.close()


def _table(parts: "Sequence[PartStatus]") -> "Table":
    from rich.table import Table  # noqa: PLC0415 - as above
    from rich.text import Text  # noqa: PLC0415

    columns = ("part", "state", "position", "behind", "rows/s", "batch", "restarts", "last error")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=column != "last error", overflow="fold")
    for part in parts:
        progress = part.progress
        cells = (
            part.name,
            part.state.value,
            progress.position,
            progress.lag,
            f"{progress.rows_per_second:,.0f}" if progress.batch_ms is not None else None,
            f"{progress.batch_ms} ms" if progress.batch_ms is not None else None,
            part.restarts or None,
            part.error,
        )
        table.add_row(*(Text("-" if cell is None else escape(str(cell))) for cell in cells))
    return table

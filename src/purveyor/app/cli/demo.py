"""`purveyor demo`: run the whole system on sample data; exit code 0 only if every message arrived once and in order."""

import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from purveyor.app.cli.context import Cli, JsonFlag, examples
from purveyor.app.cli.output import write, write_json, write_note
from purveyor.app.cli.render import format_table
from purveyor.model.extras import require_extras

if TYPE_CHECKING:
    from purveyor.app.demo.scenario import OnProgress, Result
    from purveyor.app.demo.subscribers import DeliveryCheck

app = typer.Typer(help="Run the whole system on sample data.", rich_markup_mode=None, add_completion=False)
_COLUMNS: Final = (
    "SUBSCRIBER",
    "SERVED BY",
    "GOT",
    "OF",
    "TWICE",
    "OUT OF ORDER",
    "RETRIED",
    "PER SECOND",
    "P50",
    "P99",
)
_SECONDS_BETWEEN_LINES: Final = 10.0


@app.command("demo", epilog=examples("purveyor demo", "purveyor demo --people 5000 --keep ./demo"))
def demo(
    ctx: typer.Context,
    people: Annotated[int, typer.Option(min=20, max=200_000, help="Number of people in the directory.")] = 2000,
    keep: Annotated[Path | None, typer.Option(metavar="DIRECTORY", help="Keep the data in this directory.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Start all parts on this machine, import a directory, serve every kind of subscriber, and check all deliveries.

    One subscriber pulls in order, one in parallel, one is a webhook that fails at times, one is a transactional stage
    that fills a table, and one is added late with a prefill. While changes stream in, the demo kills the pipeline once.
    At the end it audits every queue.
    """
    cli = Cli.of(ctx, as_json)
    require_extras("`purveyor demo`", "spark", "stages")
    from purveyor.app.demo.scenario import run  # noqa: PLC0415 - no other command needs it

    with tempfile.TemporaryDirectory(prefix="purveyor-demo-") as scratch, _progress() as on_progress:
        result = run(keep.absolute() if keep else Path(scratch), write_note, on_progress, people=people)
    if cli.json:
        write_json(_as_json(result))
    else:
        _show(result)
    if result.wrong:
        raise typer.Exit(1)


def _show(result: "Result") -> None:
    rows = [
        (
            *(
                each.name,
                each.served_by,
                f"{each.got:,}",
                f"{each.expected:,}",
                each.duplicates,
                each.out_of_order,
                each.retried,
            ),
            *(f"{each.rate:,.0f}", _milliseconds(each.latency(0.5)), _milliseconds(each.latency(0.99))),
        )
        for each in result.checks
    ]
    write(format_table(_COLUMNS, rows))
    write(
        f"\nImported {result.imported:,} records; {result.people:,} people are left, and every subscriber has them. "
        f"{result.dead_letters:,} dead letters.\n"
        f"The demo killed the pipeline once; {result.recovery_seconds:.0f} s later the next event was delivered.\n"
        "P50 and P99: latency from the record in the source to the subscriber, without disturbance.\n"
        "While the pipeline restarted and the late subscriber was filled, the slowest subscriber had: p50 "
        f"{_worst_disturbed_latency(result, 0.5)}, p99 {_worst_disturbed_latency(result, 0.99)}."
    )
    for line in result.wrong:
        write(f"WRONG: {line}")
    if not result.wrong:
        write("Every message arrived once and in order; the audit found no difference.")


def _as_json(result: "Result") -> dict[str, Any]:
    received = [
        {
            "name": each.name,
            "served_by": each.served_by,
            "got": each.got,
            "expected": each.expected,
            "doubled": each.duplicates,
            "out_of_order": each.out_of_order,
            "retried": each.retried,
            "per_second": round(each.rate, 1),
            "latency_p50_seconds": each.latency(0.5),
            "latency_p99_seconds": each.latency(0.99),
            "disturbed_p50_seconds": each.latency(0.5, calm=False),
            "disturbed_p99_seconds": each.latency(0.99, calm=False),
        }
        for each in result.checks
    ]
    return {
        "imported": result.imported,
        "people": result.people,
        "dead_letters": result.dead_letters,
        "recovery_seconds": round(result.recovery_seconds, 1),
        "received": received,
        "audit": result.audit,
        "wrong": list(result.wrong),
    }


def _worst_disturbed_latency(result: "Result", share: float) -> str:
    found = [seconds for each in result.checks if (seconds := each.latency(share, calm=False)) is not None]
    return f"{max(found, default=0.0):,.1f} s"


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:,.0f} ms"


@contextlib.contextmanager
def _progress() -> "Iterator[OnProgress]":
    """Show progress: a status line on a terminal, else a line for each phase and at an interval."""
    if not sys.stderr.isatty():
        yield _ProgressLines()
        return
    from rich.console import Console  # noqa: PLC0415 - a pipe never needs it

    with Console(stderr=True).status("starting", spinner="dots") as status:

        def show(phase: str, checks: "Sequence[DeliveryCheck]") -> None:
            status.update(f"{phase}  [dim]{_progress_text(checks)}[/dim]")

        yield show


class _ProgressLines:
    def __init__(self) -> None:
        self._phase = ""
        self._written_at = 0.0

    def __call__(self, phase: str, checks: "Sequence[DeliveryCheck]") -> None:
        now = time.monotonic()
        if phase != self._phase:
            write_note(f"== {phase}")
        elif now - self._written_at < _SECONDS_BETWEEN_LINES or not checks:
            return
        else:
            write_note(f"   {_progress_text(checks)}")
        self._phase, self._written_at = phase, now


def _progress_text(checks: "Sequence[DeliveryCheck]") -> str:
    return " · ".join(f"{each.name} {each.got:,}/{each.expected:,}" for each in checks)

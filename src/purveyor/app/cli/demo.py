"""`purveyor demo`: the whole system on sample data; exit code 0 only if nothing was lost, doubled or out of order."""

import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from purveyor.app.cli.context import Cli, JsonFlag, examples
from purveyor.app.cli.render import note, table, write, write_json

if TYPE_CHECKING:
    from purveyor.app.demo.delivery_check import Ledger
    from purveyor.app.demo.scenario import Result, Watch

app = typer.Typer(help="Run the whole system on sample data.", rich_markup_mode=None, add_completion=False)
_COLUMNS: Final = ("SUBSCRIBER", "SERVED BY", "GOT", "OF", "TWICE", "DISORDER", "RETRIED", "PER SECOND", "P50", "P99")
_SECONDS_BETWEEN_LINES: Final = 10.0


@app.command("demo", epilog=examples("purveyor demo", "purveyor demo --people 5000 --keep ./demo"))
def demo(
    ctx: typer.Context,
    people: Annotated[int, typer.Option(min=20, max=200_000, help="How many people the directory has.")] = 2000,
    keep: Annotated[Path | None, typer.Option(metavar="DIRECTORY", help="Leave the data there.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Start everything on this machine, import a directory, serve every kind of subscriber, and prove that all arrived.

    One pulls in order, one in parallel, one is pushed to and fails at times, one is a transactional stage that fills a
    table, and one comes late and is given the state of that moment first. While changes stream in, the pipeline is
    killed once. In the end every queue is audited.
    """
    cli = Cli.of(ctx, as_json)
    from purveyor.app.demo.scenario import run  # noqa: PLC0415 - no other command needs it

    with tempfile.TemporaryDirectory(prefix="purveyor-demo-") as scratch, _progress() as watch:
        result = run(keep.absolute() if keep else Path(scratch), note, watch, people=people)
    if cli.json:
        write_json(_told(result))
    else:
        _show(result)
    if result.wrong:
        raise typer.Exit(1)


def _show(result: "Result") -> None:
    rows = [
        (
            *(each.name, each.way, f"{each.got:,}", f"{each.expected:,}", each.doubled, each.disordered, each.again),
            *(f"{each.rate:,.0f}", _milliseconds(each.latency(0.5)), _milliseconds(each.latency(0.99))),
        )
        for each in result.ledgers
    ]
    write(table(_COLUMNS, rows))
    write(
        f"\n{result.imported:,} records went in; {result.people:,} people are left, and every subscriber knows them. "
        f"{result.dead_letters:,} dead letters.\n"
        f"The pipeline was killed once; {result.recovery_seconds:.0f} s later the next event was delivered.\n"
        "P50 and P99: from the record in the source to the subscriber, while changes stream in and nothing else\n"
        "happens. While the pipeline was down and started again, and while the late one was filled: p50 "
        f"{_in_rough(result, 0.5)}, p99 {_in_rough(result, 0.99)} (the slowest subscriber's)."
    )
    for line in result.wrong:
        write(f"WRONG: {line}")
    if not result.wrong:
        write("Nothing lost, nothing twice, everything in order; the audit is empty.")


def _told(result: "Result") -> dict[str, Any]:
    received = [
        {
            "name": each.name,
            "served_by": each.way,
            "got": each.got,
            "expected": each.expected,
            "doubled": each.doubled,
            "out_of_order": each.disordered,
            "retried": each.again,
            "per_second": round(each.rate, 1),
            "latency_p50_seconds": each.latency(0.5),
            "latency_p99_seconds": each.latency(0.99),
            "disturbed_p50_seconds": each.latency(0.5, calm=False),
            "disturbed_p99_seconds": each.latency(0.99, calm=False),
        }
        for each in result.ledgers
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


def _in_rough(result: "Result", share: float) -> str:
    found = [seconds for each in result.ledgers if (seconds := each.latency(share, calm=False)) is not None]
    return f"{max(found, default=0.0):,.1f} s"


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:,.0f} ms"


@contextlib.contextmanager
def _progress() -> "Iterator[Watch]":
    """A line that moves on a terminal; elsewhere one for each scene, and now and then how far it is."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console  # noqa: PLC0415 - a pipe never needs it

    with Console(stderr=True).status("starting", spinner="dots") as status:

        def show(scene: str, ledgers: "Sequence[Ledger]") -> None:
            status.update(f"{scene}  [dim]{_how_far(ledgers)}[/dim]")

        yield show


class _Lines:
    def __init__(self) -> None:
        self._scene = ""
        self._told_at = 0.0

    def __call__(self, scene: str, ledgers: "Sequence[Ledger]") -> None:
        now = time.monotonic()
        if scene != self._scene:
            note(f"== {scene}")
        elif now - self._told_at < _SECONDS_BETWEEN_LINES or not ledgers:
            return
        else:
            note(f"   {_how_far(ledgers)}")
        self._scene, self._told_at = scene, now


def _how_far(ledgers: "Sequence[Ledger]") -> str:
    return " · ".join(f"{each.name} {each.got:,}/{each.expected:,}" for each in ledgers)

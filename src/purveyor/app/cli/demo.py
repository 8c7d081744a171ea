"""`purveyor demo`: the whole system on sample data; exit code 0 only if nothing was lost, doubled or out of order."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from purveyor.app.cli.context import Cli, JsonFlag, examples
from purveyor.app.cli.render import note, table, write, write_json

app = typer.Typer(help="Run the whole system on sample data.", rich_markup_mode=None, add_completion=False)


@app.command("demo", epilog=examples("purveyor demo", "purveyor demo --people 5000 --keep ./demo"))
def demo(
    ctx: typer.Context,
    people: Annotated[int, typer.Option(min=20, max=200_000, help="How many people the directory has.")] = 1000,
    keep: Annotated[Path | None, typer.Option(metavar="DIRECTORY", help="Leave the data there.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Start everything on this machine, import a directory, serve two subscribers, and prove that all arrived.

    One subscriber is there from the start; one comes late and is given the state of that moment first.
    """
    cli = Cli.of(ctx, as_json)
    from purveyor.app.demo.run import Result, run  # noqa: PLC0415 - no other command needs it

    def show(result: Result) -> None:
        rows = [
            (got.name, got.prefill, got.live, got.doubled, got.disordered, len(got.objects)) for got in result.received
        ]
        write(table(("SUBSCRIBER", "PREFILL", "EVENTS", "DOUBLED", "OUT OF ORDER", "OBJECTS KNOWN"), rows))
        write(f"\n{result.imported:,} records imported, {result.people:,} people in the end.")
        for line in result.wrong:
            write(f"WRONG: {line}")
        if not result.wrong:
            write("Nothing lost, nothing twice, everything in order; the audit is empty.")

    with tempfile.TemporaryDirectory(prefix="purveyor-demo-") as scratch:
        result = run(keep.absolute() if keep else Path(scratch), note, people=people)
    if cli.json:
        told = [{"name": got.name, "prefill": got.prefill, "events": got.live} for got in result.received]
        write_json({"imported": result.imported, "received": told, "audit": result.audit, "wrong": result.wrong})
    else:
        show(result)
    if result.wrong:
        raise typer.Exit(1)

"""`purveyor import`: read LDIF files into the queue `ldif`, each record once."""

import asyncio
import signal
import sys
import time
from typing import Annotated

import typer

from purveyor.app.cli.context import Cli, JsonFlag, examples
from purveyor.app.cli.output import EXIT_INTERRUPTED, escape, progress, write, write_json, write_note
from purveyor.model.errors import InvalidInput
from purveyor.queues.catalogue import LDIF
from purveyor.queues.client import Queues
from purveyor.queues.permissions import SOURCES
from purveyor.sources.ldif.importer import ImportCounts, Importer, ImportListener
from purveyor.sources.ldif.inputs import STDIN, Input, InputChange, find_inputs
from purveyor.sources.ldif.queue_store import DryRunStore, QueueStore, RecordStore
from purveyor.sources.ldif.records import BrokenRecord

app = typer.Typer(rich_markup_mode=None, add_completion=False)
_EXIT_SOME_PARKED = 3
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@app.command(
    epilog=examples(
        "purveyor import people.ldif",
        "purveyor import exports/ --source directory",
        "zcat people.ldif.gz | purveyor import - --source people",
        "purveyor import /var/lib/ldap/auditlog.ldif --follow",
        "purveyor import people.ldif --dry-run --json",
    )
)
def import_(
    ctx: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE|DIR|-", help="A file, a directory (all *.ldif in order of their names), or standard input."
        ),
    ],
    follow: Annotated[bool, typer.Option("--follow", help="Keep reading a file that grows, until Ctrl-C.")] = False,
    source: Annotated[
        str | None, typer.Option(metavar="NAME", help="The name of the source; default: the name of the file.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Read and check the records, and store nothing.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Read LDIF (entries or changes) into the queue ldif, in order, each record once.

    The command skips records that were imported before, so an interrupted import, or one of a file that has grown,
    continues where it ended. It stores an invalid record as a dead letter, reports its line, and imports the rest.

    Exit codes: 0 all records are stored; 3 some records were invalid and became dead letters; 1 an error; 130 ended by
    Ctrl-C before the end (with --follow, Ctrl-C is the normal end).
    """
    cli = Cli.of(ctx, as_json)
    inputs = find_inputs(target, source=source)
    if follow and (len(inputs) > 1 or inputs[0].size is None):
        raise InvalidInput(
            "--follow needs one file" + (": standard input is always read to its end" if target == STDIN else ""),
            fix="leave out --follow, or give a file",
        )
    if follow and dry_run:
        raise InvalidInput("--follow and --dry-run exclude each other", fix="leave out one of them")
    replicas = cli.settings().replicas
    begun = time.monotonic()

    async def work(queues: Queues) -> ImportCounts:
        store = await QueueStore.open(queues, replicas=replicas, wait_for_ever=follow)
        queues.connection.on_state = _note_connection_state
        try:
            tally = await _run(store, inputs, follow=follow)
            if tally.position is None and not tally.stopped:
                tally.position = (await queues.streams.info(LDIF.stream)).state.last_seq
            return tally
        finally:
            queues.connection.on_state = None

    tally = asyncio.run(_run(DryRunStore(), inputs, follow=False)) if dry_run else cli.call(work, SOURCES)
    _print_tally(cli, tally, escape(target), dry_run=dry_run, seconds=time.monotonic() - begun)
    if tally.stopped and not follow:
        raise typer.Exit(EXIT_INTERRUPTED)
    if tally.broken:
        raise typer.Exit(_EXIT_SOME_PARKED)


async def _run(store: RecordStore, inputs: list[Input], *, follow: bool) -> ImportCounts:
    """Import until the end; Ctrl-C stops after the records that are under way, a second Ctrl-C at once."""
    sizes = [given.size for given in inputs if given.size is not None]
    total = sum(sizes) if len(sizes) == len(inputs) and not follow else None
    outcome = "" if isinstance(store, DryRunStore) else " (stored as a dead letter)"
    several = len(inputs) > 1

    def on_broken(given: Input, broken: BrokenRecord) -> None:
        write_note(f"{f'{given.name}: ' if several else ''}line {broken.line}: {broken.reason}{outcome}")

    def on_change(given: Input, change: InputChange) -> None:
        write_note(f"{given.name} was {change.value}: reading it again from its beginning")

    loop = asyncio.get_running_loop()
    with progress("bytes read", total) as advance:
        listener = ImportListener(on_bytes=advance, on_broken=on_broken, on_change=on_change)
        importer = Importer(store, follow=follow, listener=listener)

        def stop() -> None:
            importer.stop()
            release()

        def release() -> None:
            for number in _STOP_SIGNALS:
                loop.remove_signal_handler(number)

        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, stop)
        try:
            if follow and not sys.stderr.isatty():
                write_note(f"Following {inputs[0].name}")
            return await importer.run(inputs)
        finally:
            release()


def _note_connection_state(state: str) -> None:
    write_note("the server is away: waiting" if state == "disconnected" else "the server is back")


def _print_tally(cli: Cli, tally: ImportCounts, target: str, *, dry_run: bool, seconds: float) -> None:
    rate = tally.records / seconds if seconds else 0.0
    if cli.json:
        write_json(
            {
                "files": tally.files,
                "records": tally.records,
                "added": tally.added,
                "skipped": tally.known,
                "broken": tally.broken,
                "unanswered": tally.unanswered,
                "position": tally.position,
                "seconds": round(seconds, 3),
                "records_per_second": round(rate),
                "dry_run": dry_run,
                "interrupted": tally.stopped,
            }
        )
        return
    if dry_run:
        write(f"Checked {target}: {tally.added} valid, {tally.broken} invalid; nothing was stored")
        return
    begin = "Stopped importing" if tally.stopped else "Imported"
    unanswered = f", {tally.unanswered} not answered" if tally.unanswered else ""
    where = f"; position {tally.position} in {LDIF.stream}" if tally.position is not None else ""
    write(
        f"{begin} {target}: {tally.added} added, {tally.known} skipped, {tally.broken} dead letters{unanswered}{where}"
        f" ({rate:,.0f} records/s)"
    )

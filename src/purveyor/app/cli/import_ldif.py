"""`purveyor import`: LDIF files into the queue `ldif`, each record once."""

import asyncio
import signal
import sys
import time
from typing import Annotated

import typer

from purveyor.app.cli.context import Cli, JsonFlag, examples
from purveyor.app.cli.progress import progress
from purveyor.app.cli.render import note, write, write_json
from purveyor.app.cli.sanitize import safe
from purveyor.model.errors import InvalidInput
from purveyor.queues.catalogue import LDIF
from purveyor.queues.client import Queues
from purveyor.queues.permissions import INTAKE
from purveyor.sources.ldif.importer import Importer, Listener, Tally
from purveyor.sources.ldif.inputs import STDIN, Input, Mark, find_inputs
from purveyor.sources.ldif.queue_store import Checked, QueueStore, Store
from purveyor.sources.ldif.records import Broken

app = typer.Typer(rich_markup_mode=None, add_completion=False)
SOME_PARKED = 3
_INTERRUPTED = 130
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
        str, typer.Argument(metavar="FILE|DIR|-", help="A file, all *.ldif of a directory by name, or standard input.")
    ],
    follow: Annotated[bool, typer.Option("--follow", help="Keep reading a file that grows, until Ctrl-C.")] = False,
    source: Annotated[
        str | None, typer.Option(metavar="NAME", help="What the records are from; default: the file's name.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Read and check, and send nothing.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Read LDIF (entries or changes) into the queue ldif, in order, each record once.

    What was imported before is skipped, so an import that was interrupted, or a file that has grown, goes on where it
    ended. A broken record is parked as a dead letter and told with its line; the rest goes on.

    Exit codes: 0 all went in; 3 some records were broken and parked; 1 an error; 130 ended by Ctrl-C before the end
    (with --follow Ctrl-C is the end).
    """
    cli = Cli.of(ctx, as_json)
    inputs = find_inputs(target, source=source)
    if follow and (len(inputs) > 1 or inputs[0].size is None):
        raise InvalidInput(
            "--follow is for one file" + (": standard input is read to its end anyway" if target == STDIN else ""),
            fix="leave out --follow, or name a file",
        )
    if follow and dry_run:
        raise InvalidInput("--follow and --dry-run", fix="leave out one of them")
    replicas = cli.settings().replicas
    begun = time.monotonic()

    async def work(queues: Queues) -> Tally:
        store = await QueueStore.open(queues, replicas=replicas, wait_for_ever=follow)
        queues.connection.on_state = _tell_connection
        try:
            tally = await _run(store, inputs, follow=follow)
            if tally.position is None and not tally.stopped:
                tally.position = (await queues.streams.info(LDIF.stream)).state.last_seq
            return tally
        finally:
            queues.connection.on_state = None

    tally = asyncio.run(_run(Checked(), inputs, follow=False)) if dry_run else cli.call(work, INTAKE)
    _tell(cli, tally, safe(target), dry_run=dry_run, seconds=time.monotonic() - begun)
    if tally.stopped and not follow:
        raise typer.Exit(_INTERRUPTED)
    if tally.broken:
        raise typer.Exit(SOME_PARKED)


async def _run(store: Store, inputs: list[Input], *, follow: bool) -> Tally:
    """An import that Ctrl-C ends in good order; a second Ctrl-C ends it at once."""
    sizes = [given.size for given in inputs if given.size is not None]
    total = sum(sizes) if len(sizes) == len(inputs) and not follow else None
    fate = "" if isinstance(store, Checked) else " (parked)"
    several = len(inputs) > 1

    def on_broken(given: Input, broken: Broken) -> None:
        note(f"{f'{given.name}: ' if several else ''}line {broken.line}: {broken.reason}{fate}")

    def on_mark(given: Input, mark: Mark) -> None:
        note(f"{given.name} was {mark.value}: it is read again from its beginning")

    loop = asyncio.get_running_loop()
    with progress("bytes read", total) as advance:
        listener = Listener(on_bytes=advance, on_broken=on_broken, on_mark=on_mark)
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
                note(f"Following {inputs[0].name}")
            return await importer.run(inputs)
        finally:
            release()


def _tell_connection(state: str) -> None:
    note("the server is away: waiting for it" if state == "disconnected" else "the server is back")


def _tell(cli: Cli, tally: Tally, target: str, *, dry_run: bool, seconds: float) -> None:
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
        write(f"Checked {target}: {tally.added} good, {tally.broken} broken; nothing was sent")
        return
    begin = "Stopped importing" if tally.stopped else "Imported"
    unanswered = f", {tally.unanswered} not answered" if tally.unanswered else ""
    where = f"; position {tally.position} in {LDIF.stream}" if tally.position is not None else ""
    write(
        f"{begin} {target}: {tally.added} added, {tally.known} skipped, {tally.broken} parked{unanswered}{where}"
        f" ({rate:,.0f} records/s)"
    )

"""`purveyor archive`: ask the archive in SQL, make a snapshot, merge small files."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from purveyor.app.cli.audit import audit
from purveyor.app.cli.context import Cli, JsonFlag, examples
from purveyor.app.cli.progress import progress
from purveyor.app.cli.render import note, table, write, write_json
from purveyor.jetstream.address import Address
from purveyor.model.errors import ServerMissing, Unavailable, UnknownStream
from purveyor.queues.catalogue import incoming

if TYPE_CHECKING:  # it brings Spark, which a help page does not need
    from purveyor.pipeline.archive.sql import Answer

app = typer.Typer(
    help="Ask the archive in SQL, make a snapshot, merge small files.",
    rich_markup_mode=None,
    add_completion=False,
)
_WORKING = "Spark is working"


@app.callback()
def archive() -> None:
    """Ask the archive in SQL, make a snapshot, merge small files."""


@app.command(
    "query",
    epilog=examples(
        'purveyor archive query "select topic, count(*) from events group by topic"',
        "purveyor archive query \"select key, new:mail::string from objects where topic = 'users/user'\" --limit 20",
        'purveyor archive query "select * from events where position > 1000" --json',
    ),
)
def query(
    ctx: typer.Context,
    sql: Annotated[str, typer.Argument(metavar="SQL", help="A query in Spark SQL.")],
    limit: Annotated[int, typer.Option(metavar="ROWS", min=1, help="At most so many rows.")] = 1000,
    as_json: JsonFlag = False,
) -> None:
    """Ask all of history in SQL. With --json one object on each line.

    Tables: events (every event, with its objects old and new as VARIANT), objects (the current state, same columns),
    messages (everything, also what is no event). What is not archived yet is included while the server runs.
    """
    cli = Cli.of(ctx, as_json)
    address = _server(cli)
    with progress(_WORKING):
        # Here and not at the top: Spark takes a second to import.
        from purveyor.pipeline.adhoc_session import quiet_spark  # noqa: PLC0415
        from purveyor.pipeline.archive.reader import ArchiveSource  # noqa: PLC0415
        from purveyor.pipeline.archive.sql import answer  # noqa: PLC0415

        with quiet_spark(cli.settings().spark_master) as spark:
            found = answer(spark, ArchiveSource(address, _directory(cli), incoming().stream), sql, limit=limit)
    _show(cli, found)


@app.command("snapshot", epilog=examples("purveyor archive snapshot"))
def snapshot(ctx: typer.Context, as_json: JsonFlag = False) -> None:
    """Keep the current state of all objects, so that prefills and queries of objects need not read all of history.

    The pipeline does this by itself as the archive grows. The last two snapshots are kept.
    """
    cli = Cli.of(ctx, as_json)
    with progress(_WORKING):
        from purveyor.pipeline.adhoc_session import quiet_spark  # noqa: PLC0415
        from purveyor.pipeline.archive.range_store import Store  # noqa: PLC0415
        from purveyor.pipeline.archive.snapshot import snapshot as make  # noqa: PLC0415 - see above

        store = Store(_directory(cli))
        with quiet_spark(cli.settings().spark_master) as spark:
            position = make(spark, store)
        size = store.snapshot_size(position)
    if cli.json:
        write_json({"position": position, "bytes": size})
    else:
        write(f"Snapshot at position {position}" if position else "The archive is empty: nothing to do")


@app.command("compact", epilog=examples("purveyor archive compact"))
def compact(ctx: typer.Context, as_json: JsonFlag = False) -> None:
    """Merge small neighbouring files of the archive where that is worthwhile.

    The pipeline does this by itself every half minute; it is safe to do it at the same time.
    """
    cli = Cli.of(ctx, as_json)
    with progress(_WORKING):
        from purveyor.pipeline.adhoc_session import quiet_spark  # noqa: PLC0415
        from purveyor.pipeline.archive.compaction import compact as merge  # noqa: PLC0415 - see above
        from purveyor.pipeline.archive.compaction import sizes  # noqa: PLC0415
        from purveyor.pipeline.archive.range_store import Store  # noqa: PLC0415

        store = Store(_directory(cli))
        with quiet_spark(cli.settings().spark_master) as spark:
            replaced = merge(spark, store)
        store.tidy()
        left = len(sizes(store))
    if cli.json:
        write_json({"replaced": replaced, "ranges": left})
    else:
        write(
            f"Merged {replaced} ranges; the archive has {left} now" if replaced else f"Nothing to merge: {left} ranges"
        )


app.command(
    "audit",
    epilog=examples("purveyor archive audit", "purveyor archive audit --subscription ox --from 1 --to 5000 --json"),
)(audit)


def _directory(cli: Cli) -> Path:
    return cli.settings().data_dir.absolute() / "archive"


def _server(cli: Cli) -> Address | None:
    """The server, for what is not archived yet; None when there is none to ask."""
    try:
        address = cli.address()
        cli.call(lambda queues: queues.streams.info(incoming().stream))
    except (ServerMissing, UnknownStream):
        return None
    except Unavailable as error:
        note(f"what is not archived yet is left out: {error.message}")
        return None
    return address


def _show(cli: Cli, found: "Answer") -> None:
    if cli.json:
        for row in found.rows:
            write(json.dumps(dict(zip(found.columns, row, strict=True)), ensure_ascii=False))
    elif found.columns:
        rows = [[_cell(value) for value in row] for row in found.rows]
        write(table([column.upper() for column in found.columns], rows, wrap=found.columns))
    if found.more:
        note(f"these are the first {len(found.rows)} rows: --limit shows more")


def _cell(value: object) -> object:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value

"""`purveyor archive`: query the archive in SQL, make a snapshot, merge small files, audit the queues."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from purveyor.app.cli.context import Cli, JsonFlag, examples
from purveyor.app.cli.output import progress, write, write_json, write_note
from purveyor.app.cli.render import format_table
from purveyor.jetstream.address import Address
from purveyor.model.errors import InvalidInput, ServerMissing, Unavailable, UnknownStream
from purveyor.model.json_fields import UPGRADE
from purveyor.queues.catalogue import incoming

if TYPE_CHECKING:
    from purveyor.pipeline.archive.sql import QueryResult
    from purveyor.pipeline.audit import Account, Report

app = typer.Typer(
    help="Query the archive in SQL, make snapshots, compact, audit.",
    rich_markup_mode=None,
    add_completion=False,
)
_SPARK_WORKING = "Spark is working"


@app.callback()
def archive() -> None:
    """Query the archive in SQL, make snapshots, compact, audit."""


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
    limit: Annotated[int, typer.Option(metavar="ROWS", min=1, help="Print at most this many rows.")] = 1000,
    as_json: JsonFlag = False,
) -> None:
    """Query all of history in SQL. With --json each row is one line with an object.

    Tables: events (every event, with its objects old and new as VARIANT), objects (the current state, same columns),
    messages (all messages, also those that are no events). While the server runs, messages that are not archived yet
    are included.
    """
    cli = Cli.of(ctx, as_json)
    address = _server(cli)
    with progress(_SPARK_WORKING):
        # Here and not at the top: Spark takes a second to import.
        from purveyor.pipeline.archive.reader import ArchiveSource  # noqa: PLC0415
        from purveyor.pipeline.archive.sql import run_query  # noqa: PLC0415
        from purveyor.pipeline.engine import adhoc_session  # noqa: PLC0415

        with adhoc_session(cli.settings().spark_master) as spark:
            found = run_query(spark, ArchiveSource(address, _directory(cli), incoming().stream), sql, limit=limit)
    _show_rows(cli, found)


@app.command("snapshot", epilog=examples("purveyor archive snapshot"))
def snapshot(ctx: typer.Context, as_json: JsonFlag = False) -> None:
    """Store the current state of all objects, so that prefills and queries of objects need not read all of history.

    The pipeline makes snapshots automatically as the archive grows. The archive keeps the last two.
    """
    cli = Cli.of(ctx, as_json)
    with progress(_SPARK_WORKING):
        from purveyor.pipeline.archive.maintenance import snapshot as make  # noqa: PLC0415 - as above
        from purveyor.pipeline.archive.range_store import RangeStore  # noqa: PLC0415
        from purveyor.pipeline.engine import adhoc_session  # noqa: PLC0415

        store = RangeStore(_directory(cli))
        with adhoc_session(cli.settings().spark_master) as spark:
            position = make(spark, store)
        size = store.snapshot_size(position)
    if cli.json:
        write_json({"position": position, "bytes": size})
    else:
        write(f"Snapshot at position {position}" if position else "The archive is empty: nothing to do")


@app.command("compact", epilog=examples("purveyor archive compact"))
def compact(ctx: typer.Context, as_json: JsonFlag = False) -> None:
    """Merge small neighbouring files of the archive where that is worthwhile.

    The pipeline does the same automatically every half minute. Both may run at the same time.
    """
    cli = Cli.of(ctx, as_json)
    with progress(_SPARK_WORKING):
        from purveyor.pipeline.archive.maintenance import compact as merge  # noqa: PLC0415 - as above
        from purveyor.pipeline.archive.maintenance import sized_ranges  # noqa: PLC0415
        from purveyor.pipeline.archive.range_store import RangeStore  # noqa: PLC0415
        from purveyor.pipeline.engine import adhoc_session  # noqa: PLC0415

        store = RangeStore(_directory(cli))
        with adhoc_session(cli.settings().spark_master) as spark:
            replaced = merge(spark, store)
        store.clean_up()
        left = len(sized_ranges(store))
    if cli.json:
        write_json({"replaced": replaced, "ranges": left})
    else:
        write(
            f"Merged {replaced} ranges; the archive has {left} now" if replaced else f"Nothing to merge: {left} ranges"
        )


def _directory(cli: Cli) -> Path:
    return cli.settings().data_dir.absolute() / "archive"


def _server(cli: Cli) -> Address | None:
    """Return the server that holds the messages not archived yet; None if it cannot be reached."""
    try:
        address = cli.address()
        cli.call(lambda queues: queues.streams.info(incoming().stream))
    except (ServerMissing, UnknownStream):
        return None
    except Unavailable as error:
        write_note(f"messages that are not archived yet are left out: {error.message}")
        return None
    return address


def _show_rows(cli: Cli, found: "QueryResult") -> None:
    if cli.json:
        for row in found.rows:
            write(json.dumps(dict(zip(found.columns, row, strict=True)), ensure_ascii=False))
    elif found.columns:
        rows = [[_cell(value) for value in row] for row in found.rows]
        write(format_table([column.upper() for column in found.columns], rows, wrap=found.columns))
    if found.more:
        write_note(f"only the first {len(found.rows)} rows are shown: raise --limit for more")


def _cell(value: object) -> object:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value


_AUDIT_COLUMNS = (
    "SUBSCRIPTION",
    "EXPECTED",
    "DELIVERED",
    "QUEUED",
    "DEAD LETTERS",
    "PENDING",
    "MISSING",
    "DOUBLED",
    "UNEXPECTED",
    "OUT OF ORDER",
)


@app.command(
    "audit",
    epilog=examples("purveyor archive audit", "purveyor archive audit --subscription ox --from 1 --to 5000 --json"),
)
def audit(
    ctx: typer.Context,
    first: Annotated[int, typer.Option("--from", metavar="POSITION", min=1, help="The first position.")] = 1,
    last: Annotated[
        int | None, typer.Option("--to", metavar="POSITION", min=1, help="The last position; default: the newest.")
    ] = None,
    subscription: Annotated[
        list[str] | None, typer.Option("--subscription", metavar="NAME", help="Only this subscription; repeatable.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check that every event is delivered, queued or a dead letter of each subscription, once and in order.

    Lists every difference; exit code 1 if there is one. Events that the dispatcher has not reached yet count as
    pending, not as a difference.
    """
    cli = Cli.of(ctx, as_json)
    address = cli.address()
    newest = last if last is not None else _newest_position(cli)
    if newest < first and last is not None:
        raise InvalidInput(f"the range ends at {last}, before it begins at {first}", fix="exchange --from and --to")
    settings = cli.settings()
    with progress("comparing"):
        # Here and not at the top: Spark takes a second to import.
        from purveyor.pipeline.archive.reader import ArchiveSource  # noqa: PLC0415
        from purveyor.pipeline.audit import audit as compare  # noqa: PLC0415
        from purveyor.pipeline.engine import adhoc_session  # noqa: PLC0415

        source = ArchiveSource(address, settings.data_dir.absolute() / "archive")
        with adhoc_session(settings.spark_master) as spark:
            report = compare(spark, source, first, newest, subscription)
    if cli.json:
        write_json(report.to_json(), indent=2)
    else:
        _show_report(report)
    if not report.clean:
        raise typer.Exit(1)


def _newest_position(cli: Cli) -> int:
    try:
        return cli.call(lambda queues: queues.streams.info(incoming().stream)).state.last_seq
    except UnknownStream:
        return 0


def _show_report(report: "Report") -> None:
    for name, reason in report.unreadable.items():
        write_note(f"subscription {name} is not audited: {reason} ({UPGRADE})")
    if not report.accounts:
        write_note("there are no subscriptions" if not report.unreadable else "no other subscription was audited")
        return
    write(format_table(_AUDIT_COLUMNS, [_audit_row(account) for account in report.accounts]))
    for account in report.accounts:
        for line in _audit_lines(account):
            write(line)
    within = f"positions {report.first} to {report.last}"
    clean = all(account.clean for account in report.accounts)
    write(f"No difference in {within}." if clean else f"There are differences in {within}.")


def _audit_row(account: "Account") -> tuple[object, ...]:
    from purveyor.pipeline.audit.report import Difference  # noqa: PLC0415 - as above

    counts = (account.expected, account.delivered, account.queued, account.dead_lettered, account.pending)
    return (account.subscription, *counts, *(account.found(kind).count for kind in Difference))


def _audit_lines(account: "Account") -> list[str]:
    """Describe each difference, and facts that explain the counts."""
    lines = []
    for kind, found in account.differences.items():
        more = f" and {found.count - len(found.first)} more" if found.count > len(found.first) else ""
        where = ", ".join(str(position) for position in found.first)
        lines.append(f"{account.subscription}: {kind.value} at {where}{more}")
    if account.written_twice:
        lines.append(
            f"{account.subscription}: its queue stored {account.written_twice} more messages than there are events"
        )
    if account.discarded:
        lines.append(f"{account.subscription}: {account.discarded} of its dead letters were discarded")
    if account.expired:
        lines.append(
            f"{account.subscription}: {account.expired} messages expired before they were acknowledged; those in the "
            "range count as delivered"
        )
    if account.suspended is not None:
        lines.append(f"{account.subscription}: suspended after {account.reached} ({account.suspended})")
    return lines

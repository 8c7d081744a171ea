"""`purveyor source`: the sources that follow directories: what each one does, and how to begin one again."""

from datetime import UTC, datetime
from typing import Annotated, Final

import typer

from purveyor.app.cli.context import Cli, JsonFlag, YesFlag, confirm, examples
from purveyor.app.cli.output import escape, write, write_json
from purveyor.app.cli.render import format_block, format_table, read_time
from purveyor.model.errors import NotFound, UnreadableRecord
from purveyor.queues.client import Queues
from purveyor.queues.permissions import SOURCES_BUCKET
from purveyor.sources.ldap.source_status import SourceReport, read_sources
from purveyor.sources.ldap.source_store import SourceStore

app = typer.Typer(
    help="Show the sources that follow directories, and refresh one.", rich_markup_mode=None, add_completion=False
)
_NOT_RUNNING: Final = "not running"
SourceName = Annotated[str, typer.Argument(metavar="NAME", help="The source.")]


@app.command("list", epilog=examples("purveyor source list", "purveyor source list --json"))
def list_(ctx: typer.Context, as_json: JsonFlag = False) -> None:
    """List the sources: their directories, what they do, their entries, and how far they are behind."""
    cli = Cli.of(ctx, as_json)
    reports = cli.call(_read)
    if cli.json:
        write_json([report.to_json() for report in reports])
        return
    rows = [
        (
            report.source,
            report.state,
            report.values.get("mode"),
            report.values.get("entries"),
            report.last_change,
            _lag(report),
            report.values.get("uri"),
            report.last_error,
        )
        for report in reports
    ]
    headings = ("source", "state", "mode", "entries", "last change", "lag", "directory", "last error")
    write(format_table(headings, rows, wrap=("last error",)) if rows else "No process follows a directory.")


@app.command("show", epilog=examples("purveyor source show ldap", "purveyor source show ldap --json"))
def show(ctx: typer.Context, name: SourceName, as_json: JsonFlag = False) -> None:
    """Show one source: its directory, what its process does, and its last error."""
    cli = Cli.of(ctx, as_json)
    report = next((each for each in cli.call(_read) if each.source == name), None)
    if report is None:
        raise NotFound(f"no process follows a source {name!r}", fix="`purveyor source list` lists them")
    if cli.json:
        write_json(report.to_json())
        return
    values = report.values
    process = f"process {values['pid']} on {values.get('host')}" if values.get("pid") else None
    refreshed, rate = values.get("refreshed"), values.get("entries_per_second")
    write(
        format_block(
            report.source,
            (
                ("directory", values.get("uri")),
                ("base", values.get("base")),
                ("filter", values.get("filter")),
                ("state", report.state),
                ("since", read_time(values.get("since"))),
                ("mode", values.get("mode")),
                ("process", process),
                ("standby", report.standby or None),
                ("epoch", values.get("epoch")),
                ("entries", values.get("entries")),
                ("last refresh", None if refreshed is None else f"{refreshed:,} entries, {rate:,} per second"),
                ("last change", report.last_change),
                ("lag", _lag(report)),
                ("records", values.get("records")),
                ("not stored yet", values.get("waiting")),
                ("dead letters", values.get("dead_letters")),
                ("last error", values.get("error")),
                ("fix", values.get("fix")),
                ("error at", read_time(values.get("error_at"))),
            ),
        )
    )


@app.command("refresh", epilog=examples("purveyor source refresh ldap --yes"))
def refresh(ctx: typer.Context, name: SourceName, yes: YesFlag = False, as_json: JsonFlag = False) -> None:
    """Make a source read its directory as a whole again.

    The command deletes the stored cookie. The process that follows the directory begins at once, or when it is started
    again. Subscribers get events only for what has changed.
    """
    cli = Cli.of(ctx, as_json)
    confirm(f"Read the whole directory of source {name} again?", yes=yes)

    async def work(queues: Queues) -> bool:
        return await (await SourceStore.open(queues, replicas=cli.settings().replicas)).forget(name)

    if not cli.call(work):
        raise NotFound(
            f"source {name!r} has no stored cookie", fix="it reads the whole directory anyway; check the name"
        )
    if cli.json:
        write_json({"source": name, "refresh": True})
    else:
        write(f"Source {escape(name)} begins a full refresh")


async def _read(queues: Queues) -> list[SourceReport]:
    """Return the sources that processes report, and those that are stored and that no process follows now."""
    reports = {report.source: report for report in await read_sources(queues, datetime.now(UTC))}
    if await queues.streams.names(subject=f"$KV.{SOURCES_BUCKET}.>"):
        store = await SourceStore.open(queues)
        for name in await store.sources():
            if name not in reports:
                reports[name] = await _stored(store, name)
    return [reports[name] for name in sorted(reports)]


async def _stored(store: SourceStore, name: str) -> SourceReport:
    try:
        state = await store.state(name)
    except UnreadableRecord as error:
        return SourceReport(source=name, values={"source": name, "state": _NOT_RUNNING, "error": str(error)}, at=None)
    known = {} if state is None else {"uri": state.uri, "base": state.base, "filter": state.filter}
    more = {} if state is None else {"mode": state.mode.value, "entries": state.entries, "epoch": state.epoch}
    return SourceReport(source=name, values={"source": name, "state": _NOT_RUNNING, **known, **more}, at=None)


def _lag(report: SourceReport) -> str | None:
    seconds = report.values.get("lag_seconds")
    return f"{seconds:.3f} s" if isinstance(seconds, int | float) else None

"""`purveyor stages`: the tables and status of transactional stages, and a replay of their outbox."""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Annotated, TypeVar

import typer

from purveyor.app.cli.context import Cli, JsonFlag, YesFlag, confirm, examples
from purveyor.app.cli.output import write, write_json
from purveyor.app.cli.parsers import parse_duration, parse_time, utc_now
from purveyor.app.cli.render import format_block, format_table
from purveyor.app.settings import refuse_secret_database
from purveyor.model.errors import InvalidInput
from purveyor.queues.client import Queues
from purveyor.stages.application import Stages
from purveyor.stages.sql_statements import DIALECTS
from purveyor.stages.sql_statements import ddl as statements
from purveyor.stages.sql_store import SqlStore
from purveyor.stages.stage_status import DatabaseStatus, EndpointStatus, read_database_status, read_status

app = typer.Typer(help="Print tables and status of transactional stages.", rich_markup_mode=None, add_completion=False)
T = TypeVar("T")

DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        "--database",
        metavar="URL",
        help="The application's database, for its part of the status [PURVEYOR_DATABASE_URL].",
    ),
]
Endpoint = Annotated[str, typer.Argument(metavar="ENDPOINT", help="The endpoint.")]


@app.command("ddl", epilog=examples("purveyor stages ddl --dialect postgresql", "purveyor stages ddl --schema shop"))
def ddl(
    ctx: typer.Context,
    dialect: Annotated[str, typer.Option(metavar="NAME", help=f"One of {', '.join(DIALECTS)}.")] = "postgresql",
    schema: Annotated[str | None, typer.Option(metavar="NAME", help="The schema of the tables.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Print the statements that create the tables: inbox, outbox, failures and owners."""
    text = statements(dialect, schema).rstrip()
    if Cli.of(ctx, as_json).json:
        write_json({"dialect": dialect, "statements": text.split(";\n\n")}, indent=2)
    else:
        write(text)


@app.command("list", epilog=examples("purveyor stages list", "purveyor stages list --json"))
def list_(ctx: typer.Context, database: DatabaseUrl = None, as_json: JsonFlag = False) -> None:
    """List the endpoints with the waiting messages, the messages in work, and the dead letters of their stages.

    The text also shows the state of the database, if there is one; `stages show --json` has it in JSON.
    """
    cli = Cli.of(ctx, as_json)
    url = _url(cli, database)

    async def work(queues: Queues) -> tuple[list[EndpointStatus], DatabaseStatus | None]:
        return await read_status(queues), None if cli.json else await _query(url, read_database_status)

    found, stored = cli.call(work)
    if cli.json:
        write_json(found, indent=2)
        return
    rows = [
        (
            each.endpoint,
            len(each.stages),
            sum(stage.waiting for stage in each.stages),
            sum(stage.in_work for stage in each.stages),
            sum(stage.interactive for stage in each.stages),
            sum(stage.dead_letters for stage in each.stages),
        )
        for each in found
    ]
    write(format_table(("ENDPOINT", "STAGES", "WAITING", "IN WORK", "INTERACTIVE", "DEAD LETTERS"), rows))
    if stored is not None:
        write("\n" + _database_text(stored))


@app.command("show", epilog=examples("purveyor stages show orders.place"))
def show(ctx: typer.Context, endpoint: Endpoint, database: DatabaseUrl = None, as_json: JsonFlag = False) -> None:
    """Show the stages of an endpoint; with its database also the messages that fail, and the reasons."""
    cli = Cli.of(ctx, as_json)
    url = _url(cli, database)

    async def work(queues: Queues) -> tuple[EndpointStatus, DatabaseStatus | None]:
        (found,) = await read_status(queues, endpoint)
        ids = [f"{endpoint}.{stage.stage}" for stage in found.stages]
        return found, await _query(url, lambda store: read_database_status(store, ids))

    found, stored = cli.call(work)
    if cli.json:
        named = {"endpoint": found.endpoint, "stream": found.stream, "stages": found.stages}
        write_json({**named, "database": stored}, indent=2)
        return
    rows = [
        (stage.stage, stage.waiting, stage.in_work, stage.again, stage.interactive, stage.dead_letters)
        for stage in found.stages
    ]
    write(format_table(("STAGE", "WAITING", "IN WORK", "AGAIN", "INTERACTIVE", "DEAD LETTERS"), rows))
    if stored is not None:
        write("\n" + _database_text(stored))
        if stored.failing:
            failing = [
                (each.stage, each.message_id, each.attempts, _time(each.first_ms), each.reason.splitlines()[0])
                for each in stored.failing
            ]
            write("\n" + format_table(("STAGE", "MESSAGE", "ATTEMPTS", "SINCE", "REASON"), failing, wrap=("REASON",)))


@app.command("replay", epilog=examples("purveyor stages replay --since 1h --database postgresql://..."))
def replay(
    ctx: typer.Context,
    since: Annotated[str, typer.Option(metavar="TIME", help="From when: a time, or a duration before now.")],
    database: DatabaseUrl = None,
    yes: YesFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Send messages of the outbox again, after the server has lost them, for example by a restored older store.

    The running application sends them. A stage with an inbox skips messages that it has processed; a stage without an
    inbox processes them again.
    """
    cli = Cli.of(ctx, as_json)
    moment = _since(since)
    url = _url(cli, database)
    if url is None:
        raise InvalidInput("no database is given", fix="add --database URL, or set PURVEYOR_DATABASE_URL")
    confirm(f"Send all messages since {moment.isoformat()} again?", yes=yes)

    async def work(queues: Queues) -> int | None:
        return await _query(url, lambda store: Stages(queues, store=store, app="cli").replay(moment))

    count = cli.call(work)
    write_json({"messages": count}) if cli.json else write(f"{count} messages will be sent again")


def _url(cli: Cli, flag: str | None) -> str | None:
    refuse_secret_database(flag)
    return cli.settings(database_url=flag).database_url


async def _query(url: str | None, query: Callable[[SqlStore], Awaitable[T]]) -> T | None:
    """Query the database, if one is given; do not create its tables."""
    if url is None:
        return None
    store = SqlStore(url, create_tables=False)
    try:
        await store.open()
        return await query(store)
    finally:
        await store.close()


def _database_text(stored: DatabaseStatus) -> str:
    held = [f"{count} for {subject}" for subject, count in sorted(stored.held.items())]
    rows = [("Unsent", stored.unsent), ("Held, no consumer", held or "none"), ("Failing", len(stored.failing))]
    return format_block("Database", rows)


def _since(text: str) -> datetime:
    try:
        return utc_now() - parse_duration(text)
    except InvalidInput:
        return parse_time(text)


def _time(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)

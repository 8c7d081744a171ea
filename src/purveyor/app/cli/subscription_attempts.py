"""`purveyor subscription attempts`: the attempt log of a push subscription."""

from datetime import datetime
from typing import Annotated

import typer

from purveyor.app.cli.context import Cli, JsonFlag, examples
from purveyor.app.cli.output import write, write_json, write_note
from purveyor.app.cli.parsers import parse_replay_point
from purveyor.app.cli.render import format_table, read_time
from purveyor.app.cli.subscription_define import call
from purveyor.delivery.push.attempt_record import MAX_ATTEMPTS_PER_PAGE, AttemptQuery, parse_attempt_id
from purveyor.delivery.push.settlement import Action
from purveyor.model.errors import InvalidInput
from purveyor.model.json_fields import Json

EPILOG = examples(
    "purveyor subscription attempts shop",
    "purveyor subscription attempts shop --failed --since 1h",
    "purveyor subscription attempts shop --key o-1 --json",
)


def attempts(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The subscription.")],
    key: Annotated[
        str | None, typer.Option("--key", metavar="TEXT", help="Only messages whose key contains this text.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="TIME", help="Only attempts from this time on; also a duration ago, as 2h."),
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", metavar="TIME", help="Only attempts up to this time, or duration ago.")
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only attempts that failed.")] = False,
    before: Annotated[
        str | None, typer.Option("--before", metavar="ID", help="Only attempts before this one: the next page.")
    ] = None,
    limit: Annotated[
        int,
        typer.Option("--limit", metavar="NUMBER", min=1, max=MAX_ATTEMPTS_PER_PAGE, help="Print at most this many."),
    ] = 50,
    as_json: JsonFlag = False,
) -> None:
    """List the last attempts to push its messages, the newest first: status, duration, answer.

    The log has a bounded size. At a high rate a worker stores a part of the attempts and counts the others.
    """
    query = AttemptQuery(
        key=key or None,
        since=None if since is None else _parse_moment(since),
        until=None if until is None else _parse_moment(until),
        is_acknowledged=False if failed else None,
        before=None if before is None else parse_attempt_id(before),
        limit=limit,
    )
    cli = Cli.of(ctx, as_json)
    page = call(cli, lambda subscriptions: subscriptions.attempts(name, query))
    if cli.json:
        write_json(page["attempts"], indent=2)
    else:
        heads = ("TIME", "SEQUENCE", "KEY", "TOPIC", "ATTEMPT", "ANSWER", "SECONDS", "THEN")
        write(format_table(heads, map(_row, page["attempts"]), wrap=("ANSWER", "KEY", "TOPIC")))
    if page["omitted"]:
        write_note(f"{page['omitted']:,} more attempts of this time were counted and not stored")
    if page.get("unreadable") is not None:
        write_note(f"a part of the log cannot be read: {page['unreadable']}")
    if page["next"] is not None:
        write_note(f"there are more: continue with --before {page['next']}")


def _row(each: Json) -> tuple[object, ...]:
    result = each["error"] if each["status"] is None else str(each["status"])
    return (
        read_time(each["time"]),
        each["sequence"],
        each["key"],
        f"{each['realm']}:{each['topic']}",
        each["attempt"],
        f"{result}: {each['excerpt']}" if each["excerpt"] else result,
        f"{each['seconds']:.3f}",
        Action[each["action"].upper()].value,
    )


def _parse_moment(text: str) -> datetime:
    found = parse_replay_point(text)
    if isinstance(found, int):
        raise InvalidInput(f"{text!r} is not a time", fix="write 2026-11-15T12:00:00Z, or 2h for two hours ago")
    return found

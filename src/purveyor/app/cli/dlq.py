"""`purveyor dlq`: list, show, redrive and discard the dead letters of all parts."""

import base64
import json
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer

from purveyor.app.cli.backends.api_access import call_backend
from purveyor.app.cli.backends.dead_letter_backend import (
    DeadLetterBackend,
    DirectDeadLetters,
    RemoteDeadLetters,
    Settlement,
)
from purveyor.app.cli.context import Cli, JsonFlag, YesFlag, confirm, examples
from purveyor.app.cli.output import escape, progress, write, write_bytes, write_json, write_note
from purveyor.app.cli.render import format_block, format_payload, format_table, read_time
from purveyor.delivery.dead_letters.service import DeadLetterFilter
from purveyor.model.errors import InvalidInput
from purveyor.model.json_fields import Json

app = typer.Typer(help="List, show, redrive and discard dead letters.", rich_markup_mode=None, add_completion=False)
T = TypeVar("T")
_MAX_REASON_CHARACTERS = 60
_MAX_PRINTED_FAILURES = 20

Ids = Annotated[list[int] | None, typer.Argument(metavar="[ID]...", help="The ids of dead letters.")]
OfSubscription = Annotated[
    str | None, typer.Option("--subscription", metavar="NAME", help="Only dead letters of this subscription.")
]
OfOrigin = Annotated[
    str | None,
    typer.Option("--origin", metavar="NAME", help="Only dead letters of this part: transform, stage:orders.0, ..."),
]
OfReason = Annotated[
    str | None, typer.Option("--reason", metavar="TEXT", help="Only dead letters whose reason contains this text.")
]
All = Annotated[bool, typer.Option("--all", help="All dead letters.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only print what would be done.")]


@app.command(
    "list",
    epilog=examples(
        "purveyor dlq list", "purveyor dlq list --subscription ox --reason mailbox", "purveyor dlq list --json"
    ),
)
def list_(
    ctx: typer.Context,
    subscription: OfSubscription = None,
    origin: OfOrigin = None,
    reason: OfReason = None,
    after: Annotated[int, typer.Option("--after", metavar="ID", min=0, help="Only dead letters after this id.")] = 0,
    limit: Annotated[int, typer.Option("--limit", metavar="NUMBER", min=1, help="Print at most this many.")] = 100,
    as_json: JsonFlag = False,
) -> None:
    """List dead letters, the oldest first."""
    cli = Cli.of(ctx, as_json)
    choice = _filter(subscription=subscription, origin=origin, reason=reason)
    page = _call(cli, lambda letters: letters.list_letters(choice, after, limit))
    if cli.json:
        write_json(page["dead_letters"], indent=2)
    else:
        columns = ("ID", "PARKED", "ORIGIN", "SUBJECT", "ATTEMPTS", "REASON")
        write(format_table(columns, map(_row, page["dead_letters"]), wrap=("REASON", "SUBJECT")))
    if page["next"] is not None:
        write_note(f"there are more: continue with --after {page['next']}")


@app.command("show", epilog=examples("purveyor dlq show 17", "purveyor dlq show 17 --raw > message.json"))
def show(
    ctx: typer.Context,
    number: Annotated[int, typer.Argument(metavar="ID", min=1, help="The dead letter.")],
    subscription: OfSubscription = None,
    raw: Annotated[bool, typer.Option("--raw", help="Write only the bytes of the message.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show a dead letter: reason, origin, attempts, and the message."""
    cli = Cli.of(ctx, as_json)
    choice = _filter(subscription=subscription)
    letter = _call(cli, lambda letters: letters.show(number, choice))
    if raw:
        write_bytes(_data(letter))
    elif cli.json:
        write_json(letter, indent=2)
    else:
        write(_text(letter))


@app.command(
    "retry",
    epilog=examples(
        "purveyor dlq retry 17 18",
        "purveyor dlq retry --subscription ox --reason mailbox --dry-run",
        "purveyor dlq retry --all --yes",
    ),
)
def retry(
    ctx: typer.Context,
    ids: Ids = None,
    subscription: OfSubscription = None,
    origin: OfOrigin = None,
    reason: OfReason = None,
    every: All = False,
    dry_run: DryRun = False,
    yes: YesFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Put dead letters back where they failed. Each is put back once, however often the command runs.

    A subscription gets its dead letters next, the oldest first, before newer messages. Exit code 1 if one cannot be
    put back.
    """
    choice = _choice(_filter(ids=ids, subscription=subscription, origin=origin, reason=reason), every)
    _settle(Cli.of(ctx, as_json), Settlement.RETRY, choice, dry_run=dry_run, yes=yes)


@app.command(
    "discard",
    epilog=examples("purveyor dlq discard 17", "purveyor dlq discard --subscription ox --reason quota --yes"),
)
def discard(
    ctx: typer.Context,
    ids: Ids = None,
    subscription: OfSubscription = None,
    origin: OfOrigin = None,
    reason: OfReason = None,
    every: All = False,
    dry_run: DryRun = False,
    yes: YesFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Delete dead letters for good. The audit still knows that they were discarded."""
    choice = _choice(_filter(ids=ids, subscription=subscription, origin=origin, reason=reason), every)
    _settle(Cli.of(ctx, as_json), Settlement.DISCARD, choice, dry_run=dry_run, yes=yes)


def _filter(
    *,
    ids: list[int] | None = None,
    subscription: str | None = None,
    origin: str | None = None,
    reason: str | None = None,
) -> DeadLetterFilter:
    """Return the filter of the flags. An empty one, such as of an unset variable, must not select everything."""
    for flag, value in (("--subscription", subscription), ("--origin", origin), ("--reason", reason)):
        if value == "":
            raise InvalidInput(f"{flag} is empty", fix=f"give {flag} a value, or leave it out")
    return DeadLetterFilter(ids=tuple(ids or ()), subscription=subscription, origin=origin, reason=reason)


def _choice(choice: DeadLetterFilter, every: bool) -> DeadLetterFilter:
    if every == (choice != DeadLetterFilter()):
        raise InvalidInput(
            "no dead letters are chosen" if not every else "--all and other choices exclude each other",
            fix="give ids, --subscription, --origin or --reason, or --all",
        )
    return choice


def _settle(cli: Cli, what: Settlement, choice: DeadLetterFilter, *, dry_run: bool, yes: bool) -> None:
    """Count the chosen dead letters, ask for confirmation, and put them back or discard them."""
    verb, done = ("Put back", "put back") if what is Settlement.RETRY else ("Discard", "discarded")
    planned = _call(cli, lambda letters: letters.settle(what, choice, dry_run=True, advance=_ignore_progress))
    ready = planned["chosen"] - len(planned["failed"])
    if not dry_run and ready:
        confirm(f"{verb} {_number(ready)}{_where(planned)}?", yes=yes)
    report = planned
    if not dry_run:
        with progress(f"{verb.lower()} dead letters", planned["chosen"], visible=not cli.json) as advance:
            report = _call(cli, lambda letters: letters.settle(what, choice, dry_run=False, advance=advance))
    failed = report["failed"]
    if cli.json:
        write_json(report, indent=2)
    else:
        for failure in failed[:_MAX_PRINTED_FAILURES]:
            fix = f" ({failure['fix']})" if failure["fix"] else ""
            write_note(f"{failure['id']}: {failure['detail']}{fix}")
        if len(failed) > _MAX_PRINTED_FAILURES:
            write_note(f"... and {len(failed) - _MAX_PRINTED_FAILURES} more")
        if dry_run:
            write(f"Would be {done}: {_number(ready)}{_where(report)}")
        else:
            gone = f"; {report['gone']} were already handled by another process" if report["gone"] else ""
            write(f"{done.capitalize()}: {_number(report['done'])}{_where(report)}{gone}")
    if failed:
        raise typer.Exit(1)


def _ignore_progress(_count: int) -> None:
    pass


def _number(count: int) -> str:
    return f"{count} dead letter{'' if count == 1 else 's'}"


def _where(report: Json) -> str:
    return f" to {', '.join(sorted(report['targets']))}" if report["targets"] else ""


def _row(letter: Json) -> tuple[object, ...]:
    reason = letter["reason"]
    cut = reason if len(reason) <= _MAX_REASON_CHARACTERS else f"{reason[: _MAX_REASON_CHARACTERS - 3]}..."
    return letter["id"], read_time(letter["parked"]), letter["origin"], letter["subject"], letter["attempts"], cut


def _text(letter: Json) -> str:
    if "sequence" not in letter:  # not a dead letter of Purveyor, or of a newer version
        rows: list[tuple[str, object]] = [
            ("Origin", letter["origin"]),
            ("Parked", read_time(letter["parked"])),
            ("Problem", letter["problem"]),
        ]
    else:
        rows = [
            ("Reason", letter["reason"]),
            ("Origin", letter["origin"]),
            ("Original subject", letter["subject"]),
            ("Sequence", letter["sequence"]),
            ("Attempts", letter["attempts"]),
            ("Failed first", read_time(letter["failed_first"])),
            ("Failed last", read_time(letter["failed_last"])),
            ("Parked", read_time(letter["parked"])),
            *((name, _detail(value)) for name, value in letter["details"].items()),
        ]
    parts = [format_block(f"Dead letter {letter['id']}", rows)]
    attempts = letter.get("attempts_log")
    if attempts:
        rows_of_attempts = [
            (
                read_time(each["time"]),
                each["status"],
                each["error"],
                each["excerpt"],
            )
            for each in attempts
        ]
        parts.append(format_table(("ATTEMPT", "STATUS", "ERROR", "ANSWER"), rows_of_attempts, wrap=("ERROR", "ANSWER")))
    if letter["headers"]:
        lines = [f"{name}: {value}" for name, values in letter["headers"].items() for value in values]
        parts.append("\n".join(escape(line) for line in lines))
    parts.append(format_payload(_data(letter)))
    return "\n\n".join(parts)


def _data(letter: Json) -> bytes:
    """Return the bytes of the message."""
    text: str | None = letter.get("data")
    return base64.b64decode(letter["data_base64"]) if text is None else text.encode()


def _detail(value: object) -> object:
    return value if isinstance(value, str) and "\n" not in value else json.dumps(value)


def _call(cli: Cli, work: Callable[[DeadLetterBackend], Awaitable[T]]) -> T:
    return call_backend(cli, DirectDeadLetters.open, RemoteDeadLetters, work)

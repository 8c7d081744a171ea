"""`purveyor dlq`: list, show, redrive and discard the dead letters of all parts."""

import json
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer

from purveyor.app.cli.context import Cli, JsonFlag, YesFlag, confirm, examples
from purveyor.app.cli.output import escape, progress, write, write_bytes, write_json, write_note
from purveyor.app.cli.render import format_block, format_payload, format_table, format_time
from purveyor.app.json_views import dead_letter_details, dead_letter_summary, report_json
from purveyor.delivery.dead_letters.park import ATTEMPTS_LOG, attempts_of
from purveyor.delivery.dead_letters.service import DeadLetterFilter, DeadLetters, Page, Report, open_dead_letters
from purveyor.model.errors import InvalidInput
from purveyor.queues.client import Queues
from purveyor.queues.dead_letters.store import ParkedMessage

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
    choice = DeadLetterFilter(subscription=subscription, origin=origin, reason=reason)
    page: Page = _call(cli, lambda letters: letters.list(choice, after=after, limit=limit))
    if cli.json:
        write_json({"dead_letters": [dead_letter_summary(each) for each in page.letters], "next": page.next}, indent=2)
        return
    write(
        format_table(
            ("ID", "PARKED", "ORIGIN", "SUBJECT", "ATTEMPTS", "REASON"), map(_row, page.letters), wrap=("REASON",)
        )
    )
    if page.next is not None:
        write_note(f"there are more: continue with --after {page.next}")


@app.command("show", epilog=examples("purveyor dlq show 17", "purveyor dlq show 17 --raw > message.json"))
def show(
    ctx: typer.Context,
    number: Annotated[int, typer.Argument(metavar="ID", help="The dead letter.")],
    raw: Annotated[bool, typer.Option("--raw", help="Write only the bytes of the message.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show a dead letter: reason, origin, attempts, and the message."""
    cli = Cli.of(ctx, as_json)
    parked: ParkedMessage = _call(cli, lambda letters: letters.show(number))
    if raw:
        write_bytes(parked.data)
    elif cli.json:
        write_json(dead_letter_details(parked), indent=2)
    else:
        write(_text(parked))


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
    choice = _choice(
        DeadLetterFilter(ids=tuple(ids or ()), subscription=subscription, origin=origin, reason=reason), every
    )
    _settle(Cli.of(ctx, as_json), DeadLetters.retry, choice, ("Put back", "put back"), dry_run=dry_run, yes=yes)


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
    choice = _choice(
        DeadLetterFilter(ids=tuple(ids or ()), subscription=subscription, origin=origin, reason=reason), every
    )
    _settle(Cli.of(ctx, as_json), DeadLetters.discard, choice, ("Discard", "discarded"), dry_run=dry_run, yes=yes)


def _choice(choice: DeadLetterFilter, every: bool) -> DeadLetterFilter:
    if every == (choice != DeadLetterFilter()):
        raise InvalidInput(
            "no dead letters are chosen" if not every else "--all and other choices exclude each other",
            fix="give ids, --subscription, --origin or --reason, or --all",
        )
    return choice


def _settle(
    cli: Cli,
    settle: Callable[..., Awaitable[Report]],
    choice: DeadLetterFilter,
    words: tuple[str, str],
    *,
    dry_run: bool,
    yes: bool,
) -> None:
    """Count the chosen dead letters, ask for confirmation, and retry or discard them."""
    verb, done = words
    planned = _call(cli, lambda letters: settle(letters, choice, dry_run=True))
    ready = planned.chosen - len(planned.failed)
    if not dry_run and ready:
        confirm(f"{verb} {_number(ready)}{_where(planned)}?", yes=yes)
    report = planned
    if not dry_run:
        with progress(f"{verb.lower()} dead letters", planned.chosen, visible=not cli.json) as advance:
            report = _call(cli, lambda letters: settle(letters, choice, advance=advance))
    if cli.json:
        write_json({"dry_run": dry_run, **report_json(report)}, indent=2)
    else:
        for failure in report.failed[:_MAX_PRINTED_FAILURES]:
            write_note(f"{failure.id}: {failure.message}" + (f" ({failure.fix})" if failure.fix else ""))
        if len(report.failed) > _MAX_PRINTED_FAILURES:
            write_note(f"... and {len(report.failed) - _MAX_PRINTED_FAILURES} more")
        if dry_run:
            write(f"Would be {done}: {_number(ready)}{_where(report)}")
        else:
            gone = f"; {report.gone} were already handled by another process" if report.gone else ""
            write(f"{done.capitalize()}: {_number(report.done)}{_where(report)}{gone}")
    if report.failed:
        raise typer.Exit(1)


def _number(count: int) -> str:
    return f"{count} dead letter{'' if count == 1 else 's'}"


def _where(report: Report) -> str:
    return f" to {', '.join(sorted(report.targets))}" if report.targets else ""


def _row(parked: ParkedMessage) -> tuple[object, ...]:
    letter = parked.letter
    reason = parked.reason
    cut = reason if len(reason) <= _MAX_REASON_CHARACTERS else f"{reason[: _MAX_REASON_CHARACTERS - 3]}..."
    subject, attempts = (None, None) if letter is None else (letter.subject, letter.attempts)
    return parked.id, parked.at, parked.origin, subject, attempts, cut


def _text(parked: ParkedMessage) -> str:
    letter = parked.letter
    if letter is None:
        rows: list[tuple[str, object]] = [
            ("Subject", parked.subject),
            ("Parked", parked.at),
            ("Problem", parked.problem),
        ]
        headers = parked.headers
    else:
        rows = [
            ("Reason", letter.reason),
            ("Origin", letter.origin),
            ("Original subject", letter.subject),
            ("Sequence", letter.position),
            ("Attempts", letter.attempts),
            ("Failed first", letter.failed_first),
            ("Failed last", letter.failed_last),
            ("Parked", parked.at),
            *((name, _detail(value)) for name, value in letter.details.items() if name != ATTEMPTS_LOG),
        ]
        headers = letter.headers
    parts = [format_block(f"Dead letter {parked.id}", rows)]
    attempts = attempts_of(parked)
    if attempts:
        rows_of_attempts = [
            (None if each.time is None else format_time(each.time), each.status, each.error, each.excerpt)
            for each in attempts
        ]
        parts.append(format_table(("ATTEMPT", "STATUS", "ERROR", "ANSWER"), rows_of_attempts, wrap=("ERROR", "ANSWER")))
    if headers:
        lines = [f"{name}: {value}" for name, values in headers.items() for value in values]
        parts.append("\n".join(escape(line) for line in lines))
    parts.append(format_payload(parked.data))
    return "\n\n".join(parts)


def _detail(value: object) -> object:
    return value if isinstance(value, str) and "\n" not in value else json.dumps(value)


def _call(cli: Cli, work: Callable[[DeadLetters], Awaitable[T]]) -> T:
    replicas = cli.settings().replicas

    async def run(queues: Queues) -> T:
        async with open_dead_letters(queues, replicas=replicas) as letters:
            return await work(letters)

    return cli.call(run)

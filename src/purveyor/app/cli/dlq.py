"""`purveyor dlq`: the dead letters of all parts: list and show them, put them back, discard them."""

import json
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer

from purveyor.app.cli.context import Cli, JsonFlag, YesFlag, confirm, examples
from purveyor.app.cli.progress import progress
from purveyor.app.cli.render import (
    block,
    note,
    show_payload,
    show_time,
    table,
    write,
    write_bytes,
    write_json,
)
from purveyor.app.cli.sanitize import safe
from purveyor.app.views.dead_letter_view import report_json, summary, whole
from purveyor.delivery.dead_letters.park import ATTEMPTS_LOG
from purveyor.delivery.dead_letters.service import Choice, DeadLetters, Page, Report, attempts_of
from purveyor.model.errors import InvalidInput
from purveyor.queues.dead_letters.store import Parked

app = typer.Typer(
    help="Dead letters: list, show, put back and discard them.", rich_markup_mode=None, add_completion=False
)
T = TypeVar("T")
_LONGEST_REASON = 60
_MOST_FAILURES = 20

Ids = Annotated[list[int] | None, typer.Argument(metavar="[ID]...", help="Dead letters, by their numbers.")]
OfSubscription = Annotated[
    str | None, typer.Option("--subscription", metavar="NAME", help="Only those of this subscription.")
]
OfOrigin = Annotated[
    str | None, typer.Option("--origin", metavar="NAME", help="Only those of this part: transform, stage:orders.0, ...")
]
OfReason = Annotated[str | None, typer.Option("--reason", metavar="TEXT", help="Only those with this in their reason.")]
All = Annotated[bool, typer.Option("--all", help="All that there are.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]


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
    after: Annotated[int, typer.Option("--after", metavar="ID", min=0, help="Only those behind this one.")] = 0,
    limit: Annotated[int, typer.Option("--limit", metavar="NUMBER", min=1, help="So many at most.")] = 100,
    as_json: JsonFlag = False,
) -> None:
    """List dead letters, the oldest first."""
    cli = Cli.of(ctx, as_json)
    choice = Choice(subscription=subscription, origin=origin, reason=reason)
    page: Page = _call(cli, lambda letters: letters.list(choice, after=after, limit=limit))
    if cli.json:
        write_json({"dead_letters": [summary(each) for each in page.letters], "next": page.next}, indent=2)
        return
    write(table(("ID", "PARKED", "ORIGIN", "SUBJECT", "ATTEMPTS", "REASON"), map(_row, page.letters), wrap=("REASON",)))
    if page.next is not None:
        note(f"there are more: --after {page.next}")


@app.command("show", epilog=examples("purveyor dlq show 17", "purveyor dlq show 17 --raw > message.json"))
def show(
    ctx: typer.Context,
    number: Annotated[int, typer.Argument(metavar="ID", help="The dead letter.")],
    raw: Annotated[
        bool, typer.Option("--raw", help="Print the bytes of the message as they are, and no more.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show a dead letter: why, from where, after which attempts, and the message as it was."""
    cli = Cli.of(ctx, as_json)
    parked: Parked = _call(cli, lambda letters: letters.show(number))
    if raw:
        write_bytes(parked.data)
    elif cli.json:
        write_json(whole(parked), indent=2)
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
    """Put dead letters back to where they were given up: each once, however often this is run.

    Those of a subscription are delivered next, the oldest first, before what is newer. Exit code 1 if one stays.
    """
    choice = _choice(Choice(ids=tuple(ids or ()), subscription=subscription, origin=origin, reason=reason), every)
    _deal(Cli.of(ctx, as_json), DeadLetters.retry, choice, ("Put back", "put back"), dry_run=dry_run, yes=yes)


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
    """Take dead letters out for good. That they were discarded stays noted, for the audit."""
    choice = _choice(Choice(ids=tuple(ids or ()), subscription=subscription, origin=origin, reason=reason), every)
    _deal(Cli.of(ctx, as_json), DeadLetters.discard, choice, ("Discard", "discarded"), dry_run=dry_run, yes=yes)


def _choice(choice: Choice, every: bool) -> Choice:
    if every == (choice != Choice()):
        raise InvalidInput(
            "which dead letters?" if not every else "--all and a choice contradict each other",
            fix="give their numbers, --subscription, --origin or --reason, or --all",
        )
    return choice


def _deal(
    cli: Cli,
    deal: Callable[..., Awaitable[Report]],
    choice: Choice,
    words: tuple[str, str],
    *,
    dry_run: bool,
    yes: bool,
) -> None:
    """Look how many there are, ask, and do it."""
    verb, done = words
    planned = _call(cli, lambda letters: deal(letters, choice, dry_run=True))
    ready = planned.chosen - len(planned.failed)
    if not dry_run and ready:
        confirm(f"{verb} {_number(ready)}{_where(planned)}?", yes=yes)
    report = planned
    if not dry_run:
        with progress(f"{verb.lower()} dead letters", planned.chosen, visible=not cli.json) as advance:
            report = _call(cli, lambda letters: deal(letters, choice, advance=advance))
    if cli.json:
        write_json({"dry_run": dry_run, **report_json(report)}, indent=2)
    else:
        for failure in report.failed[:_MOST_FAILURES]:
            note(f"{failure.id}: {failure.message}" + (f" ({failure.fix})" if failure.fix else ""))
        if len(report.failed) > _MOST_FAILURES:
            note(f"... and {len(report.failed) - _MOST_FAILURES} more")
        if dry_run:
            write(f"Would be {done}: {_number(ready)}{_where(report)}")
        else:
            gone = f"; {report.gone} were dealt with by others" if report.gone else ""
            write(f"{done.capitalize()}: {_number(report.done)}{_where(report)}{gone}")
    if report.failed:
        raise typer.Exit(1)


def _number(count: int) -> str:
    return f"{count} dead letter{'' if count == 1 else 's'}"


def _where(report: Report) -> str:
    return f" to {', '.join(sorted(report.targets))}" if report.targets else ""


def _row(parked: Parked) -> tuple[object, ...]:
    letter = parked.letter
    reason = parked.reason
    cut = reason if len(reason) <= _LONGEST_REASON else f"{reason[: _LONGEST_REASON - 3]}..."
    subject, attempts = (None, None) if letter is None else (letter.subject, letter.attempts)
    return parked.id, parked.at, parked.origin, subject, attempts, cut


def _text(parked: Parked) -> str:
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
            ("Came on", letter.subject),
            ("Sequence there", letter.position),
            ("Attempts", letter.attempts),
            ("Failed first", letter.failed_first),
            ("Failed last", letter.failed_last),
            ("Parked", parked.at),
            *((name, _detail(value)) for name, value in letter.details.items() if name != ATTEMPTS_LOG),
        ]
        headers = letter.headers
    parts = [block(f"Dead letter {parked.id}", rows)]
    attempts = attempts_of(parked)
    if attempts:
        told = [
            (None if each.time is None else show_time(each.time), each.status, each.error, each.excerpt)
            for each in attempts
        ]
        parts.append(table(("ATTEMPT", "STATUS", "ERROR", "ANSWER"), told, wrap=("ERROR", "ANSWER")))
    if headers:
        lines = [f"{name}: {value}" for name, values in headers.items() for value in values]
        parts.append("\n".join(safe(line) for line in lines))
    parts.append(show_payload(parked.data))
    return "\n\n".join(parts)


def _detail(value: object) -> object:
    return value if isinstance(value, str) and "\n" not in value else json.dumps(value)


def _call(cli: Cli, work: Callable[[DeadLetters], Awaitable[T]]) -> T:
    replicas = cli.settings().replicas

    async def opened(letters: DeadLetters) -> T:
        async with letters:
            return await work(letters)

    return cli.call(lambda queues: opened(DeadLetters(queues, replicas=replicas)))

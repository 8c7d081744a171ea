"""`purveyor archive audit`: what the archive says should be in each queue beside what is there."""

from typing import TYPE_CHECKING, Annotated

import typer

from purveyor.app.cli.context import Cli, JsonFlag
from purveyor.app.cli.progress import progress
from purveyor.app.cli.render import note, table, write, write_json
from purveyor.model.errors import InvalidInput, UnknownStream
from purveyor.model.stored_record import UPGRADE
from purveyor.queues.catalogue import incoming

if TYPE_CHECKING:  # it brings Spark, which a help page does not need
    from purveyor.pipeline.audit import Account, Report

_COLUMNS = (
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


def audit(
    ctx: typer.Context,
    first: Annotated[int, typer.Option("--from", metavar="POSITION", min=1, help="The first position.")] = 1,
    last: Annotated[
        int | None, typer.Option("--to", metavar="POSITION", min=1, help="The last position; default: the newest.")
    ] = None,
    subscription: Annotated[
        list[str] | None, typer.Option("--subscription", metavar="NAME", help="Only this one; may be repeated.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Prove that every event is delivered, queued or parked for each subscription, once and in order.

    Lists every difference; exit code 1 if there is one. What the dispatcher has not reached yet is pending, which is
    no difference.
    """
    cli = Cli.of(ctx, as_json)
    address = cli.address()
    newest = last if last is not None else _newest(cli)
    if newest < first and last is not None:
        raise InvalidInput(f"the range ends at {last}, before it begins at {first}", fix="exchange --from and --to")
    settings = cli.settings()
    with progress("comparing"):
        # Here and not at the top: Spark takes a second to import.
        from purveyor.pipeline.adhoc_session import quiet_spark  # noqa: PLC0415
        from purveyor.pipeline.archive.reader import ArchiveSource  # noqa: PLC0415
        from purveyor.pipeline.audit import audit as compare  # noqa: PLC0415

        source = ArchiveSource(address, settings.data_dir.absolute() / "archive")
        with quiet_spark(settings.spark_master) as spark:
            report = compare(spark, source, first, newest, subscription)
    if cli.json:
        write_json(report.to_json(), indent=2)
    else:
        _show(report)
    if not report.clean:
        raise typer.Exit(1)


def _newest(cli: Cli) -> int:
    try:
        return cli.call(lambda queues: queues.streams.info(incoming().stream)).state.last_seq
    except UnknownStream:
        return 0


def _show(report: "Report") -> None:
    for name, reason in report.unreadable.items():
        note(f"subscription {name} is not audited: {reason} ({UPGRADE})")
    if not report.accounts:
        note("there are no subscriptions" if not report.unreadable else "no other subscription was audited")
        return
    write(table(_COLUMNS, [_row(account) for account in report.accounts]))
    for account in report.accounts:
        for line in _lines(account):
            write(line)
    within = f"positions {report.first} to {report.last}"
    clean = all(account.clean for account in report.accounts)
    write(f"No difference in {within}." if clean else f"There are differences in {within}.")


def _row(account: "Account") -> tuple[object, ...]:
    from purveyor.pipeline.audit.report import Difference  # noqa: PLC0415 - see above

    counts = (account.expected, account.delivered, account.queued, account.dead_lettered, account.pending)
    return (account.subscription, *counts, *(account.found(kind).count for kind in Difference))


def _lines(account: "Account") -> list[str]:
    """Each difference in words, and what should be known beside."""
    lines = []
    for kind, found in account.differences.items():
        more = f" and {found.count - len(found.first)} more" if found.count > len(found.first) else ""
        where = ", ".join(str(place) for place in found.first)
        lines.append(f"{account.subscription}: {kind.value} at {where}{more}")
    if account.written_twice:
        lines.append(
            f"{account.subscription}: its queue took {account.written_twice} messages more than there are events"
        )
    if account.discarded:
        lines.append(f"{account.subscription}: {account.discarded} of its dead letters were discarded")
    if account.expired:
        lines.append(
            f"{account.subscription}: {account.expired} messages were not acknowledged in time and expired; those of "
            "the range are counted as delivered"
        )
    if account.suspended is not None:
        lines.append(f"{account.subscription}: suspended after {account.reached} ({account.suspended})")
    return lines

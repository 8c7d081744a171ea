"""`purveyor queues plan` and `apply`: show and make the changes that bring queues to their declaration."""

import time
from dataclasses import dataclass
from typing import Annotated

import typer

from purveyor.app.cli.context import Cli, JsonFlag, YesFlag, confirm
from purveyor.app.cli.output import write, write_json, write_note
from purveyor.app.cli.render import format_table, format_value
from purveyor.jetstream.maintenance import STREAM_PREFIX
from purveyor.model.errors import InvalidName
from purveyor.queues.catalogue import Queue, internal_queues, subscription_queue
from purveyor.queues.client import Queues
from purveyor.queues.migration.events import MigrationOptions, Progress
from purveyor.queues.migration.plan import Change, Plan, Strategy
from purveyor.queues.migration.record import QueueStatus

_NOTE_INTERVAL_SECONDS = 2.0

QueueName = Annotated[str | None, typer.Argument(metavar="QUEUE", help="Only this queue; default: all.")]
StrategyFlag = Annotated[
    Strategy | None,
    typer.Option("--strategy", help="How to migrate: let the readers drain the queue, or copy it through a snapshot."),
]


@dataclass(frozen=True, slots=True)
class Applied:
    """The change that was made to a queue, and its duration."""

    plan: Plan
    change: Change
    seconds: float


def plan(ctx: typer.Context, queue: QueueName = None, as_json: JsonFlag = False) -> None:
    """Show for each queue the change that `apply` would make, the reasons and the risks. Changes nothing."""
    cli = Cli.of(ctx, as_json)
    plans = cli.call(lambda queues: _plans(queues, cli, queue))
    if cli.json:
        write_json([_as_json(each) for each in plans], indent=2)
        return
    write(
        format_table(("QUEUE", "CHANGE", "MESSAGES"), [(each.queue.name, each.change, each.messages) for each in plans])
    )
    for each in plans:
        for why in each.why:
            write(f"{each.queue.name}: {format_value(why)}")
        for risk in each.risks:
            write(f"{each.queue.name}: risk: {format_value(risk)}")


def apply(
    ctx: typer.Context,
    queue: QueueName = None,
    strategy: StrategyFlag = None,
    yes: YesFlag = False,
    as_json: JsonFlag = False,
) -> None:
    """Bring queues to their declaration: create them, update them in place, or migrate them.

    A migration can be interrupted and continued, also from another machine or from several at once. The files of
    snapshots stay in migrations/ of the data directory until the next snapshot succeeds.

    Once the stream is deleted, the machine that continues needs the file of the snapshot: at the path that
    `queues list` shows, or copied to migrations/ of its own data directory.
    """
    cli = Cli.of(ctx, as_json)
    settings = cli.settings()
    options = MigrationOptions(archives=settings.data_dir / "migrations", on_progress=_ProgressNotes())
    plans = cli.call(lambda queues: _plans(queues, cli, queue))
    migrated = [(each, each.choose_strategy(strategy)) for each in plans if each.needs_migration]
    if migrated:
        confirm(
            "; ".join(f"migrate {each.queue.name} by {way.value}: {_main_risk(each)}" for each, way in migrated),
            yes=yes,
        )

    async def work(queues: Queues) -> list[Applied]:
        migrations = queues.migrations.with_options(options)
        done = []
        for each in plans:
            begun = time.monotonic()
            change = each.change
            if each.needs_migration:
                way = each.choose_strategy(strategy)
                change = Change.DRAIN if way is Strategy.DRAIN else Change.SNAPSHOT
                if (
                    await migrations.begin(each.queue, replicas=settings.replicas, strategy=way)
                    is not QueueStatus.READY
                ):
                    await migrations.wait_until_done(each.queue.name)
            if await migrations.find_running(each.queue.name) is not None:
                await migrations.wait_until_done(each.queue.name)
            (await queues.ensure(each.queue, replicas=settings.replicas)).require_ready()
            done.append(Applied(each, change, time.monotonic() - begun))
        return done

    results = cli.call(work)
    if cli.json:
        write_json(
            [
                _as_json(each.plan)
                | {"change": each.change, "status": QueueStatus.READY, "seconds": round(each.seconds, 3)}
                for each in results
            ],
            indent=2,
        )
        return
    rows = [(each.plan.queue.name, QueueStatus.READY, each.change, f"{each.seconds:.1f} s") for each in results]
    write(format_table(("QUEUE", "STATUS", "DONE", "TIME"), rows))


class _ProgressNotes:
    """Writes to standard error how far a migration is, at an interval."""

    def __init__(self) -> None:
        self._written_at = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        if time.monotonic() - self._written_at < _NOTE_INTERVAL_SECONDS:
            return
        self._written_at = time.monotonic()
        share = f" {100 * progress.done // progress.total}%" if progress.total else ""
        write_note(f"{progress.queue}: {progress.what}{share}")


async def _plans(queues: Queues, cli: Cli, name: str | None) -> list[Plan]:
    settings = cli.settings()
    known = {queue.name: queue for queue in internal_queues((settings.dispatcher_group,))}
    for queue in subscription_queues(await queues.streams.names()):
        known[queue.name] = queue
    if name is not None and name not in known:
        raise InvalidName(f"no queue {name!r}", fix=f"the queues are {', '.join(known)}")
    wanted = [known[name]] if name is not None else list(known.values())
    return [await queues.migrations.plan(queue, replicas=settings.replicas) for queue in wanted]


def subscription_queues(names: list[str]) -> list[Queue]:
    """Return the queues of subscriptions among the names of streams."""
    found: list[Queue] = []
    for name in names:
        try:
            if name.startswith(STREAM_PREFIX):
                found.append(subscription_queue(name.removeprefix(STREAM_PREFIX)))
        except InvalidName:
            continue  # an internal queue, a stage, or a stream of another system
    return found


def _main_risk(each: Plan) -> str:
    return each.risks[0] if each.risks else format_value(each.why)


def _as_json(each: Plan) -> dict[str, object]:
    return {
        "queue": each.queue.name,
        "stream": each.queue.stream,
        "change": each.change,
        "strategy": each.strategy,
        "messages": each.messages,
        "why": list(each.why),
        "risks": list(each.risks),
        "differences": [
            {"what": one.what, "field": one.field, "is": one.actual, "wanted": one.wanted, "in_place": one.in_place}
            for one in each.differences
        ],
    }

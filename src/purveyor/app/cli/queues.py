"""`purveyor queues`: the queue catalogue beside what the server holds, its migration, and the NATS users of components.

`plan` and `apply` show and make the changes that bring queues to their declaration.
"""

import inspect
import time
from dataclasses import dataclass
from typing import Annotated

import typer

from purveyor.app.cli.context import Cli, JsonFlag, YesFlag, confirm, examples
from purveyor.app.cli.output import progress, write, write_json, write_note
from purveyor.app.cli.render import format_table, format_value
from purveyor.jetstream.config import StreamInfo
from purveyor.jetstream.maintenance import STREAM_PREFIX
from purveyor.jetstream.server.config import render_users
from purveyor.model.errors import InvalidName, NotFound, PurveyorError, Unavailable
from purveyor.queues.catalogue import Queue, internal_queues, subscription_queue
from purveyor.queues.client import Queues
from purveyor.queues.ensure import Ensured
from purveyor.queues.migration.events import MigrationOptions, Progress
from purveyor.queues.migration.plan import Change, Difference, Plan, Strategy, consumer_differences, stream_differences
from purveyor.queues.migration.record import QueueStatus
from purveyor.queues.permissions import component_users, stages_user, subscription_user

app = typer.Typer(
    help="Compare the queue catalogue with the server, and migrate.", rich_markup_mode=None, add_completion=False
)
_MISSING = "missing"
_OUTDATED = "needs update"
_NOTE_INTERVAL_SECONDS = 2.0

QueueName = Annotated[str | None, typer.Argument(metavar="QUEUE", help="Only this queue; default: all.")]
StrategyFlag = Annotated[
    Strategy | None,
    typer.Option("--strategy", help="How to migrate: let the readers drain the queue, or copy it through a snapshot."),
]


@dataclass(frozen=True, slots=True)
class ReaderState:
    """A durable of a queue, with the messages it has yet to read and to answer; None if the durable is missing."""

    durable: str
    who: str
    lag: int | None
    unanswered: int | None


@dataclass(frozen=True, slots=True)
class QueueState:
    """A queue as declared and as the server has it."""

    queue: Queue
    status: str
    info: StreamInfo | None
    readers: tuple[ReaderState, ...]
    differences: tuple[Difference, ...]
    migration: str | None = None
    """The strategy of the running migration, and the file of its snapshot."""


def status_of(info: StreamInfo | None, differences: tuple[Difference, ...], readers: tuple[ReaderState, ...]) -> str:
    """Return the status that `ensure` would find."""
    if info is None:
        return _MISSING
    if info.config.sealed:
        return QueueStatus.SEALED_FOR_MIGRATION.value
    if not all(difference.in_place for difference in differences):
        return QueueStatus.NEEDS_MIGRATION.value
    if differences or any(reader.lag is None for reader in readers):
        return _OUTDATED
    return QueueStatus.READY.value


async def read_state(queues: Queues, queue: Queue, info: StreamInfo | None, replicas: int) -> QueueState:
    """Read the live state of a queue whose stream has this `info`."""
    migration = await _migration(queues, queue) if info is None or info.config.sealed else None
    if info is None:
        absent = tuple(ReaderState(reader.durable, reader.used_by, None, None) for reader in queue.readers)
        status = _MISSING if migration is None else QueueStatus.SEALED_FOR_MIGRATION.value
        return QueueState(queue, status, None, absent, (), migration)
    differences = stream_differences(info.config, queue.config(replicas=replicas))
    readers: list[ReaderState] = []
    for reader in queue.readers:
        try:
            live = await queues.consumers.info(queue.stream, reader.durable)
        except NotFound:
            readers.append(ReaderState(reader.durable, reader.used_by, None, None))
            continue
        differences += consumer_differences(live.config, reader.consumer())
        readers.append(ReaderState(reader.durable, reader.used_by, live.num_pending, live.num_ack_pending))
    status = status_of(info, differences, tuple(readers))
    return QueueState(queue, status, info, tuple(readers), differences, migration)


async def _migration(queues: Queues, queue: Queue) -> str | None:
    try:
        record = await queues.migrations.find_running(queue.name)
    except Unavailable:
        raise
    except PurveyorError as error:  # a record that cannot be read
        return str(error)
    if record is None:
        return None
    if record.archive is None:
        return f"is being migrated by {record.strategy.value}"
    where = f"{record.archive.path} on machine {record.archive.host}"
    return f"is being migrated by snapshot ({where}); `purveyor queues apply {queue.name}` continues it"


@app.command("list", epilog=examples("purveyor queues list", "purveyor queues list --json"))
def list_(ctx: typer.Context, as_json: JsonFlag = False) -> None:
    """List the queues of the catalogue and of subscriptions, with their live state."""
    cli = Cli.of(ctx, as_json)
    replicas = cli.settings().replicas

    async def find(queues: Queues) -> list[QueueState]:
        live = {info.config.name: info for info in await queues.streams.list()}
        declared = (*internal_queues(), *subscription_queues(list(live)))
        return [await read_state(queues, queue, live.get(queue.stream), replicas) for queue in declared]

    states = cli.call(find)
    if cli.json:
        write_json([_as_json(state) for state in states], indent=2)
        return
    rows = [
        (
            state.queue.name,
            state.status,
            state.info.state.messages if state.info else None,
            state.queue.retention,
            state.queue.subjects,
            state.queue.writer,
            [_reader(reader) for reader in state.readers] or state.queue.other_readers,
        )
        for state in states
    ]
    columns = ("QUEUE", "STATUS", "MESSAGES", "RETENTION", "SUBJECTS", "WRITER", "READERS")
    write(format_table(columns, rows, wrap=("SUBJECTS", "WRITER", "READERS")))
    for state in states:
        if state.migration is not None:
            write(f"{state.queue.name}: {format_value(state.migration)}")
        for difference in state.differences:
            write(f"{state.queue.name}: {format_value(str(difference))}")


@app.command("ensure", epilog=examples("purveyor queues ensure", "purveyor queues ensure incoming"))
def ensure(
    ctx: typer.Context,
    queue: Annotated[str | None, typer.Argument(metavar="QUEUE", help="Only this queue; default: all.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Create or update the internal queues as declared; fail if a queue needs a migration."""
    cli = Cli.of(ctx, as_json)
    replicas = cli.settings().replicas
    known = {item.name: item for item in internal_queues()}
    if queue is not None and queue not in known:
        raise InvalidName(f"no queue {queue!r} in the catalogue", fix=f"the queues are {', '.join(known)}")
    wanted = [known[queue]] if queue is not None else list(known.values())

    async def work(queues: Queues) -> list[Ensured]:
        with progress("creating queues", len(wanted)) as advance:
            done: list[Ensured] = []
            for item in wanted:
                done.append(await queues.ensure(item, replicas=replicas))
                advance(1)
            return done

    results = cli.call(work)
    if cli.json:
        write_json(
            [
                {
                    "queue": result.queue,
                    "status": result.status,
                    "action": result.action,
                    "differences": [str(difference) for difference in result.differences],
                }
                for result in results
            ],
            indent=2,
        )
    else:
        rows = [(r.queue, r.status, r.action, [str(difference) for difference in r.differences]) for r in results]
        write(format_table(("QUEUE", "STATUS", "ACTION", "DIFFERENCES"), rows, wrap=("DIFFERENCES",)))
    for result in results:
        result.require_ready()


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
        write_json([_plan_json(each) for each in plans], indent=2)
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
                _plan_json(each.plan)
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


def _plan_json(each: Plan) -> dict[str, object]:
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


app.command("plan", epilog=examples("purveyor queues plan", "purveyor queues plan incoming --json"))(plan)
_APPLY = examples("purveyor queues apply --yes", "purveyor queues apply incoming --strategy snapshot --yes")
app.command("apply", epilog=_APPLY)(apply)
app.command("migrate", epilog=_APPLY, help=f"The same as `apply`. {inspect.getdoc(apply)}")(apply)


def _reader(reader: ReaderState) -> str:
    if reader.lag is None:
        return f"{reader.durable} (missing)"
    return f"{reader.durable} (lag {reader.lag}, unanswered {reader.unanswered})"


def _as_json(state: QueueState) -> dict[str, object]:
    return {
        "queue": state.queue.name,
        "stream": state.queue.stream,
        "purpose": state.queue.purpose,
        "subjects": state.queue.subjects,
        "retention": state.queue.retention,
        "writer": state.queue.writer,
        "status": state.status,
        "exists": state.info is not None,
        "messages": state.info.state.messages if state.info else None,
        "bytes": state.info.state.bytes if state.info else None,
        "readers": state.readers,
        "differences": [str(difference) for difference in state.differences],
        "migration": state.migration,
    }


@app.command(
    "permissions",
    epilog=examples(
        "purveyor queues permissions",
        "purveyor queues permissions --subscription ox --json",
        "purveyor queues permissions --stages --subscription ox",
    ),
)
def permissions(
    ctx: typer.Context,
    subscription: Annotated[
        list[str] | None,
        typer.Option("--subscription", metavar="NAME", help="Only a user that can read this subscription; repeatable."),
    ] = None,
    stages: Annotated[
        bool,
        typer.Option("--stages", help="Only a user for applications with stages, which can read these subscriptions."),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Print the NATS users of the components with their permissions, as configuration of nats-server.

    The embedded server has these users already. For another server, add the text to its configuration and set the
    passwords in the environment variables that it names. Give each component its user in PURVEYOR_NATS_URL and its
    inbox in PURVEYOR_NATS_INBOX. The user of a subscription can read and acknowledge that queue and no other.
    """
    cli = Cli.of(ctx, as_json)
    users = [subscription_user(name) for name in subscription] if subscription else list(component_users())
    if stages:
        users = [stages_user(*(subscription or ()))]
    if cli.json:
        write_json([each.to_json() for each in users], indent=2)
        return
    passwords = {each.user: f"${password_variable(each.user)}" for each in users}
    inside = "\n".join(f"    {line}" for line in render_users(users, passwords).splitlines())
    write(f"authorization {{\n  users: [\n{inside}\n  ]\n}}")


def password_variable(user: str) -> str:
    """Return the name of the environment variable with a user's password.

    >>> password_variable("subscription-ox")
    'NATS_PASSWORD_SUBSCRIPTION_OX'
    """
    return f"NATS_PASSWORD_{user.upper().replace('-', '_')}"

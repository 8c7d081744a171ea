"""`purveyor queues`: the catalogue beside what the server holds."""

import inspect
from dataclasses import dataclass
from typing import Annotated

import typer

from purveyor.app.cli.context import Cli, JsonFlag, examples
from purveyor.app.cli.progress import progress
from purveyor.app.cli.queues_migrate import apply, plan
from purveyor.app.cli.queues_permissions import permissions
from purveyor.app.cli.render import show, table, write, write_json
from purveyor.jetstream.config import StreamInfo
from purveyor.model.errors import InvalidName, NotFound, PurveyorError, Unavailable
from purveyor.queues.catalogue import Queue, internal_queues, subscription_queue
from purveyor.queues.client import Queues
from purveyor.queues.config_diff import Difference, consumer_differences, stream_differences
from purveyor.queues.ensure import Ensured, QueueStatus

app = typer.Typer(help="The queue catalogue beside what the server holds.", rich_markup_mode=None, add_completion=False)
_PREFIX = "stream:"
_MISSING = "missing"
_OUTDATED = "needs update"


@dataclass(frozen=True, slots=True)
class ReaderState:
    """A durable of a queue: how many messages it has still to read and to answer; None when it is not there."""

    durable: str
    who: str
    lag: int | None
    unanswered: int | None


@dataclass(frozen=True, slots=True)
class QueueState:
    """A queue as declared and as it is."""

    queue: Queue
    status: str
    info: StreamInfo | None
    readers: tuple[ReaderState, ...]
    differences: tuple[Difference, ...]
    migration: str | None = None
    """How it is being migrated, and where its snapshot is."""


def status_of(info: StreamInfo | None, differences: tuple[Difference, ...], readers: tuple[ReaderState, ...]) -> str:
    """What `ensure` would find, in a word. Pure."""
    if info is None:
        return _MISSING
    if info.config.sealed:
        return QueueStatus.SEALED_FOR_MIGRATION.value
    if not all(difference.in_place for difference in differences):
        return QueueStatus.NEEDS_MIGRATION.value
    if differences or any(reader.lag is None for reader in readers):
        return _OUTDATED
    return QueueStatus.READY.value


async def look(queues: Queues, queue: Queue, info: StreamInfo | None, replicas: int) -> QueueState:
    """The live state of a queue, whose stream is as `info` says; changes nothing."""
    migration = await _migration(queues, queue) if info is None or info.config.sealed else None
    if info is None:
        absent = tuple(ReaderState(reader.durable, reader.who, None, None) for reader in queue.readers)
        status = _MISSING if migration is None else QueueStatus.SEALED_FOR_MIGRATION.value
        return QueueState(queue, status, None, absent, (), migration)
    differences = stream_differences(info.config, queue.config(replicas=replicas))
    readers: list[ReaderState] = []
    for reader in queue.readers:
        try:
            live = await queues.consumers.info(queue.stream, reader.durable)
        except NotFound:
            readers.append(ReaderState(reader.durable, reader.who, None, None))
            continue
        differences += consumer_differences(live.config, reader.consumer())
        readers.append(ReaderState(reader.durable, reader.who, live.num_pending, live.num_ack_pending))
    status = status_of(info, differences, tuple(readers))
    return QueueState(queue, status, info, tuple(readers), differences, migration)


async def _migration(queues: Queues, queue: Queue) -> str | None:
    try:
        record = await queues.migrations.under_way(queue.name)
    except Unavailable:
        raise
    except PurveyorError as error:  # a record that cannot be read
        return str(error)
    if record is None:
        return None
    if record.archive is None:
        return f"is being migrated by {record.strategy.value}"
    where = f"{record.archive.path} on machine {record.archive.host}"
    return f"is being migrated by snapshot ({where}); `purveyor queues apply {queue.name}` goes on with it"


@app.command("list", epilog=examples("purveyor queues list", "purveyor queues list --json"))
def list_(ctx: typer.Context, as_json: JsonFlag = False) -> None:
    """Show every queue of the catalogue, and those of subscriptions, with their live state. Changes nothing."""
    cli = Cli.of(ctx, as_json)
    replicas = cli.settings().replicas

    async def find(queues: Queues) -> list[QueueState]:
        live = {info.config.name: info for info in await queues.streams.list()}
        declared = (*internal_queues(), *_subscriptions(list(live)))
        return [await look(queues, queue, live.get(queue.stream), replicas) for queue in declared]

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
            [_reader(reader) for reader in state.readers] or state.queue.people,
        )
        for state in states
    ]
    columns = ("QUEUE", "STATUS", "MESSAGES", "RETENTION", "SUBJECTS", "WRITER", "READERS")
    write(table(columns, rows, wrap=("SUBJECTS", "WRITER", "READERS")))
    for state in states:
        if state.migration is not None:
            write(f"{state.queue.name}: {show(state.migration)}")
        for difference in state.differences:
            write(f"{state.queue.name}: {show(str(difference))}")


@app.command("ensure", epilog=examples("purveyor queues ensure", "purveyor queues ensure incoming"))
def ensure(
    ctx: typer.Context,
    queue: Annotated[str | None, typer.Argument(metavar="QUEUE", help="One queue; default: all.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Make the internal queues as declared, or say which need a migration."""
    cli = Cli.of(ctx, as_json)
    replicas = cli.settings().replicas
    known = {item.name: item for item in internal_queues()}
    if queue is not None and queue not in known:
        raise InvalidName(f"no queue {queue!r} in the catalogue", fix=f"the queues are {', '.join(known)}")
    wanted = [known[queue]] if queue is not None else list(known.values())

    async def work(queues: Queues) -> list[Ensured]:
        with progress("making queues", len(wanted)) as advance:
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
        write(table(("QUEUE", "STATUS", "ACTION", "DIFFERENCES"), rows, wrap=("DIFFERENCES",)))
    for result in results:
        result.require_ready()


app.command("plan", epilog=examples("purveyor queues plan", "purveyor queues plan incoming --json"))(plan)
_APPLY = examples("purveyor queues apply --yes", "purveyor queues apply incoming --strategy snapshot --yes")
app.command("apply", epilog=_APPLY)(apply)
app.command("migrate", epilog=_APPLY, help=f"The same as `apply`. {inspect.getdoc(apply)}")(apply)
app.command(
    "permissions",
    epilog=examples("purveyor queues permissions", "purveyor queues permissions --subscription ox --json"),
)(permissions)


def _subscriptions(names: list[str]) -> list[Queue]:
    found: list[Queue] = []
    for name in names:
        try:
            if name.startswith(_PREFIX):
                found.append(subscription_queue(name.removeprefix(_PREFIX)))
        except InvalidName:
            continue  # an internal queue, a stage, or somebody else's
    return found


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

"""The status of stages for the command line and metrics: the backlog in the queues, and the state in the database."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import func, select

from purveyor.model.errors import NotFound
from purveyor.queues.catalogue import endpoint_of, endpoint_queue, stage_durable
from purveyor.queues.client import Queues
from purveyor.queues.dead_letters.letter import subject_token
from purveyor.queues.dead_letters.store import DeadLetterStore
from purveyor.stages.sql_store import SqlStore

_MAX_FAILURES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStatus:
    """One stage, all its instances together."""

    stage: int
    waiting: int
    """Messages that no instance has yet."""
    in_work: int
    """Messages that an instance holds."""
    again: int
    """The number of these that were delivered before."""
    interactive: int
    """Interactive messages, waiting or in work."""
    dead_letters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointStatus:
    """One endpoint."""

    endpoint: str
    stream: str
    stages: tuple[StageStatus, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failing:
    """A message that failed and will be tried again. Times are milliseconds since 1970."""

    stage: str
    message_id: str
    attempts: int
    first_ms: int
    last_ms: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseStatus:
    """The database of an application."""

    unsent: int
    held: dict[str, int]
    """The number of messages that no stream takes, by subject."""
    failing: tuple[Failing, ...]


async def read_status(queues: Queues, endpoint: str | None = None) -> list[EndpointStatus]:
    """Return the status of all endpoints that have a queue, or of one; NotFound if it has none."""
    letters = await DeadLetterStore(queues).counts()
    found: list[EndpointStatus] = []
    for info in await queues.streams.list():
        name = endpoint_of(info.config.name, info.config.subjects)
        if name is not None and endpoint in (None, name):
            count = sum(1 for subject in info.config.subjects if not subject.endswith(".interactive"))
            stages = [await _read_stage(queues, name, number, letters) for number in range(count)]
            found.append(EndpointStatus(endpoint=name, stream=info.config.name, stages=tuple(stages)))
    if endpoint is not None and not found:
        raise NotFound(f"no endpoint {endpoint!r}", fix="`purveyor stages list` lists those that ever started")
    return sorted(found, key=lambda status: status.endpoint)


async def read_database_status(store: SqlStore, stages: Sequence[str] | None = None) -> DatabaseStatus:
    """Return the backlog of the outbox, and the failing messages (of some stages)."""
    outbox, failures = store.tables.outbox.c, store.tables.failures.c
    async with store.engine.connect() as connection:
        unsent = await connection.scalar(select(func.count()).where(outbox.sent_ms.is_(None), outbox.held.is_(False)))
        held = await connection.execute(
            select(outbox.subject, func.count()).where(outbox.sent_ms.is_(None), outbox.held).group_by(outbox.subject)
        )
        wanted = select(store.tables.failures).order_by(failures.last_ms.desc()).limit(_MAX_FAILURES)
        if stages is not None:
            wanted = wanted.where(failures.stage.in_(stages))
        failing = (await connection.execute(wanted)).mappings().all()
        return DatabaseStatus(
            unsent=unsent or 0,
            held={str(row[0]): int(row[1]) for row in held},
            failing=tuple(Failing(**row) for row in failing),
        )


async def _read_stage(queues: Queues, endpoint: str, number: int, letters: dict[str, int]) -> StageStatus:
    stream = endpoint_queue(endpoint, 1).stream
    plain = await queues.consumers.info(stream, stage_durable(number))
    interactive = await queues.consumers.info(stream, stage_durable(number, interactive=True))
    return StageStatus(
        stage=number,
        waiting=plain.num_pending,
        in_work=plain.num_ack_pending,
        again=plain.num_redelivered,
        interactive=interactive.num_pending + interactive.num_ack_pending,
        dead_letters=letters.get(subject_token(f"stage:{endpoint}.{number}"), 0),
    )

"""The new stream: its settings, and its creation where the old stream ended.

The order makes each step safe to repeat after a crash, by any instance:

1. The stream, from the sequence after the last one of the old stream: a late acknowledgement of an old message means
   nothing in it. A stream with interest retention begins with limits retention: publishers may write to it at once, and
   it has no durable yet.
2. The durables.
3. The retention.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from purveyor.jetstream.api import NO_SUITABLE_PEERS, Api, Json, Resource
from purveyor.jetstream.config import ConsumerConfig, ConsumerInfo, Retention, to_wire
from purveyor.model.errors import AlreadyExists, ConfigRefused, NoAnswer, Refused, UnknownConsumer, UnknownStream
from purveyor.queues.catalogue import Queue
from purveyor.queues.migration.events import EventListener, MigrationOptions, MigrationWarning, Step
from purveyor.queues.migration.plan import LiveQueue, filters_overlap
from purveyor.queues.migration.record import CONTINUES, Record, continue_metadata

_DECLARED = ("subjects", "retention", "storage", "num_replicas", "allow_direct", "allow_atomic")
# The settings that sealing changes. If another program sealed the stream, their earlier values are unknown.
_UNSEALED_SETTINGS: Mapping[str, Any] = {"sealed": False, "deny_delete": False, "deny_purge": False, "discard": "old"}
# The start of a consumer in the old stream means nothing in the new one, and a pause is over.
_START_SETTINGS = ("opt_start_seq", "opt_start_time", "deliver_policy", "pause_until")


def target_config(live: LiveQueue, queue: Queue, *, replicas: int) -> Json:
    """Return the settings of the new stream. Settings of an operator stay. Pure."""
    wanted = to_wire(queue.config(replicas=replicas))
    before: Json = dict(live.raw)
    if live.info.config.sealed:
        before |= _UNSEALED_SETTINGS
    before.pop("first_seq", None)
    metadata: dict[str, str] = {**before.get("metadata", {}), **(wanted.get("metadata") or {})}
    ours = {key: value for key, value in metadata.items() if not key.startswith("_nats.")}
    return before | {key: wanted[key] for key in _DECLARED} | {"metadata": continue_metadata(ours, live.created)}


def target_durables(live: LiveQueue, queue: Queue) -> tuple[Json, ...]:
    """Return the durables of the new stream: the declared ones, and the other ones of the old stream. Pure.

    A work queue has one reader for each message: the declared readers replace earlier ones.
    """
    declared = declared_durables(queue)
    names = {each["durable_name"] for each in declared}
    others = [consumer for consumer in live.consumers if consumer.config.durable_name and consumer.name not in names]
    if Retention.WORK_QUEUE in (live.info.config.retention, queue.retention):
        wanted = [reader.consumer() for reader in queue.readers]
        stay = queue.retention is Retention.WORK_QUEUE
        others = [each for each in others if stay and not any(filters_overlap(each.config, one) for one in wanted)]
    return (*declared, *map(_without_start, others))


def declared_durables(queue: Queue) -> tuple[Json, ...]:
    """Return the durables of the catalogue in the server's format."""
    return tuple(durable_config(reader.consumer()) for reader in queue.readers)


def durable_config(config: ConsumerConfig) -> Json:
    """Return the settings of a durable in the server's format."""
    body: Json = to_wire(config) | {"name": config.durable_name}
    if not config.backoff:
        body.pop("backoff", None)
    return body


def _without_start(consumer: ConsumerInfo) -> Json:
    kept = {key: value for key, value in durable_config(consumer.config).items() if key not in _START_SETTINGS}
    return kept | {"deliver_policy": "all"}


def replaced_consumers(consumers: Iterable[ConsumerInfo], durables: Iterable[Json]) -> list[str]:
    """Return the names of the consumers of a work queue that other durables replace."""
    names = {each["durable_name"] for each in durables}
    return [consumer.name for consumer in consumers if consumer.name not in names]


_INTEREST = "interest"
NAME_IN_USE = (10058, 10130)
_RESTORE_FAILED = 10062
_ATTEMPTS = 200
_RESTORE_ATTEMPTS = 5
_RETRY_SECONDS = 0.1


def restoring_config(record: Record) -> Json:
    """Return the settings during a restore: a separate subject, to which no publisher writes. Pure."""
    return initial_config(record) | {"subjects": [f"_purveyor.migrating.{record.queue}"]}


def is_restoring(config: Json, record: Record) -> bool:
    """Return whether a stream is still being restored: it may not hold everything yet. Pure."""
    return bool(list(config.get("subjects") or ()) == restoring_config(record)["subjects"])


def initial_config(record: Record) -> Json:
    """Return the settings with which the new stream is created. Pure."""
    return record.target | {"retention": "limits"} if record.target["retention"] == _INTEREST else record.target


async def create(api: Api, record: Record) -> None:
    """Do step 1. The stream of another instance is fine if it continues the old stream."""
    assert record.last_sequence is not None
    config = initial_config(record) | {"first_seq": record.last_sequence + 1}

    async def request() -> None:
        await api.request(f"STREAM.CREATE.{record.stream}", config, about=Resource(stream=record.stream))

    await create_replacement(api, record, request)


async def create_replacement(api: Api, record: Record, make: Callable[[], Awaitable[None]]) -> None:
    """Create the new stream under the name of the old one; the stream of another instance is fine.

    In a cluster the name may be taken for a moment longer than the stream exists.
    """
    for attempt in range(_ATTEMPTS):
        try:
            await make()
        except Refused as error:
            restore_failed = (
                error.err_code == _RESTORE_FAILED and attempt < _RESTORE_ATTEMPTS
            )  # the archive is complete: restore it again
            if error.err_code == NO_SUITABLE_PEERS:
                raise NoAnswer(
                    f"stream {record.stream!r} cannot be created while a node is away: {error.message}",
                    fix="bring the node back; the migration continues automatically",
                ) from error
            if error.err_code not in NAME_IN_USE and not restore_failed:
                raise
            if await _exists(api, record):
                return
            refused: Refused = error
        else:
            return
        await asyncio.sleep(_RETRY_SECONDS)
    raise refused


async def _exists(api: Api, record: Record) -> bool:
    """Return whether the new stream exists; AlreadyExists if the name belongs to an unknown stream."""
    try:
        live = await api.request(f"STREAM.INFO.{record.stream}", about=Resource(stream=record.stream))
    except UnknownStream:
        return False
    if continues_from(live["config"], record.created):
        return True
    if str(live["created"]) == record.created:
        return False
    raise AlreadyExists(f"stream {record.stream!r} was created again by another program", fix="look at its messages")


async def complete(api: Api, record: Record, options: MigrationOptions) -> None:
    """Do steps 2 and 3."""
    about = Resource(stream=record.stream)
    for durable in record.durables:
        await create_durable(api, record.stream, durable, options.on_event)
    options.on_step(Step.READERS_MADE)
    live = (await api.request(f"STREAM.INFO.{record.stream}", about=about))["config"]
    if live["retention"] != record.target["retention"]:
        wanted: dict[str, Any] = live | {"retention": record.target["retention"]}
        await api.request(f"STREAM.UPDATE.{record.stream}", wanted, about=about)
    options.on_step(Step.CONVERTED)


async def create_durable(api: Api, stream: str, config: Json, report: EventListener) -> None:
    """Create a durable, unless it exists."""
    name = config["durable_name"]
    about = Resource(stream=stream, consumer=name)
    try:
        await api.request(f"CONSUMER.INFO.{stream}.{name}", about=about)
    except UnknownConsumer:
        body = {"stream_name": stream, "config": config, "action": "create"}
        try:
            await api.request(f"CONSUMER.CREATE.{stream}.{name}", body, about=about)
        except AlreadyExists:
            return
        except ConfigRefused as error:  # of another instance, and not allowed beside a durable of a work queue
            report(MigrationWarning(f"durable {name!r} of stream {stream!r} cannot be created: {error}"))


def continues_from(config: Json, created: str) -> bool:
    """Return whether a stream continues the one created at that time, according to its metadata. Pure."""
    return created in str((config.get("metadata") or {}).get(CONTINUES, "")).split()

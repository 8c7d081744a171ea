"""What the new stream and its durables are to be: the old settings with those of the declaration. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

from purveyor.jetstream.codec import Json, to_wire
from purveyor.jetstream.config import ConsumerConfig, ConsumerInfo, Retention
from purveyor.queues.catalogue import Queue
from purveyor.queues.migration.plan import Live, overlap
from purveyor.queues.migration.record import continued

_DECLARED = ("subjects", "retention", "storage", "num_replicas", "allow_direct", "allow_atomic")
# What sealing sets. In the settings of a stream that was sealed by somebody else, the values before are unknown.
_SEALS: Mapping[str, Any] = {"sealed": False, "deny_delete": False, "deny_purge": False, "discard": "old"}
# Where a consumer began to read means nothing in a new stream, and what it was told once (a pause) is over.
_BEGINNING = ("opt_start_seq", "opt_start_time", "deliver_policy", "pause_until")


def target_config(live: Live, queue: Queue, *, replicas: int) -> Json:
    """The settings of the new stream: what an operator has set stays."""
    wanted = to_wire(queue.config(replicas=replicas))
    before: Json = dict(live.raw)
    if live.info.config.sealed:
        before |= _SEALS
    before.pop("first_seq", None)
    metadata: dict[str, str] = {**before.get("metadata", {}), **(wanted.get("metadata") or {})}
    ours = {key: value for key, value in metadata.items() if not key.startswith("_nats.")}
    return before | {key: wanted[key] for key in _DECLARED} | {"metadata": continued(ours, live.created)}


def target_durables(live: Live, queue: Queue) -> tuple[Json, ...]:
    """The durables of the new stream: those declared, and those of others that the old one had.

    A work queue has one reader for a message: whoever it was, the declared ones take its place.
    """
    declared = declared_durables(queue)
    names = {each["durable_name"] for each in declared}
    others = [consumer for consumer in live.consumers if consumer.config.durable_name and consumer.name not in names]
    if Retention.WORK_QUEUE in (live.info.config.retention, queue.retention):
        wanted = [reader.consumer() for reader in queue.readers]
        stay = queue.retention is Retention.WORK_QUEUE
        others = [each for each in others if stay and not any(overlap(each.config, one) for one in wanted)]
    return (*declared, *map(_renewed, others))


def declared_durables(queue: Queue) -> tuple[Json, ...]:
    """The durables of the catalogue as the server wants them."""
    return tuple(durable_config(reader.consumer()) for reader in queue.readers)


def durable_config(config: ConsumerConfig) -> Json:
    """A durable's settings for the server."""
    body: Json = to_wire(config) | {"name": config.durable_name}
    if not config.backoff:
        body.pop("backoff", None)
    return body


def _renewed(consumer: ConsumerInfo) -> Json:
    kept = {key: value for key, value in durable_config(consumer.config).items() if key not in _BEGINNING}
    return kept | {"deliver_policy": "all"}


def replaced(consumers: Iterable[ConsumerInfo], durables: Iterable[Json]) -> list[str]:
    """Consumers of a work queue whose place others take."""
    names = {each["durable_name"] for each in durables}
    return [consumer.name for consumer in consumers if consumer.name not in names]

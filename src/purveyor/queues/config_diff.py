"""How a live queue differs from its declaration, and what of that can change where it is. Pure."""

from dataclasses import dataclass
from enum import Enum

from purveyor.jetstream.config import ConsumerConfig, Retention, StreamConfig

# What the catalogue decides. Limits and everything else an operator has set on the live stream stay as they are.
_STREAM_FIELDS = ("subjects", "retention", "storage", "num_replicas", "allow_direct", "allow_atomic")
_CONSUMER_FIELDS = ("deliver_policy", "ack_policy", "ack_wait", "max_ack_pending", "filters")
_FIXED_CONSUMER_FIELDS = ("deliver_policy", "ack_policy")


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting that is not as declared, and whether it can be changed where it is."""

    what: str
    field: str
    actual: object
    wanted: object
    in_place: bool

    def __str__(self) -> str:
        return f"{self.what} {self.field}: {_show(self.actual)} -> {_show(self.wanted)}"


def stream_differences(actual: StreamConfig, wanted: StreamConfig) -> tuple[Difference, ...]:
    """How a live stream differs from its declaration. Pure.

    Between limits and interest the retention can change in place; to or from a work queue, and the storage, it cannot.
    """
    found = []
    for field in _STREAM_FIELDS:
        have, want = getattr(actual, field), getattr(wanted, field)
        if field == "subjects":
            have, want = tuple(sorted(have)), tuple(sorted(want))
        if have != want:
            in_place = field != "storage" and not (field == "retention" and Retention.WORK_QUEUE in (have, want))
            found.append(Difference("stream", field, have, want, in_place))
    return tuple(found)


def consumer_differences(actual: ConsumerConfig, wanted: ConsumerConfig) -> tuple[Difference, ...]:
    """How a live durable differs from its declaration. Pure."""
    name = f"consumer {wanted.durable_name}"
    return tuple(
        Difference(name, field, getattr(actual, field), getattr(wanted, field), field not in _FIXED_CONSUMER_FIELDS)
        for field in _CONSUMER_FIELDS
        if getattr(actual, field) != getattr(wanted, field)
    )


def _show(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)

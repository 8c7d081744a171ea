"""Typed configuration and state of streams and consumers, their JSON, and the size of stored messages.

Field names are those of the JSON of the JetStream API. A field that is None is omitted, so the server uses its default.
Reading ignores unknown fields; so updates start from the server's own JSON (`Streams.update`). In the JSON, durations
are in nanoseconds and times in RFC 3339. A limit of zero or -1 means no limit, as on the server.
"""

import dataclasses
import types
import typing
from collections.abc import Hashable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union, cast, get_args, get_origin

from purveyor.jetstream.api import Json, format_time, parse_time
from purveyor.model.errors import InvalidConfig
from purveyor.model.name_rules import check_name, check_subject

T = TypeVar("T")


def nanoseconds(duration: timedelta) -> int:
    """Return a duration in nanoseconds, without the rounding of floats."""
    return (duration // timedelta(microseconds=1)) * 1000


def to_wire(value: object) -> Any:
    """Return a dataclass (or a value of one) as JSON; fields that are None are omitted."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {name: to_wire(item) for name, item in pairs if item is not None}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, timedelta):
        return nanoseconds(value)
    if isinstance(value, datetime):
        return format_time(value)
    if isinstance(value, tuple | list):
        return [to_wire(item) for item in value]
    return value


def from_wire(kind: type[T], data: Json) -> T:
    """Return a dataclass from JSON; missing fields get their defaults."""
    values = {
        name: _convert(hint, data[name])
        for name, hint in _hints(cast("Hashable", kind)).items()
        if name in data and data[name] is not None
    }
    return kind(**values)


@cache
def _hints(kind: Hashable) -> dict[str, Any]:
    assert isinstance(kind, type)
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


def _convert(hint: Any, value: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(option for option in get_args(hint) if option is not type(None))
    if get_origin(hint) is tuple:
        return tuple(_convert(get_args(hint)[0], item) for item in value)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_wire(hint, value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    if hint is timedelta:
        return timedelta(microseconds=value / 1000)
    if hint is datetime:
        return parse_time(value)
    return value


class Retention(Enum):
    """When a message leaves the stream: by limits, once every consumer acknowledged it, or once one did."""

    LIMITS = "limits"
    INTEREST = "interest"
    WORK_QUEUE = "workqueue"


class Discard(Enum):
    """Which message is dropped at a limit: the oldest or the new one."""

    OLD = "old"
    NEW = "new"


class Storage(Enum):
    """Where messages are stored."""

    FILE = "file"
    MEMORY = "memory"


class Compression(Enum):
    """The compression of message blocks on disk."""

    NONE = "none"
    S2 = "s2"


class Deliver(Enum):
    """The first message of a new consumer."""

    ALL = "all"
    LAST = "last"
    NEW = "new"
    BY_START_SEQUENCE = "by_start_sequence"
    BY_START_TIME = "by_start_time"
    LAST_PER_SUBJECT = "last_per_subject"


class AckPolicy(Enum):
    """The scope of an acknowledgement: each message, a message with all before it, or nothing."""

    EXPLICIT = "explicit"
    ALL = "all"
    NONE = "none"


class Replay(Enum):
    """How fast stored messages are delivered: at once, or in the rhythm in which they were published."""

    INSTANT = "instant"
    ORIGINAL = "original"


INCARNATION = "purveyor.incarnation"
"""The key in a stream's metadata that distinguishes it from an earlier stream of the same name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamConfig:
    """The configuration of a stream."""

    name: str
    subjects: tuple[str, ...] = ()
    description: str | None = None
    retention: Retention = Retention.LIMITS
    discard: Discard = Discard.OLD
    discard_new_per_subject: bool = False
    storage: Storage = Storage.FILE
    num_replicas: int = 1
    max_msgs: int = -1
    max_bytes: int = -1
    max_age: timedelta = timedelta(0)
    max_msg_size: int = -1
    max_msgs_per_subject: int = -1
    max_consumers: int = -1
    duplicate_window: timedelta | None = None
    no_ack: bool = False
    sealed: bool = False
    deny_delete: bool = False
    deny_purge: bool = False
    allow_rollup_hdrs: bool = False
    allow_direct: bool = True
    allow_atomic: bool = False
    allow_msg_ttl: bool = False
    first_seq: int | None = None
    compression: Compression = Compression.NONE
    metadata: dict[str, str] | None = None

    def validated(self) -> "StreamConfig":
        """Return itself; raise InvalidConfig, InvalidName or InvalidSubject with a clearer text than the server's."""
        check_name(self.name, "stream")
        for subject in self.subjects:
            check_subject(subject, wildcards=True)
        if self.discard_new_per_subject and (self.discard is not Discard.NEW or self.max_msgs_per_subject < 1):
            raise InvalidConfig(
                f"stream {self.name!r}: discarding new messages per subject needs the discard policy 'new' "
                "and a limit of messages per subject",
                fix="set both",
            )
        if self.duplicate_window is not None and self.max_age and self.duplicate_window > self.max_age:
            raise InvalidConfig(
                f"stream {self.name!r}: the duplicate window ({self.duplicate_window}) is longer than "
                f"the maximum age of messages ({self.max_age})",
                fix="shorten the window",
            )
        if self.num_replicas not in range(1, 6):
            raise InvalidConfig(
                f"stream {self.name!r}: {self.num_replicas} replicas", fix="give 1 to 5, an odd number for a quorum"
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """The content of a stream."""

    messages: int = 0
    bytes: int = 0
    first_seq: int = 0
    first_ts: datetime | None = None
    last_seq: int = 0
    last_ts: datetime | None = None
    num_subjects: int = 0
    num_deleted: int = 0
    consumer_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamInfo:
    """The server's view of a stream. `created` distinguishes a stream from a later one of the same name."""

    config: StreamConfig
    state: StreamState
    created: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerConfig:
    """The configuration of a consumer. With a `durable_name` it is kept; without, the server deletes it when unused."""

    name: str | None = None
    durable_name: str | None = None
    description: str | None = None
    deliver_policy: Deliver = Deliver.ALL
    opt_start_seq: int | None = None
    opt_start_time: datetime | None = None
    ack_policy: AckPolicy = AckPolicy.EXPLICIT
    ack_wait: timedelta | None = None
    max_deliver: int = -1
    backoff: tuple[timedelta, ...] = ()
    filter_subject: str | None = None
    filter_subjects: tuple[str, ...] | None = None
    replay_policy: Replay = Replay.INSTANT
    rate_limit_bps: int | None = None
    sample_freq: str | None = None
    max_waiting: int | None = None
    max_ack_pending: int | None = None
    headers_only: bool = False
    deliver_subject: str | None = None
    deliver_group: str | None = None
    flow_control: bool = False
    idle_heartbeat: timedelta | None = None
    inactive_threshold: timedelta | None = None
    num_replicas: int = 0
    mem_storage: bool = False
    pause_until: datetime | None = None
    metadata: dict[str, str] | None = None

    def validated(self) -> "ConsumerConfig":
        """Return itself; raise InvalidConfig for inconsistent settings."""
        for name in (self.name, self.durable_name):
            if name is not None:
                check_name(name, "consumer")
        for subject in self.filters:
            check_subject(subject, wildcards=True)
        if self.deliver_policy is Deliver.BY_START_SEQUENCE and not self.opt_start_seq:
            raise InvalidConfig("delivering from a sequence needs a start sequence of 1 or more", fix="set it")
        if self.deliver_policy is Deliver.BY_START_TIME and self.opt_start_time is None:
            raise InvalidConfig("delivering from a time needs a start time", fix="set it")
        if self.backoff and 0 < self.max_deliver < len(self.backoff):
            raise InvalidConfig(
                f"{len(self.backoff)} backoff delays need more than {self.max_deliver} deliveries",
                fix="raise max_deliver, or give fewer delays",
            )
        return self

    @property
    def filters(self) -> tuple[str, ...]:
        """The subjects that it reads; empty means all."""
        if self.filter_subjects:
            return self.filter_subjects
        return (self.filter_subject,) if self.filter_subject else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencePair:
    """A position of a consumer: its count of deliveries, and the sequence in the stream."""

    consumer_seq: int = 0
    stream_seq: int = 0
    last_active: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerInfo:
    """The server's view of a consumer."""

    stream_name: str
    name: str
    config: ConsumerConfig
    delivered: SequencePair = field(default_factory=SequencePair)
    ack_floor: SequencePair = field(default_factory=SequencePair)
    num_ack_pending: int = 0
    num_redelivered: int = 0
    num_waiting: int = 0
    num_pending: int = 0
    push_bound: bool = False
    paused: bool = False
    pause_remaining: timedelta | None = None
    created: datetime | None = None


_RECORD_LENGTH, _SEQUENCE, _TIME, _SUBJECT_LENGTH, _HASH = 4, 8, 8, 2, 8
_HEADER_LENGTH = 4


def stored_size(subject_bytes: int, data_bytes: int, header_bytes: int = 0) -> int:
    """Return the bytes that file storage takes for one message; `header_bytes` is the size of its header block.

    >>> stored_size(subject_bytes=4, data_bytes=5)  # "hello" on a subject of four characters
    39
    """
    record = _RECORD_LENGTH + _SEQUENCE + _TIME + _SUBJECT_LENGTH + subject_bytes + data_bytes + _HASH
    return record + (_HEADER_LENGTH + header_bytes if header_bytes else 0)


def overhead(subject_bytes: int, header_bytes: int = 0) -> int:
    """Return the bytes that file storage takes for a message in addition to its payload.

    >>> overhead(subject_bytes=4)
    34
    """
    return stored_size(subject_bytes, 0, header_bytes)

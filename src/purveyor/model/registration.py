"""The stored states of a subscription beside its definition: its beginning, and the progress of dispatch and prefill.

Each of these is one JSON value of the registry (`queues/registry.py`), with its own writer: delivery writes the record,
dispatch and catch-up write the dispatch state, prefill writes the prefill state. All have the incarnation: a state that
a deleted subscription of the same name left behind counts as absent. All have a version (see `json_fields`); in every
version of the record `incarnation`, `begin` and `state` keep their names and their meaning, so that a program that does
not understand the rest can still say where it stopped.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Final

from purveyor.model import json_fields
from purveyor.model.json_fields import (
    FieldCodec,
    Json,
    Kind,
    field_names,
    member_field,
    moment_field,
    nested_field,
    read_fields,
    text_field,
    whole_field,
    write_fields,
)
from purveyor.model.subscription import Subscription


class RecordState(Enum):
    """The life of a subscription."""

    REGISTERING = "registering"
    """It is being added, or a crash interrupted that; adding it again completes it."""
    ACTIVE = "active"
    DELETING = "deleting"


def _read_pause_reason(given: Json, name: str, _: str) -> str | None:
    reason = given.get(name)
    return reason if isinstance(reason, str) else None


_RECORD_FIELDS: Final = (
    text_field("incarnation"),
    nested_field("definition", Subscription),
    whole_field("begin", default=None),
    member_field("state", RecordState),
    FieldCodec("paused", json_fields.flag),
    moment_field("created"),
    FieldCodec("pause_reason", _read_pause_reason, default=None, omit_default=True),
)
RECORD: Final = Kind("subscription record", field_names(_RECORD_FIELDS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A registered subscription. `begin` is the position of its control event; later events are delivered."""

    incarnation: str
    definition: Subscription
    begin: int | None = None
    state: RecordState = RecordState.REGISTERING
    paused: bool = False
    pause_reason: str | None = None
    """Why a program paused it; None if a user did."""
    created: datetime

    @property
    def name(self) -> str:
        """Its name."""
        return self.definition.name

    def to_json(self) -> Json:
        """Return the fields for the registry."""
        return write_fields(_RECORD_FIELDS, self)

    @classmethod
    def from_json(cls, data: object) -> "Record":
        """Build it from checked fields; InvalidInput names the wrong one."""
        return cls(**read_fields(_RECORD_FIELDS, RECORD.check(data), RECORD.what))


_SUSPENSION_FIELDS: Final = (
    whole_field("position"),
    text_field("reason"),
    moment_field("at"),
    text_field("group", default=None, omit_default=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspension:
    """Why the dispatcher writes nothing to a queue, from which position on, and since when."""

    position: int
    reason: str
    at: datetime
    group: str | None = None
    """The group of dispatchers that does not understand the record of the subscription. Groups that understand it are
    not affected, and this group resumes by itself when it understands it. None: the queue refused a message, and an
    operator has to act."""

    def to_json(self) -> Json:
        """Return the fields for the registry."""
        return write_fields(_SUSPENSION_FIELDS, self)

    @classmethod
    def from_json(cls, data: object) -> "Suspension":
        """Build it from checked fields; InvalidInput names the wrong one."""
        given = json_fields.mapping(data, "suspension")
        json_fields.reject_unknown(given, field_names(_SUSPENSION_FIELDS), "suspension")
        return cls(**read_fields(_SUSPENSION_FIELDS, given, "suspension"))


_DISPATCH_FIELDS: Final = (
    text_field("incarnation"),
    whole_field("next"),
    nested_field("suspended", Suspension, default=None),
)
DISPATCH_STATE: Final = Kind("dispatch state", field_names(_DISPATCH_FIELDS))


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchState:
    """How far a queue is written. `next` is the first position that the live dispatcher may write."""

    incarnation: str
    next: int
    suspended: Suspension | None = None

    def to_json(self) -> Json:
        """Return the fields for the registry."""
        return write_fields(_DISPATCH_FIELDS, self)

    @classmethod
    def from_json(cls, data: object) -> "DispatchState":
        """Build it from checked fields; InvalidInput names the wrong one."""
        return cls(**read_fields(_DISPATCH_FIELDS, DISPATCH_STATE.check(data), DISPATCH_STATE.what))


class PrefillStatus(Enum):
    """How far a prefill is."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


_PREFILL_FIELDS: Final = (
    text_field("incarnation"),
    member_field("status", PrefillStatus),
    whole_field("position"),
    whole_field("attempt"),
    whole_field("total", default=None),
    whole_field("written"),
    text_field("reason", default=None),
    text_field("job", default=None),
)
PREFILL_STATE: Final = Kind("prefill state", field_names(_PREFILL_FIELDS))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillState:
    """A requested prefill: its position, attempt and number of messages, and why it failed."""

    incarnation: str
    status: PrefillStatus
    position: int
    attempt: int = 1
    total: int | None = None
    """The number of messages; None until it is known."""
    written: int = 0
    reason: str | None = None
    job: str | None = None
    """The job that fills the queue, or did so last."""

    def to_json(self) -> Json:
        """Return the fields for the registry."""
        return write_fields(_PREFILL_FIELDS, self)

    @classmethod
    def from_json(cls, data: object) -> "PrefillState":
        """Build it from checked fields; InvalidInput names the wrong one."""
        return cls(**read_fields(_PREFILL_FIELDS, PREFILL_STATE.check(data), PREFILL_STATE.what))

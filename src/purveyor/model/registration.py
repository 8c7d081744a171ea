"""The stored states of a subscription beside its definition: its beginning, and the progress of dispatch and prefill.

A change of what a subscription selects (see `selection`) is first *pending*, until the position of its control event is
known. Then it is in force behind that position, and the record keeps what was in force before as *past*, until every
reader has passed that position (`delivery/definition_changes.py`). `Record.selection_at` answers what is in force at a
position; a dispatcher that is far behind asks it too.

Each of these is one JSON value of the registry (`queues/registry.py`), with its own writer: delivery writes the record,
dispatch and catch-up write the dispatch state, prefill writes the prefill state. All have the incarnation: a state that
a deleted subscription of the same name left behind counts as absent. All have a version (see `json_fields`); in every
version of the record `incarnation`, `begin` and `state` keep their names and their meaning, so that a program that does
not understand the rest can still say where it stopped.
"""

from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum
from typing import Any, Final
from uuid import UUID

from purveyor.model import json_fields
from purveyor.model.errors import InvalidInput
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
from purveyor.model.selection import Selection
from purveyor.model.subscription import Subscription


class RecordState(Enum):
    """The life of a subscription."""

    REGISTERING = "registering"
    """It is being added, or a crash interrupted that; adding it again completes it."""
    ACTIVE = "active"
    DELETING = "deleting"


def _read_list(given: Json, name: str, what: str) -> list[Any]:
    found = given.get(name)
    if not isinstance(found, list):
        raise InvalidInput(f"{json_fields.describe_type(found)} is no value for {name!r} of a {what}", fix="use a list")
    return found


def _read_texts(given: Json, name: str, what: str) -> tuple[str, ...]:
    found = _read_list(given, name, what)
    if not all(isinstance(each, str) and each for each in found):
        raise InvalidInput(f"{name!r} of a {what} holds something that is no text", fix="use a list of texts")
    return tuple(found)


def _read_pause_reason(given: Json, name: str, _: str) -> str | None:
    reason = given.get(name)
    return reason if isinstance(reason, str) else None


_PENDING_FIELDS: Final = (
    text_field("change"),
    nested_field("selection", Selection),
    FieldCodec("prefill", json_fields.flag),
    FieldCodec("voids", _read_texts, list),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingChange:
    """A change that is requested; the position of its control event is not known yet."""

    change: str
    """Its id, which its control event has."""
    selection: Selection
    """The selection behind the position of the control event."""
    prefill: bool = False
    """Whether the objects of topics that it adds are prefilled, as of that position."""
    voids: tuple[str, ...] = ()
    """Earlier changes that were pending when this one began: their control events have no effect."""

    def to_json(self) -> Json:
        """Return the fields for the registry."""
        return write_fields(_PENDING_FIELDS, self)

    @classmethod
    def from_json(cls, data: object) -> "PendingChange":
        """Build it from checked fields; InvalidInput names the wrong one."""
        given = json_fields.mapping(data, "pending change")
        json_fields.reject_unknown(given, field_names(_PENDING_FIELDS), "pending change")
        return cls(**read_fields(_PENDING_FIELDS, given, "pending change"))

    @classmethod
    def from_event(cls, given: Json) -> "PendingChange":
        """Build it from the fields of its control event, which has other fields too."""
        return cls(**read_fields(_PENDING_FIELDS, given, "control event"))


_PAST_FIELDS: Final = (
    whole_field("until"),
    text_field("change"),
    nested_field("selection", Selection),
    FieldCodec("prefill", json_fields.flag),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PastSelection:
    """The selection up to a position: that of the control event of the change that ended it."""

    until: int
    change: str
    selection: Selection
    prefill: bool = False
    """Whether the objects of the topics that the change added are prefilled, as of the position."""

    def to_json(self) -> Json:
        """Return the fields for the registry."""
        return write_fields(_PAST_FIELDS, self)

    @classmethod
    def from_json(cls, data: object) -> "PastSelection":
        """Build it from checked fields; InvalidInput names the wrong one."""
        given = json_fields.mapping(data, "past selection")
        json_fields.reject_unknown(given, field_names(_PAST_FIELDS), "past selection")
        return cls(**read_fields(_PAST_FIELDS, given, "past selection"))


def _read_past(given: Json, name: str, what: str) -> tuple[PastSelection, ...]:
    return tuple(PastSelection.from_json(each) for each in _read_list(given, name, what))


def _write_past(past: tuple[PastSelection, ...]) -> list[Json]:
    return [each.to_json() for each in past]


_RECORD_FIELDS: Final = (
    text_field("incarnation"),
    nested_field("definition", Subscription),
    whole_field("begin", default=None),
    member_field("state", RecordState),
    FieldCodec("paused", json_fields.flag),
    moment_field("created"),
    FieldCodec("pause_reason", _read_pause_reason, default=None, omit_default=True),
    replace(nested_field("pending", PendingChange, default=None), omit_default=True),
    FieldCodec("past", _read_past, _write_past, default=(), omit_default=True),
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
    pending: PendingChange | None = None
    past: tuple[PastSelection, ...] = ()
    """The selections before the definition, in the order of positions, without those that every reader has passed."""

    @property
    def name(self) -> str:
        """Its name."""
        return self.definition.name

    def definition_at(self, position: int) -> Subscription:
        """Return a definition that selects the events that are selected at a position. Usually it is the definition."""
        for each in self.past:
            if position <= each.until:
                return each.selection.for_dispatch(self.name)
        return self.definition

    def changes_in(self, first: int, last: int) -> list[int]:
        """Return the positions from `first` on behind which, but not behind `last`, another selection is in force."""
        return [each.until for each in self.past if first <= each.until < last]

    def with_change(self, change: str, position: int) -> "Record":
        """Return the record after its pending change got a position; the same if another or none is pending."""
        if self.pending is None or self.pending.change != change:
            return self
        before = Selection.of(self.definition)
        past = PastSelection(until=position, change=change, selection=before, prefill=self.pending.prefill)
        return replace(
            self, definition=self.pending.selection.apply_to(self.definition), pending=None, past=(*self.past, past)
        )

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
    not affected, and this group resumes the subscription when it understands it. None: the queue refused a message, and
    an operator has to act."""

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
UNKNOWN_INCARNATION: Final = "unknown"
"""Stands for the incarnation in a dispatch state where neither the record nor the queue said it."""
DISPATCH_STATE: Final = Kind("dispatch state", field_names(_DISPATCH_FIELDS))


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchState:
    """How far a queue is written. `next` is the first position that the live dispatcher may write."""

    incarnation: str
    """That of the record. `UNKNOWN_INCARNATION` if a dispatcher could not read it: then of the record that is there."""
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
    replace(whole_field("through", default=None), omit_default=True),
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
    """The job that fills the queue, or did so last: a prefill or a replay."""
    through: int | None = None
    """The position of the last change of topics whose new objects belong to this prefill (see `next_piece`)."""

    @property
    def is_replay(self) -> bool:
        """Whether a replay fills the queue, or did so last: only the id of a replay is random (see `job_id`)."""
        try:
            return self.job is not None and UUID(self.job).version == 4
        except ValueError:
            return False

    def to_json(self) -> Json:
        """Return the fields for the registry."""
        return write_fields(_PREFILL_FIELDS, self)

    @classmethod
    def from_json(cls, data: object) -> "PrefillState":
        """Build it from checked fields; InvalidInput names the wrong one."""
        return cls(**read_fields(_PREFILL_FIELDS, PREFILL_STATE.check(data), PREFILL_STATE.what))

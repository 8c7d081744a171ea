"""What is known about a subscription beside its definition: where it begins, how far writing and prefill have come.

Each of these is one JSON value of the registry (`queues/registry.py`), with its own writer: delivery the record,
dispatch and catch-up the dispatch state, prefill the prefill state. All carry the incarnation: a state that a deleted
subscription of the same name left behind counts as absent. All carry a version (see `stored`); in every version of the
record `incarnation`, `begin` and `state` keep their names and their meaning, so that a program that does not understand
the rest can still say where it stopped.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any, Final

from purveyor.model import json_fields
from purveyor.model.json_fields import Json
from purveyor.model.stored_record import Kind
from purveyor.model.subscription import Subscription

RECORD: Final = Kind(
    "subscription record", ("incarnation", "definition", "begin", "state", "paused", "pause_reason", "created")
)
DISPATCH_STATE: Final = Kind("dispatch state", ("incarnation", "next", "suspended"))
PREFILL_STATE: Final = Kind(
    "prefill state", ("incarnation", "status", "position", "attempt", "total", "written", "reason", "job")
)


class RecordState(Enum):
    """The life of a subscription."""

    REGISTERING = "registering"
    """Being added, or left behind by a crash on the way; adding it again takes it up."""
    ACTIVE = "active"
    DELETING = "deleting"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A subscription as it is registered. `begin` is the position of its control event; what follows is delivered."""

    incarnation: str
    definition: Subscription
    begin: int | None = None
    state: RecordState = RecordState.REGISTERING
    paused: bool = False
    pause_reason: str | None = None
    """Why, if it was not a person who paused it."""
    created: datetime

    @property
    def name(self) -> str:
        """Its name."""
        return self.definition.name

    def to_json(self) -> Json:
        """As it lies in the registry."""
        return {
            "incarnation": self.incarnation,
            "definition": self.definition.to_json(),
            "begin": self.begin,
            "state": self.state.value,
            "paused": self.paused,
            "created": self.created.isoformat(),
            **({} if self.pause_reason is None else {"pause_reason": self.pause_reason}),
        }

    @classmethod
    def from_json(cls, data: object) -> "Record":
        """Checked; InvalidInput names the field that is wrong."""
        given = RECORD.check(data)
        return cls(
            incarnation=json_fields.text(given, "incarnation", "subscription record"),
            definition=Subscription.from_json(given.get("definition")),
            begin=_optional(given, "begin", "subscription record"),
            state=json_fields.member(RecordState, given, "state", "subscription record"),
            paused=json_fields.flag(given, "paused", "subscription record"),
            pause_reason=given.get("pause_reason") if isinstance(given.get("pause_reason"), str) else None,
            created=json_fields.moment(given, "created", "subscription record"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspension:
    """Why nothing is written to a queue, from which position on, and since when."""

    position: int
    reason: str
    at: datetime
    group: str | None = None
    """The group of dispatchers that does not understand the record of the subscription. Others that understand it are
    not concerned, and the group goes on by itself once it does. None: the queue refused, and somebody has to act."""

    def to_json(self) -> Json:
        """As it lies in the registry."""
        group = {} if self.group is None else {"group": self.group}
        return {"position": self.position, "reason": self.reason, "at": self.at.isoformat(), **group}

    @classmethod
    def from_json(cls, data: object) -> "Suspension":
        """Checked."""
        given = json_fields.mapping(data, "suspension")
        json_fields.only(given, ("position", "reason", "at", "group"), "suspension")
        return cls(
            position=json_fields.whole(given, "position", "suspension"),
            reason=json_fields.text(given, "reason", "suspension"),
            at=json_fields.moment(given, "at", "suspension"),
            group=None if given.get("group") is None else json_fields.text(given, "group", "suspension"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchState:
    """How far writing has come. `next` is the first position that the live dispatcher may write."""

    incarnation: str
    next: int
    suspended: Suspension | None = None

    def to_json(self) -> Json:
        """As it lies in the registry."""
        return {
            "incarnation": self.incarnation,
            "next": self.next,
            "suspended": None if self.suspended is None else self.suspended.to_json(),
        }

    @classmethod
    def from_json(cls, data: object) -> "DispatchState":
        """Checked."""
        given = DISPATCH_STATE.check(data)
        return cls(
            incarnation=json_fields.text(given, "incarnation", "dispatch state"),
            next=json_fields.whole(given, "next", "dispatch state"),
            suspended=None if given.get("suspended") is None else Suspension.from_json(given["suspended"]),
        )


class PrefillStatus(Enum):
    """How far a prefill is."""

    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillState:
    """A prefill that was asked for: as of which position, at which attempt, how many messages, and why it failed."""

    incarnation: str
    status: PrefillStatus
    position: int
    attempt: int = 1
    total: int | None = None
    """How many messages there will be, once that is known."""
    written: int = 0
    reason: str | None = None
    job: str | None = None
    """The job that fills the queue at present, or did so last."""

    def to_json(self) -> Json:
        """As it lies in the registry."""
        return {
            "incarnation": self.incarnation,
            "status": self.status.value,
            "position": self.position,
            "attempt": self.attempt,
            "total": self.total,
            "written": self.written,
            "reason": self.reason,
            "job": self.job,
        }

    @classmethod
    def from_json(cls, data: object) -> "PrefillState":
        """Checked."""
        given = PREFILL_STATE.check(data)
        return cls(
            incarnation=json_fields.text(given, "incarnation", "prefill state"),
            status=json_fields.member(PrefillStatus, given, "status", "prefill state"),
            position=json_fields.whole(given, "position", "prefill state"),
            attempt=json_fields.whole(given, "attempt", "prefill state"),
            total=_optional(given, "total", "prefill state"),
            written=json_fields.whole(given, "written", "prefill state"),
            reason=None if given.get("reason") is None else json_fields.text(given, "reason", "prefill state"),
            job=None if given.get("job") is None else json_fields.text(given, "job", "prefill state"),
        )


def _optional(data: dict[str, Any], name: str, what: str) -> int | None:
    return None if data.get(name) is None else json_fields.whole(data, name, what)

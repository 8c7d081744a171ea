"""Messages by which the parts steer each other: control events in `incoming`, and jobs on the queue `prefill`.

A control event is where a subscription begins or ends in the log: its position is the truth, the registry in KV only
the read model. A job asks the pipeline to fill a subscription's queue. Ids derive from what they are about, so that a
repetition is recognised.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any, ClassVar, Final, TypeAlias
from uuid import UUID, uuid5

from purveyor.model import json_fields
from purveyor.model.json_fields import Json
from purveyor.model.stored_record import Kind
from purveyor.model.subscription import RealmTopic, Subscription, read_topics

CONTROL_SUBJECT: Final = "incoming.control"
JOB_SUBJECT: Final = "prefill"
CONTROL_EVENT: Final = Kind("control event", ("control", "name", "incarnation", "definition"))
JOB: Final = Kind("job", ("kind", "name", "incarnation", "job", "position", "from", "to", "topics"))

Place: TypeAlias = int | datetime
"""A position, or a time at which an event was stored."""


class ControlKind(Enum):
    """What happened to a subscription."""

    ADDED = "subscription.added"
    DELETED = "subscription.deleted"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlEvent:
    """A subscription begins or ends here. `incarnation` tells it from others that had or will have its name."""

    kind: ControlKind
    name: str
    incarnation: str
    definition: Subscription | None = None
    """What was added; not for a deletion."""

    @property
    def msg_id(self) -> str:
        """The id of its message."""
        return f"{self.incarnation}:{self.kind.value.rpartition('.')[2]}"

    def to_json(self) -> Json:
        """As it lies in the queue."""
        given = {} if self.definition is None else {"definition": self.definition.to_json()}
        return {"control": self.kind.value, "name": self.name, "incarnation": self.incarnation, **given}

    @classmethod
    def from_json(cls, data: object) -> "ControlEvent":
        """Checked; InvalidInput names the field that is wrong, UnreadableRecord what a newer program added."""
        given = CONTROL_EVENT.check(data)
        kind = json_fields.member(ControlKind, given, "control", "control event")
        return cls(
            kind=kind,
            name=json_fields.text(given, "name", "control event"),
            incarnation=json_fields.text(given, "incarnation", "control event"),
            definition=Subscription.from_json(given.get("definition")) if kind is ControlKind.ADDED else None,
        )

    def encode(self) -> bytes:
        """The bytes of its message."""
        return CONTROL_EVENT.dump(self.to_json())

    @classmethod
    def decode(cls, data: bytes | str) -> "ControlEvent":
        """From the bytes of a message."""
        return cls.from_json(json_fields.parse(data, "control event"))


class JobKind(Enum):
    """What a job does."""

    PREFILL = "prefill"
    REPLAY = "replay"
    CATCH_UP = "catch-up"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What all jobs have. A job whose incarnation is no longer the subscription's has nothing to do."""

    kind: ClassVar[JobKind]
    name: str
    incarnation: str
    job: str
    """Its id; also the id of its message."""

    def to_json(self) -> Json:
        """As it lies in the queue."""
        return {"kind": self.kind.value, "name": self.name, "incarnation": self.incarnation, "job": self.job}

    def encode(self) -> bytes:
        """The bytes of its message."""
        return JOB.dump(self.to_json())


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillJob(_Job):
    """Write the state of all objects as of `position` to `<name>.prefill`."""

    kind = JobKind.PREFILL
    position: int

    def to_json(self) -> Json:
        """As it lies in the queue."""
        return {**_Job.to_json(self), "position": self.position}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayJob(_Job):
    """Write the events from one place to another again; None ends where the log ended when the job began.

    `topics` narrows what the subscription asks for; none given means all of it.
    """

    kind = JobKind.REPLAY
    from_: Place
    to: Place | None = None
    topics: tuple[RealmTopic, ...] = ()

    def to_json(self) -> Json:
        """As it lies in the queue."""
        return {
            **_Job.to_json(self),
            "from": _place_json(self.from_),
            "to": _place_json(self.to),
            "topics": [topic.to_json() for topic in self.topics],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CatchUpJob(_Job):
    """Write what was left out while the subscription was suspended."""

    kind = JobKind.CATCH_UP


Job: TypeAlias = PrefillJob | ReplayJob | CatchUpJob


def job_from_json(data: object) -> Job:
    """Checked; InvalidInput names the field that is wrong, UnreadableRecord what a newer program added."""
    given = JOB.check(data)
    same: dict[str, Any] = {name: json_fields.text(given, name, "job") for name in ("name", "incarnation", "job")}
    match json_fields.member(JobKind, given, "kind", "job"):
        case JobKind.PREFILL:
            return PrefillJob(**same, position=json_fields.whole(given, "position", "job"))
        case JobKind.REPLAY:
            return ReplayJob(
                **same,
                from_=_place(given, "from"),
                to=None if given.get("to") is None else _place(given, "to"),
                topics=read_topics(given, "topics"),
            )
        case JobKind.CATCH_UP:
            return CatchUpJob(**same)


def decode_job(data: bytes | str) -> Job:
    """From the bytes of a message."""
    return job_from_json(json_fields.parse(data, "job"))


def job_id(incarnation: str, kind: JobKind, number: int | str) -> str:
    """The id of a job: the same for the same subscription, kind and number (the attempt, say)."""
    return str(uuid5(UUID(incarnation), f"{kind.value}:{number}"))


def _place(data: Json, name: str) -> Place:
    if isinstance(data.get(name), str):
        return json_fields.moment(data, name, "job")
    return json_fields.whole(data, name, "job")


def _place_json(place: Place | None) -> int | str | None:
    return place.isoformat() if isinstance(place, datetime) else place

"""Messages between parts of Purveyor: control events in `incoming`, and jobs on the queue `prefill`.

A control event marks where a subscription begins, changes what it selects, or ends in the log: its position is
authoritative, the registry is the read model. A job asks the pipeline to fill the queue of a subscription. Ids derive
from the content, so that the server recognises a repetition.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any, ClassVar, Final, TypeAlias
from uuid import UUID, uuid5

from purveyor.model import json_fields
from purveyor.model.json_fields import Json, Kind
from purveyor.model.registration import PendingChange
from purveyor.model.subscription import RealmTopic, Subscription, read_topics

CONTROL_SUBJECT: Final = "incoming.control"
JOB_SUBJECT: Final = "prefill"
CONTROL_EVENT: Final = Kind(
    "control event", ("control", "name", "incarnation", "definition", "change", "selection", "prefill", "voids")
)
JOB: Final = Kind("job", ("kind", "name", "incarnation", "job", "position", "from", "to", "topics"))

ReplayPoint: TypeAlias = int | datetime
"""A position, or the time at which an event was stored."""


class ControlKind(Enum):
    """The kinds of control events of a subscription."""

    ADDED = "subscription.added"
    CHANGED = "subscription.changed"
    DELETED = "subscription.deleted"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlEvent:
    """The begin, a change or the end of a subscription. `incarnation` distinguishes it from others of its name."""

    kind: ControlKind
    name: str
    incarnation: str
    definition: Subscription | None = None
    """The added definition; None for a change or a deletion."""
    change: PendingChange | None = None
    """The change; None for an addition or a deletion."""

    @property
    def msg_id(self) -> str:
        """The id of its message."""
        what = f"{self.incarnation}:{self.kind.value.rpartition('.')[2]}"
        return what if self.change is None else f"{what}:{self.change.change}"

    def to_json(self) -> Json:
        """Return the stored fields."""
        given = {} if self.definition is None else {"definition": self.definition.to_json()}
        given |= {} if self.change is None else self.change.to_json()
        return {"control": self.kind.value, "name": self.name, "incarnation": self.incarnation, **given}

    @classmethod
    def from_json(cls, data: object) -> "ControlEvent":
        """Build it from checked fields; InvalidInput names the wrong one, UnreadableRecord an unknown one."""
        given = CONTROL_EVENT.check(data)
        kind = json_fields.member(ControlKind, given, "control", "control event")
        return cls(
            kind=kind,
            name=json_fields.text(given, "name", "control event"),
            incarnation=json_fields.text(given, "incarnation", "control event"),
            definition=Subscription.from_json(given.get("definition")) if kind is ControlKind.ADDED else None,
            change=PendingChange.from_event(given) if kind is ControlKind.CHANGED else None,
        )

    def encode(self) -> bytes:
        """Encode the body of its message."""
        return CONTROL_EVENT.dump(self.to_json())

    @classmethod
    def decode(cls, data: bytes | str) -> "ControlEvent":
        """Decode the body of a message."""
        return cls.from_json(json_fields.parse(data, "control event"))


class JobKind(Enum):
    """The kinds of jobs."""

    PREFILL = "prefill"
    REPLAY = "replay"
    CATCH_UP = "catch-up"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """The fields of all jobs. A job of an earlier incarnation of its subscription does nothing."""

    kind: ClassVar[JobKind]
    name: str
    incarnation: str
    job: str
    """Its id; also the id of its message."""

    def to_json(self) -> Json:
        """Return the stored fields."""
        return {"kind": self.kind.value, "name": self.name, "incarnation": self.incarnation, "job": self.job}

    def encode(self) -> bytes:
        """Encode the body of its message."""
        return JOB.dump(self.to_json())


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillJob(_Job):
    """Write the state of all objects as of `position` to `<name>.prefill`."""

    kind = JobKind.PREFILL
    position: int

    def to_json(self) -> Json:
        """Return the stored fields."""
        return {**_Job.to_json(self), "position": self.position}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayJob(_Job):
    """Write the events of a range again; without `to` it ends where the log ended when the job began.

    `topics` selects some topics of the subscription; empty means all.
    """

    kind = JobKind.REPLAY
    from_: ReplayPoint
    to: ReplayPoint | None = None
    topics: tuple[RealmTopic, ...] = ()

    def to_json(self) -> Json:
        """Return the stored fields."""
        return {
            **_Job.to_json(self),
            "from": _write_point(self.from_),
            "to": _write_point(self.to),
            "topics": [topic.to_json() for topic in self.topics],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CatchUpJob(_Job):
    """Write the events that were left out while the subscription was suspended."""

    kind = JobKind.CATCH_UP


Job: TypeAlias = PrefillJob | ReplayJob | CatchUpJob


def job_from_json(data: object) -> Job:
    """Build it from checked fields; InvalidInput names the wrong one, UnreadableRecord an unknown one."""
    given = JOB.check(data)
    common: dict[str, Any] = {name: json_fields.text(given, name, "job") for name in ("name", "incarnation", "job")}
    match json_fields.member(JobKind, given, "kind", "job"):
        case JobKind.PREFILL:
            return PrefillJob(**common, position=json_fields.whole(given, "position", "job"))
        case JobKind.REPLAY:
            return ReplayJob(
                **common,
                from_=_read_point(given, "from"),
                to=None if given.get("to") is None else _read_point(given, "to"),
                topics=read_topics(given, "topics"),
            )
        case JobKind.CATCH_UP:
            return CatchUpJob(**common)


def decode_job(data: bytes | str) -> Job:
    """Decode the body of a message."""
    return job_from_json(json_fields.parse(data, "job"))


def job_id(incarnation: str, kind: JobKind, number: int | str) -> str:
    """Return the id of a job: the same for the same subscription, kind and number (for example the attempt).

    A replay has a random id instead, because each request for one is another job.
    """
    return str(uuid5(UUID(incarnation), f"{kind.value}:{number}"))


def _read_point(data: Json, name: str) -> ReplayPoint:
    if isinstance(data.get(name), str):
        return json_fields.moment(data, name, "job")
    return json_fields.whole(data, name, "job")


def _write_point(point: ReplayPoint | None) -> int | str | None:
    return point.isoformat() if isinstance(point, datetime) else point

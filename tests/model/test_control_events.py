"""Control events and jobs survive the queue, and a repetition has the same id."""

import uuid
from datetime import UTC, datetime
from typing import Any

import pytest

from purveyor.model.control_events import (
    CatchUpJob,
    ControlEvent,
    ControlKind,
    Job,
    JobKind,
    PrefillJob,
    ReplayJob,
    decode_job,
    job_id,
)
from purveyor.model.errors import InvalidInput
from purveyor.model.registration import DispatchState, PrefillState, PrefillStatus, Record, RecordState, Suspension
from purveyor.model.subscription import RealmTopic, Subscription

INCARNATION = str(uuid.UUID(int=1))
OX = Subscription(name="ox", realms_topics=(RealmTopic("udm", "users/user"),))
WHEN = datetime(2026, 11, 15, 12, tzinfo=UTC)
ABOUT: dict[str, Any] = {"name": "ox", "incarnation": INCARNATION, "job": "j-1"}


def test_a_control_event_is_the_same_after_the_way_through_the_queue() -> None:
    added = ControlEvent(kind=ControlKind.ADDED, name="ox", incarnation=INCARNATION, definition=OX)
    deleted = ControlEvent(kind=ControlKind.DELETED, name="ox", incarnation=INCARNATION)
    assert ControlEvent.decode(added.encode()) == added
    assert ControlEvent.decode(deleted.encode()) == deleted
    assert deleted.to_json() == {"control": "subscription.deleted", "name": "ox", "incarnation": INCARNATION}
    assert (added.msg_id, deleted.msg_id) == (f"{INCARNATION}:added", f"{INCARNATION}:deleted")


@pytest.mark.parametrize(
    "job",
    [
        PrefillJob(**ABOUT, position=7),
        ReplayJob(**ABOUT, from_=3),
        ReplayJob(**ABOUT, from_=WHEN, to=WHEN, topics=(RealmTopic("udm", "a.*"),)),
        ReplayJob(**ABOUT, from_=3, to=9),
        CatchUpJob(**ABOUT),
    ],
    ids=lambda job: job.kind.value,
)
def test_a_job_is_the_same_after_the_way_through_the_queue(job: Job) -> None:
    assert decode_job(job.encode()) == job
    assert job.to_json()["kind"] == job.kind.value


@pytest.mark.parametrize(
    "text",
    [
        b"no",
        b'{"kind": "prefill"}',
        b'{"kind": "dance", "name": "ox", "incarnation": "i", "job": "j"}',
        b'{"kind": "prefill", "name": "ox", "incarnation": "i", "job": "j", "position": "7"}',
        b'{"kind": "replay", "name": "ox", "incarnation": "i", "job": "j", "from": "monday"}',
        b'{"kind": "replay", "name": "ox", "incarnation": "i", "job": "j", "from": 1, "topics": 7}',
    ],
)
def test_a_broken_job_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidInput):
        decode_job(text)


def test_the_id_of_a_job_is_that_of_its_repetition_alone() -> None:
    same = job_id(INCARNATION, JobKind.PREFILL, 1)
    assert same == job_id(INCARNATION, JobKind.PREFILL, 1)
    others = {
        job_id(INCARNATION, JobKind.PREFILL, 2),
        job_id(INCARNATION, JobKind.CATCH_UP, 1),
        job_id(str(uuid.UUID(int=2)), JobKind.PREFILL, 1),
    }
    assert len(others | {same}) == 4


def test_what_the_registry_holds_is_the_same_after_the_way_through_json() -> None:
    record = Record(
        incarnation=INCARNATION, definition=OX, begin=4, state=RecordState.ACTIVE, paused=True, created=WHEN
    )
    fresh = Record(incarnation=INCARNATION, definition=OX, created=WHEN)
    state = DispatchState(incarnation=INCARNATION, next=9)
    suspended = DispatchState(incarnation=INCARNATION, next=9, suspended=Suspension(position=9, reason="full", at=WHEN))
    prefill = PrefillState(
        incarnation=INCARNATION, status=PrefillStatus.FAILED, position=4, attempt=2, total=9, written=3, reason="why"
    )
    for value in (record, fresh, state, suspended, prefill):
        assert type(value).from_json(value.to_json()) == value

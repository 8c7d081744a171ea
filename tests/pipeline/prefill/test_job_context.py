from dataclasses import replace
from datetime import UTC, datetime

import pytest

from purveyor.jetstream.bulk import Refusal, RefusalKind
from purveyor.model.control_events import PrefillJob, ReplayJob
from purveyor.model.errors import InvalidInput
from purveyor.model.registration import (
    DispatchState,
    PrefillState,
    PrefillStatus,
    Record,
    RecordState,
    Suspension,
)
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.pipeline.archive.layout import PositionRange
from purveyor.pipeline.prefill.job_context import NotStarted, is_gone, start_prefill, start_replay
from purveyor.pipeline.prefill.jobs import ROUND_POSITIONS, after_round, next_round
from purveyor.pipeline.prefill.worker import after_failure
from purveyor.queues.registry import Registered

RECORD = Record(
    incarnation="i",
    definition=Subscription(name="ox", realms_topics=(RealmTopic("udm", "users/user"),)),
    begin=7,
    state=RecordState.ACTIVE,
    created=datetime.now(UTC),
)
PREFILL = PrefillJob(name="ox", incarnation="i", job="p1", position=7)
REPLAY = ReplayJob(name="ox", incarnation="i", job="r1", from_=1)


def with_state(status: PrefillStatus | None, attempt: int = 3, job: str | None = None) -> Registered:
    state = status and PrefillState(incarnation="i", status=status, position=7, attempt=attempt, job=job)
    return Registered(record=RECORD, revision=1, prefill=state)


@pytest.mark.parametrize(
    ("status", "attempt"),
    [(None, 1), (PrefillStatus.PENDING, 3), (PrefillStatus.RUNNING, 4), (PrefillStatus.FAILED, 4)],
)
def test_each_run_of_a_prefill_has_a_number_of_its_own(status: PrefillStatus | None, attempt: int) -> None:
    state = start_prefill(with_state(status), PREFILL)

    assert isinstance(state, PrefillState)
    assert (state.status, state.attempt, state.position, state.job) == (PrefillStatus.RUNNING, attempt, 7, "p1")


def test_a_prefill_that_is_done_or_was_replaced_is_not_done_again() -> None:
    assert start_prefill(with_state(PrefillStatus.DONE), PREFILL) is NotStarted.NOTHING
    assert start_prefill(with_state(PrefillStatus.RUNNING, job="p2"), PREFILL) is NotStarted.NOTHING


def test_a_replay_keeps_its_run_through_all_attempts_and_the_next_replay_gets_another() -> None:
    state = start_replay(with_state(PrefillStatus.DONE, job="p1"), REPLAY)
    assert isinstance(state, PrefillState)
    assert (state.attempt, state.job) == (4, "r1")

    assert start_replay(with_state(PrefillStatus.RUNNING, 4, "r1"), REPLAY) == replace(state)
    assert start_replay(with_state(PrefillStatus.RUNNING, 4, "r0"), REPLAY) is NotStarted.LATER
    assert start_replay(with_state(PrefillStatus.PENDING), REPLAY) is NotStarted.LATER
    assert start_replay(with_state(PrefillStatus.DONE, 4, "r1"), REPLAY) is NotStarted.NOTHING


def test_a_replay_does_not_go_before_a_prefill_that_failed() -> None:
    with pytest.raises(InvalidInput, match="prefill of 'ox' failed"):
        start_replay(with_state(PrefillStatus.FAILED), REPLAY)


def test_a_subscription_that_was_added_again_is_another() -> None:
    assert not is_gone(with_state(None), PREFILL)
    assert is_gone(with_state(None), replace(PREFILL, incarnation="j"))
    deleting = Registered(record=replace(RECORD, state=RecordState.DELETING), revision=1)
    assert is_gone(deleting, PREFILL)


def test_a_replay_that_failed_does_not_keep_live_events_back() -> None:
    failed = after_failure(with_state(PrefillStatus.RUNNING, job="r1"), REPLAY, "full")

    assert failed is not None
    assert (failed.status, failed.reason) == (PrefillStatus.DONE, "replay failed: full")
    assert after_failure(with_state(PrefillStatus.RUNNING, job="p1"), REPLAY, "full") is None
    assert after_failure(with_state(PrefillStatus.DONE), PREFILL, "full") is None


def test_rounds_end_where_the_dispatcher_takes_over() -> None:
    state = DispatchState(incarnation="i", next=10)
    suspended = replace(state, suspended=Suspension(position=10, reason="full", at=datetime.now(UTC)))

    assert next_round(state, 9) is None
    assert next_round(state, 10_000) is None
    assert next_round(suspended, 10_000) == PositionRange(10, 10_000)
    assert next_round(suspended, 9) == PositionRange(10, 9)
    assert next_round(state, 10**9) == PositionRange(10, 10 + ROUND_POSITIONS - 1)


def test_a_round_moves_the_position_and_a_refusal_names_the_new_reason() -> None:
    suspended = Suspension(position=10, reason="full", at=datetime.now(UTC))
    state = DispatchState(incarnation="i", next=10, suspended=suspended)

    assert after_round(state, PositionRange(10, 99), None) == DispatchState(incarnation="i", next=100)
    refusal_error = after_round(state, PositionRange(10, 99), Refusal(42, "no room", 10077, RefusalKind.FULL))
    assert refusal_error.next == 42
    assert refusal_error.suspended is not None
    assert (refusal_error.suspended.position, refusal_error.suspended.reason) == (42, "full: no room")

"""When the prefill of new topics begins, and what of it is left to do."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from purveyor.model.control_events import JobKind, job_id
from purveyor.model.registration import PastSelection, PrefillState, PrefillStatus, Record, RecordState
from purveyor.model.selection import Selection
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.pipeline.dispatch.topic_prefill import is_first, next_piece, next_state

INCARNATION = "00000000-0000-0000-0000-000000000001"
OX = Subscription(name="ox", realms_topics=(RealmTopic("udm", "users/user"),))
PENDING, RUNNING, DONE, FAILED = (
    PrefillStatus.PENDING,
    PrefillStatus.RUNNING,
    PrefillStatus.DONE,
    PrefillStatus.FAILED,
)
PREFILL_JOB = job_id(INCARNATION, JobKind.PREFILL, 1)
REPLAY_JOB = "3f9a3c6e-5d0b-4c58-9d0e-0a4c1d3c1f11"


def record(*changes: tuple[int, bool]) -> Record:
    """A subscription that begins at 3, with changes at positions, prefilled or not."""
    past = tuple(
        PastSelection(until=at, change=f"c{at}", selection=Selection.of(OX), prefill=prefill) for at, prefill in changes
    )
    return Record(
        incarnation=INCARNATION,
        definition=OX,
        begin=3,
        state=RecordState.ACTIVE,
        created=datetime(2026, 1, 1, tzinfo=UTC),
        past=past,
    )


def state(status: PrefillStatus, position: int = 3, **more: object) -> PrefillState:
    made = PrefillState(incarnation=INCARNATION, status=status, position=position, attempt=2)
    return replace(made, **more)  # type: ignore[arg-type]


TWO = record((10, True), (15, False), (20, True))


@pytest.mark.parametrize(
    ("before", "last", "after"),
    [
        (None, 9, None),
        (None, 10, state(PENDING, 10, through=10, attempt=1)),
        (None, 99, state(PENDING, 10, through=20, attempt=1)),
        (state(DONE), 11, state(PENDING, 10, through=10, attempt=3)),
        (state(DONE, 10, through=10), 19, None),
        (state(DONE, 10, through=10), 20, state(PENDING, 20, through=20, attempt=3)),
        (state(DONE, 10, through=20), 99, None),
        (state(PENDING), 11, state(PENDING, through=10)),
        (state(FAILED, reason="broken"), 11, state(FAILED, reason="broken", through=10)),
        (state(RUNNING, job=PREFILL_JOB), 11, state(PENDING, through=10, attempt=3)),
        (state(RUNNING, 10, through=10, job=PREFILL_JOB), 21, state(PENDING, 10, through=20)),
        (state(RUNNING, job=REPLAY_JOB, written=7), 11, state(PENDING, 10, through=10, attempt=3)),
        (state(DONE, job=REPLAY_JOB, written=7), 11, state(PENDING, 10, through=10, attempt=3)),
        (state(DONE, 10, through=10, job=REPLAY_JOB), 11, None),
    ],
)
def test_a_prefill_of_new_topics_begins_before_the_position_of_their_change_is_done(
    before: PrefillState | None, last: int, after: PrefillState | None
) -> None:
    assert next_state(TWO, before, last) == after
    if after is not None:
        assert next_state(TWO, after, last) is None, "it begins once"


def test_the_pieces_come_in_the_order_of_their_positions() -> None:
    begun = state(RUNNING, through=20)
    assert is_first(TWO, begun)
    assert next_piece(TWO, begun) == 10
    assert next_piece(TWO, replace(begun, position=10)) == 20
    assert next_piece(TWO, replace(begun, position=20)) is None
    assert next_piece(TWO, replace(begun, through=None)) is None
    assert not is_first(TWO, replace(begun, position=10))


def test_a_subscription_without_changes_needs_none() -> None:
    assert next_state(record(), state(DONE), 10**6) is None
    assert next_state(record((10, False)), state(DONE), 10**6) is None

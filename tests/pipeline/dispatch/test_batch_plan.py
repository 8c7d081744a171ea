"""The targets of a batch: no queue is written behind a gap."""

from datetime import UTC, datetime

from purveyor.model.registration import DispatchState, Record, RecordState, Suspension
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.pipeline.archive.layout import PositionRange
from purveyor.pipeline.dispatch.batch_plan import NOTE_INTERVAL_POSITIONS, SMALL_GAP_POSITIONS, is_note_due, plan_batch
from purveyor.queues.registry import Registered, Snapshot

NOW = datetime(2026, 1, 1, tzinfo=UTC)
BATCH = PositionRange(100_001, 100_100)


def registered(
    *,
    begin: int | None = 10,
    state: RecordState = RecordState.ACTIVE,
    next_: int | None = None,
    suspended: bool = False,
) -> Registered:
    definition = Subscription(name="ox", realms_topics=(RealmTopic("udm", "users/user"),))
    record = Record(incarnation="i", definition=definition, begin=begin, state=state, created=NOW)
    why = Suspension(position=next_ or 1, reason="full", at=NOW) if suspended else None
    dispatch = None if next_ is None else DispatchState(incarnation="i", next=next_, suspended=why)
    return Registered(record=record, revision=1, dispatch=dispatch)


def called(found: Registered, written_up_to: int | None = None) -> tuple[list[int], list[int]]:
    """The floors of those who take part, and of those who are behind."""
    plan = plan_batch(
        Snapshot(subscriptions={"ox": found}), {} if written_up_to is None else {"i": written_up_to}, BATCH
    )
    return [target.floor for target in plan.targets], [target.floor for target in plan.behind]


def test_one_that_was_never_left_out_takes_part() -> None:
    assert called(registered()) == ([0], [])


def test_one_that_begins_within_the_batch_gets_what_follows() -> None:
    assert called(registered(begin=100_050)) == ([100_050], [])


def test_one_that_begins_later_or_nowhere_or_ends_or_is_suspended_stays_out() -> None:
    for found in (
        registered(begin=None),
        registered(begin=BATCH.last),
        registered(state=RecordState.DELETING),
        registered(next_=50, suspended=True),
    ):
        assert called(found) == ([], [])


def test_a_small_gap_is_filled_and_a_large_one_left_to_the_catch_up() -> None:
    assert called(registered(next_=100_001)) == ([0], [])
    assert called(registered(next_=100_000)) == ([], [99_999])
    assert called(registered(next_=100_001 - SMALL_GAP_POSITIONS)) == ([], [100_000 - SMALL_GAP_POSITIONS])
    assert called(registered(next_=100_000 - SMALL_GAP_POSITIONS)) == ([], [])


def test_what_this_dispatcher_wrote_itself_is_no_gap() -> None:
    assert called(registered(next_=50), written_up_to=100_000) == ([0], [])


def test_one_that_this_dispatcher_left_out_is_behind_though_nothing_is_noted() -> None:
    assert called(registered(), written_up_to=99_000) == ([], [99_000])


def test_what_another_group_wrote_further_on_is_not_for_it() -> None:
    assert called(registered(next_=100_051)) == ([100_050], [])
    assert called(registered(next_=200_000), written_up_to=100_000) == ([199_999], [])


def test_the_noted_position_follows_only_for_one_that_has_a_note() -> None:
    assert not is_note_due(registered(), 10**9, "mine")
    assert not is_note_due(registered(next_=100), 100, "mine")
    assert is_note_due(registered(next_=100), 100 + NOTE_INTERVAL_POSITIONS, "mine")

"""A subscription begins in the log, once, despite crashes; after its deletion the name can be used again."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from purveyor.delivery.pull import open_pull
from purveyor.delivery.subscription_status import backlogs, read_status
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.address import Address
from purveyor.jetstream.config import StreamConfig
from purveyor.jetstream.headers import POSITION
from purveyor.jetstream.key_value import BucketConfig
from purveyor.model.control_events import JobKind, job_id
from purveyor.model.errors import (
    AlreadyExists,
    InvalidInput,
    InvalidName,
    NoAnswer,
    OutcomeUnknown,
    PublishRefused,
    PurveyorError,
    Refused,
    UnknownStream,
    UnknownSubscription,
)
from purveyor.model.registration import DispatchState, PrefillState, PrefillStatus, RecordState, Suspension
from purveyor.model.subscription import Filter, RealmTopic
from purveyor.queues.catalogue import subscription_queue
from purveyor.queues.client import Queues, connect
from purveyor.queues.registry import ACKNOWLEDGED, SUBSCRIPTIONS
from purveyor.queues.subscription_queues import owner_of
from purveyor.queues.sync_client import read_subscriptions, restore_queue, settle_begin
from tests.support.delivery import bodies, definition, stored
from tests.support.forgetting import forget_ids

INCOMING, PREFILL, OX = "stream:incoming", "stream:prefill", "stream:ox"


async def test_a_subscription_begins_at_its_control_event(queues: Queues, subscriptions: Subscriptions) -> None:
    record, created = await subscriptions.add(definition())
    assert (created, record.state, record.begin, record.paused) == (True, RecordState.ACTIVE, 1, False)
    (control,) = await stored(queues, INCOMING)
    assert (control.subject, control.sequence) == ("incoming.control", record.begin)
    assert control.headers["Nats-Msg-Id"] == (f"{record.incarnation}:added",)
    assert await bodies(queues, INCOMING) == [
        {
            "version": 1,
            "control": "subscription.added",
            "name": "ox",
            "incarnation": record.incarnation,
            "definition": definition().to_json(),
        }
    ]
    info = await queues.streams.info(OX)
    assert (owner_of(info), set(info.config.subjects)) == (record.incarnation, {"ox.main", "ox.prefill", "ox.retry"})
    found = await subscriptions.get("ox")
    assert (found.record, found.prefill, found.next) == (record, None, 2)
    assert await bodies(queues, PREFILL) == []


async def test_events_accepted_before_the_first_dispatcher_run_are_kept(
    queues: Queues, subscriptions: Subscriptions
) -> None:
    await subscriptions.add(definition())
    receipt = await queues.publish("incoming", b"event")
    assert (await queues.streams.get(INCOMING, receipt.sequence)).data == b"event"
    waiting = {info.name: info.num_pending for info in await queues.consumers.list(INCOMING)}
    assert (waiting["dispatcher"], waiting["archive"]) == (2, 2)


async def test_the_prefill_is_pending_and_its_job_is_queued_before_any_delivery(
    queues: Queues, subscriptions: Subscriptions
) -> None:
    record, _ = await subscriptions.add(definition(prefill=True))
    found = await subscriptions.get("ox")
    assert found.prefill == PrefillState(incarnation=record.incarnation, status=PrefillStatus.PENDING, position=1)
    assert await bodies(queues, PREFILL) == [
        {
            "version": 1,
            "kind": "prefill",
            "name": "ox",
            "incarnation": record.incarnation,
            "job": job_id(record.incarnation, JobKind.PREFILL, 1),
            "position": 1,
        }
    ]


async def test_adding_the_same_definition_again_is_accepted_and_another_is_a_conflict(
    queues: Queues, subscriptions: Subscriptions
) -> None:
    first, _ = await subscriptions.add(definition(prefill=True))
    assert await subscriptions.add(definition(prefill=True)) == (first, False)
    with pytest.raises(AlreadyExists, match="other parameters") as refused:
        await subscriptions.add(definition())
    assert refused.value.code == 409
    assert len(await stored(queues, INCOMING)) == len(await stored(queues, PREFILL)) == 1


async def test_concurrent_adds_of_one_definition_return_one_subscription(address: Address, queues: Queues) -> None:
    records = await asyncio.gather(*(Subscriptions(queues).add(definition(prefill=True)) for _ in range(8)))
    assert len({record.incarnation for record, _ in records}) == 1
    assert len(await stored(queues, INCOMING)) == len(await stored(queues, PREFILL)) == 1
    assert read_subscriptions(address).subscriptions["ox"].record.state is RecordState.ACTIVE


@pytest.mark.parametrize("name", ["incoming", "prefill", "ldif", "dead-letters", "stage-orders"])
async def test_the_name_of_an_internal_queue_is_refused_before_anything_is_made(
    queues: Queues, subscriptions: Subscriptions, name: str
) -> None:
    with pytest.raises(InvalidName, match="reserved"):
        await subscriptions.add(definition(name))
    assert await queues.streams.names() == []


class Crash(BaseException):
    """The process dies here."""


def crash_at(queues: Queues, number: int, *, after: bool) -> None:
    """Die at the n-th request to the server, before it is sent or after the server has executed it."""
    count = 0

    def crashing(say: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def say_or_crash(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            now = count == number
            if now and not after:
                raise Crash
            try:
                return await say(*args, **kwargs)
            finally:
                if now:
                    raise Crash

        return say_or_crash

    for service, names in (
        (queues._publisher, ("publish",)),
        (queues.streams, ("add", "update", "remove")),
        (queues.consumers, ("add",)),
    ):
        for name in names:
            setattr(service, name, crashing(getattr(service, name)))


async def crash_everywhere(
    address: Address, work: Callable[[Subscriptions], Awaitable[object]], check: Callable[[], Awaitable[None]]
) -> int:
    """Crash at each request to the server in turn; after each crash a repetition must repair everything."""
    for after in (False, True):
        for number in range(1, 100):
            async with connect(address) as doomed:
                crash_at(doomed, number, after=after)
                try:
                    await work(Subscriptions(doomed))
                except Crash:
                    await check()
                    continue
            break
        await check()
    return number


async def test_adding_again_repairs_a_crash_anywhere(
    address: Address, queues: Queues, subscriptions: Subscriptions
) -> None:
    async def check() -> None:
        record, _ = await subscriptions.add(definition(prefill=True))
        assert record.state is RecordState.ACTIVE
        assert record.begin is not None
        controls = [message for message in await stored(queues, INCOMING) if record.incarnation in str(message.headers)]
        assert [control.sequence for control in controls] == [record.begin]
        found = await subscriptions.get("ox")
        assert found.prefill is not None
        assert (found.prefill.status, found.prefill.position) == (PrefillStatus.PENDING, record.begin)
        jobs = [job for job in await bodies(queues, PREFILL) if job["incarnation"] == record.incarnation]
        assert [job["position"] for job in jobs] == [record.begin]
        assert owner_of(await queues.streams.info(OX)) == record.incarnation
        await subscriptions.delete("ox")

    words = await crash_everywhere(address, lambda doomed: doomed.add(definition(prefill=True)), check)
    assert words > 6  # record, queue, control event, begin, prefill, job, active


async def test_deleting_again_repairs_a_crash_anywhere(
    address: Address, queues: Queues, subscriptions: Subscriptions
) -> None:
    await subscriptions.add(definition(prefill=True))

    async def check() -> None:
        record, created = await subscriptions.add(definition(prefill=True))  # completes the deletion as well
        found = await subscriptions.get("ox")
        assert found.prefill is not None
        assert found.prefill.position == record.begin
        assert owner_of(await queues.streams.info(OX)) == record.incarnation
        if created:
            deleted = [body for body in await bodies(queues, INCOMING) if body["control"] == "subscription.deleted"]
            assert deleted

    words = await crash_everywhere(address, lambda doomed: doomed.delete("ox"), check)
    assert words > 4  # deleting, control event, queue, prefill, record


async def test_a_begin_position_that_the_dispatcher_stored_first_stays(
    address: Address, queues: Queues, subscriptions: Subscriptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect(address) as doomed:
        publish = doomed.publish

        async def publish_and_crash(*args: Any, **kwargs: Any) -> None:
            await publish(*args, **kwargs)
            raise Crash

        monkeypatch.setattr(doomed, "publish", publish_and_crash)
        with pytest.raises(Crash):
            await Subscriptions(doomed).add(definition(prefill=True))
    found = read_subscriptions(address).subscriptions["ox"]
    (control,) = await stored(queues, INCOMING)
    assert (found.record.begin, found.record.state) == (None, RecordState.REGISTERING)
    settle_begin(address, found, control.sequence)
    record, created = await subscriptions.add(definition(prefill=True))
    assert (created, record.incarnation, record.begin) == (True, found.incarnation, control.sequence)
    assert len(await stored(queues, INCOMING)) == 1


async def test_a_name_used_again_is_another_subscription_with_a_queue_and_a_prefill_of_its_own(
    queues: Queues, subscriptions: Subscriptions
) -> None:
    old, _ = await subscriptions.add(definition(prefill=True))
    await queues.publish("ox.main", b"left over")
    found = await subscriptions.get("ox")
    assert found.prefill is not None
    registry = await subscriptions.registry()
    done = PrefillState(incarnation=old.incarnation, status=PrefillStatus.DONE, position=1)
    await registry.put_prefill("ox", done, found.prefill_revision)

    await subscriptions.delete("ox")
    with pytest.raises(UnknownSubscription):
        await subscriptions.get("ox")
    with pytest.raises(UnknownSubscription):
        await subscriptions.delete("ox")
    with pytest.raises(UnknownStream):
        await queues.streams.info(OX)

    new, created = await subscriptions.add(definition(prefill=True))
    again = await subscriptions.get("ox")
    assert created
    assert new.incarnation != old.incarnation
    assert again.prefill == PrefillState(incarnation=new.incarnation, status=PrefillStatus.PENDING, position=3)
    assert (await queues.streams.info(OX)).state.messages == 0
    assert [body["control"].rpartition(".")[2] for body in await bodies(queues, INCOMING)] == [
        "added", "deleted", "added"
    ]  # fmt: skip
    assert len({job["job"] for job in await bodies(queues, PREFILL)}) == 2


async def test_a_queue_left_behind_by_a_deleted_subscription_is_not_used_again(
    address: Address, queues: Queues, subscriptions: Subscriptions
) -> None:
    old, _ = await subscriptions.add(definition())
    await subscriptions.delete("ox")
    restore_queue(address, "ox", old.incarnation)  # a writer that did not know about the deletion
    restore_queue(address, "ox", old.incarnation)
    left = await queues.publish("ox.main", b"left over")
    new, _ = await subscriptions.add(definition())
    info = await queues.streams.info(OX)
    assert (owner_of(info), info.state.messages) == (new.incarnation, 0)
    assert (await queues.publish("ox.main", b"new")).sequence > left.sequence + 1  # a late ack of it has no effect


async def test_sequences_of_a_name_are_never_used_twice(
    address: Address, queues: Queues, subscriptions: Subscriptions
) -> None:
    record, _ = await subscriptions.add(definition())
    seen = [(await queues.publish("ox.main", b"1")).sequence]
    async with open_pull(queues) as pull:
        assert await pull.next("ox", pop=True) is not None
        await queues.streams.remove(OX)  # an operator removes it, and the next writer creates it again
        restore_queue(address, "ox", record.incarnation)
        seen.append((await queues.publish("ox.main", b"2")).sequence)
        message = await pull.next("ox", timeout=60)
        assert message is not None
        assert message.data == b"2"  # it does not count as acknowledged
    for step in ("with a message", "without any"):
        await subscriptions.delete("ox")
        await subscriptions.add(definition())
        info = await queues.streams.info(OX)
        assert info.state.last_seq > seen[-1], step  # the next message gets a sequence that was never used
        seen.append(info.state.last_seq)
    assert seen == sorted(set(seen))


async def test_a_stream_without_an_owner_is_taken_over_only_when_it_is_empty(
    queues: Queues, subscriptions: Subscriptions
) -> None:
    for name in ("ox", "full"):
        await queues.streams.add(StreamConfig(name=f"stream:{name}", subjects=subscription_queue(name).subjects))
    await queues.publish("full.main", b"somebody's")
    record, _ = await subscriptions.add(definition())
    info = await queues.streams.info(OX)
    assert (owner_of(info), info.config.allow_atomic) == (record.incarnation, True)
    with pytest.raises(AlreadyExists, match="belongs to no subscription"):
        await subscriptions.add(definition("full"))
    assert (await queues.streams.info("stream:full")).state.messages == 1


async def test_pause_and_resume_are_stored_for_delivery(queues: Queues, subscriptions: Subscriptions) -> None:
    await subscriptions.add(definition())
    assert (await subscriptions.pause("ox")).paused
    assert (await subscriptions.pause("ox")).paused
    assert (await subscriptions.get("ox")).record.paused
    assert not (await subscriptions.resume("ox")).paused
    assert await bodies(queues, PREFILL) == []
    with pytest.raises(UnknownSubscription, match="nobody"):
        await subscriptions.pause("nobody")


async def test_resuming_a_suspended_subscription_requests_one_catch_up(
    queues: Queues, subscriptions: Subscriptions
) -> None:
    record, _ = await subscriptions.add(definition())
    registry = await subscriptions.registry()
    full = Suspension(position=2, reason="full", at=datetime(2026, 11, 15, tzinfo=UTC))
    state = DispatchState(incarnation=record.incarnation, next=2, suspended=full)
    revision = await registry.put_dispatch("ox", state, 0)
    await subscriptions.resume("ox")
    await subscriptions.resume("ox")
    (job,) = await bodies(queues, PREFILL)
    assert (job["kind"], job["name"], job["incarnation"]) == ("catch-up", "ox", record.incarnation)
    later = Suspension(position=2, reason="full again", at=full.at + timedelta(seconds=1))
    again = DispatchState(incarnation=record.incarnation, next=2, suspended=later)
    await registry.put_dispatch("ox", again, revision)
    await subscriptions.resume("ox")
    assert len(await bodies(queues, PREFILL)) == 2


async def test_a_failed_prefill_is_repeated_on_request(queues: Queues, subscriptions: Subscriptions) -> None:
    record, _ = await subscriptions.add(definition(prefill=True))
    assert (await subscriptions.request_prefill("ox")).attempt == 1  # pending: the same job again
    assert len(await bodies(queues, PREFILL)) == 1
    registry = await subscriptions.registry()
    failed = PrefillState(
        incarnation=record.incarnation, status=PrefillStatus.FAILED, position=1, written=3, reason="no archive"
    )
    await registry.put_prefill("ox", failed, (await subscriptions.get("ox")).prefill_revision)
    state = await subscriptions.request_prefill("ox")
    assert state == PrefillState(incarnation=record.incarnation, status=PrefillStatus.PENDING, position=1, attempt=2)
    found = await subscriptions.get("ox")
    assert found.prefill == state
    assert [job["job"] for job in await bodies(queues, PREFILL)] == [
        job_id(record.incarnation, JobKind.PREFILL, attempt) for attempt in (1, 2)
    ]
    done = PrefillState(incarnation=record.incarnation, status=PrefillStatus.DONE, position=1, attempt=2)
    await registry.put_prefill("ox", done, found.prefill_revision)
    assert await subscriptions.request_prefill("ox") == done
    assert len(await bodies(queues, PREFILL)) == 2


async def test_a_job_that_is_asked_for_again_is_stored_once_at_any_time(
    queues: Queues, subscriptions: Subscriptions
) -> None:
    """People ask again while no worker takes the job, for longer than the server remembers its id."""
    record, _ = await subscriptions.add(definition(prefill=True))
    registry = await subscriptions.registry()
    full = Suspension(position=2, reason="full", at=datetime(2026, 11, 15, tzinfo=UTC))
    await registry.put_dispatch("ox", DispatchState(incarnation=record.incarnation, next=2, suspended=full), 0)
    await subscriptions.resume("ox")
    for _ in range(2):
        await forget_ids(queues, PREFILL, "prefill")
        await subscriptions.request_prefill("ox")
        await subscriptions.resume("ox")
    prefill, catch_up = await stored(queues, PREFILL)
    assert [json.loads(each.data)["kind"] for each in (prefill, catch_up)] == ["prefill", "catch-up"]
    # The queue lost the job, and an older one is still there: only the other job counts.
    await queues.streams.delete_message(PREFILL, catch_up.sequence)
    await forget_ids(queues, PREFILL, "prefill")
    await subscriptions.resume("ox")
    await subscriptions.request_prefill("ox")
    assert [job["kind"] for job in await bodies(queues, PREFILL)] == ["prefill", "catch-up"]
    await subscriptions.delete("ox")
    bucket = await queues.bucket(BucketConfig(name=SUBSCRIPTIONS))
    assert await bucket.keys("ox.*") == ["ox.sequence"]


async def test_a_prefill_of_a_subscription_without_one_is_refused(subscriptions: Subscriptions) -> None:
    await subscriptions.add(definition())
    with pytest.raises(Refused, match="without a prefill"):
        await subscriptions.request_prefill("ox")


async def test_a_replay_is_a_job(queues: Queues, subscriptions: Subscriptions) -> None:
    record, _ = await subscriptions.add(definition())
    when = datetime(2026, 11, 15, 12, tzinfo=UTC)
    first = await subscriptions.replay("ox", 1, 9, [RealmTopic("udm", "users/.*")])
    await (await subscriptions.registry()).waiting_replays.forget("ox", first.job)  # the prefill worker begins it
    second = await subscriptions.replay("ox", when)
    assert await bodies(queues, PREFILL) == [{"version": 1, **job.to_json()} for job in (first, second)]
    assert first.to_json() == {
        "kind": "replay",
        "name": "ox",
        "incarnation": record.incarnation,
        "job": first.job,
        "from": 1,
        "to": 9,
        "topics": [{"realm": "udm", "topic": "users/.*"}],
    }
    assert (second.to_json()["from"], second.to_json()["to"]) == (when.isoformat(), None)


async def test_a_replay_is_refused_while_another_one_waits(queues: Queues, subscriptions: Subscriptions) -> None:
    for name in ("ox", "other"):
        await subscriptions.add(definition(name))
    waiting = await subscriptions.replay("ox", 1)
    with pytest.raises(AlreadyExists, match=f"'ox' waits already, job {waiting.job}") as refused:
        await subscriptions.replay("ox", 2)
    assert (refused.value.code, refused.value.fix) == (409, "ask again when that replay has begun")
    await subscriptions.replay("other", 1)
    assert [job["name"] for job in await bodies(queues, PREFILL)] == ["ox", "other"]


@pytest.mark.parametrize(
    ("error", "again"),
    [(PublishRefused("no"), True), (NoAnswer("no"), False), (OutcomeUnknown("no"), False)],
    ids=["refused", "no answer", "unknown"],
)
async def test_a_replay_that_may_be_stored_counts_as_waiting(
    subscriptions: Subscriptions, monkeypatch: pytest.MonkeyPatch, error: PurveyorError, again: bool
) -> None:
    await subscriptions.add(definition())

    async def fail(_: object) -> int:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(subscriptions._jobs, "_put_replay", fail)
        with pytest.raises(type(error)):
            await subscriptions.replay("ox", 1)
    if again:
        await subscriptions.replay("ox", 1)
    else:
        with pytest.raises(AlreadyExists, match="waits already"):
            await subscriptions.replay("ox", 1)


async def test_a_replay_that_is_stored_is_accepted_even_if_its_record_cannot_be_completed(
    queues: Queues, subscriptions: Subscriptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    await subscriptions.add(definition())
    waiting = (await subscriptions.registry()).waiting_replays

    async def fail(*_: object) -> None:
        raise NoAnswer("no")

    monkeypatch.setattr(waiting, "store_sequence", fail)
    job = await subscriptions.replay("ox", 1)
    assert [each["job"] for each in await bodies(queues, PREFILL)] == [job.job]
    with pytest.raises(AlreadyExists, match=job.job):
        await subscriptions.replay("ox", 1)


@pytest.mark.parametrize(
    ("from_", "to"),
    [
        (0, None),
        (5, 4),
        (1, 0),
        (datetime(2026, 1, 1), None),  # noqa: DTZ001 - that is the point
        (datetime(2026, 1, 2, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)),
    ],
)
async def test_a_replay_of_nothing_is_refused(subscriptions: Subscriptions, from_: Any, to: Any) -> None:
    await subscriptions.add(definition())
    with pytest.raises(InvalidInput):
        await subscriptions.replay("ox", from_, to)


async def test_a_replay_from_beyond_the_end_is_refused(queues: Queues, subscriptions: Subscriptions) -> None:
    record, _ = await subscriptions.add(definition())
    assert record.begin is not None
    with pytest.raises(InvalidInput, match=f"begins at position {record.begin + 1}, and the newest position is 1"):
        await subscriptions.replay("ox", record.begin + 1)
    with pytest.raises(InvalidInput, match="in the future"):
        await subscriptions.replay("ox", datetime.now(UTC) + timedelta(days=1))
    assert await bodies(queues, PREFILL) == []
    await subscriptions.replay("ox", record.begin, 10_000)


async def test_a_replay_of_topics_that_the_subscription_does_not_have_is_refused(
    queues: Queues, subscriptions: Subscriptions
) -> None:
    await subscriptions.add(definition(topic="users/.*"))
    for realm, topic in (("udm", "groups/group"), ("shop", "users/user"), ("shop", ".*")):
        with pytest.raises(InvalidInput, match=f"selects no event of {realm}:.*the replay would be empty") as refused:
            await subscriptions.replay("ox", 1, topics=[RealmTopic("udm", "users/user"), RealmTopic(realm, topic)])
        assert refused.value.fix == "give some of its topics, or none for all: it has udm:users/.*"
    assert await bodies(queues, PREFILL) == []
    await subscriptions.replay("ox", 1, topics=[RealmTopic("udm", "users/user"), RealmTopic("udm", ".*/user")])


async def test_the_limits_apply_to_new_definitions_and_not_to_existing_ones(
    queues: Queues, subscriptions: Subscriptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsafe = definition(topic="([a-z]+/)*user")
    with pytest.raises(InvalidInput, match="repeats a group"):
        await subscriptions.add(unsafe)
    assert not (await subscriptions.list()).subscriptions
    with monkeypatch.context() as older:
        older.setattr("purveyor.delivery.subscriptions.check_subscription", lambda given: given)
        record, _ = await subscriptions.add(unsafe)
    assert await subscriptions.add(unsafe) == (record, False)
    assert (await subscriptions.get("ox")).record.definition == unsafe
    changed = await subscriptions.redefine("ox", lambda now: replace(now, lease_seconds=7))
    assert (changed.record.definition.lease_seconds, changed.record.definition.realms_topics) == (
        7,
        unsafe.realms_topics,
    )
    with pytest.raises(InvalidInput, match="number"):
        await subscriptions.redefine("ox", lambda now: replace(now, filter=Filter(fields={"a": (10**400,)})))
    with pytest.raises(InvalidInput, match="too many ways"):
        await subscriptions.replay("ox", 1, topics=[RealmTopic("udm", ".*.*.*x")])


async def test_the_position_is_that_of_the_newest_message_or_acknowledgement(
    queues: Queues, subscriptions: Subscriptions
) -> None:
    record, _ = await subscriptions.add(definition())
    registry = await subscriptions.registry()
    found = await subscriptions.get("ox")
    empty = await read_status(queues, registry, found)
    assert (empty.position, empty.main, empty.prefill) == (None, 0, 0)

    for position in (5, 7):
        await queues.publish("ox.main", b"{}", headers={POSITION: str(position)})
    await queues.publish("ox.prefill", b"{}", headers={POSITION: "1"})
    written = await read_status(queues, registry, found)
    assert (written.position, written.main, written.prefill) == (7, 2, 1)
    assert (await backlogs(queues))["ox"] == 3

    acknowledged = await queues.bucket(ACKNOWLEDGED)
    await acknowledged.put("ox", f'{{"incarnation": "{record.incarnation}", "position": 7}}'.encode())
    await queues.streams.purge("stream:ox")
    assert (await read_status(queues, registry, found)).position == 7

    await queues.streams.remove("stream:ox")
    missing = await read_status(queues, registry, found)
    assert (missing.position, missing.main, missing.prefill) == (7, None, None)

"""Each subscriber gets exactly the events that its definition selected at their positions."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from purveyor.delivery.pull import open_pull
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.model.event import Event
from purveyor.model.registration import DispatchState, PrefillState, PrefillStatus, Suspension
from purveyor.model.selection import Selection
from purveyor.model.subscription import Filter, RealmTopic, Subscription, matches
from purveyor.pipeline.archive.reader import ArchiveSource
from purveyor.pipeline.audit import audit
from purveyor.pipeline.dispatch.dispatch_query import Dispatcher
from purveyor.pipeline.prefill.job_context import JobContext
from purveyor.pipeline.prefill.jobs import run_job
from purveyor.queues.registry import Registry
from purveyor.queues.subscription_queues import remove_queue
from purveyor.queues.sync_client import restore_queue, run_sync
from tests.support.delivery import drain, is_empty
from tests.support.dispatch_harness import DispatchHarness, event
from tests.support.waiting import PATIENCE_SECONDS, until

TOPICS = ("users/user", "users/self", "groups/group", "mail/box")
WANTED = (*TOPICS, "users/.*", ".*/(user|group)", "[a-m].*")
DEPARTMENTS = ("it", "hr", "pr")
NAMES = ("ox", "wiki", "shop")


def some_selection(chance: random.Random) -> Selection:
    chosen = chance.sample(WANTED, chance.randint(1, 3))
    departments = tuple(chance.sample(DEPARTMENTS, chance.randint(1, 2))) if chance.random() < 0.4 else ()
    return Selection(
        realms_topics=tuple(RealmTopic("udm", topic) for topic in chosen),
        filter=Filter(fields={"department": departments} if departments else {}),
        hidden_fields=("password",) if chance.random() < 0.5 else (),
    )


class Expected:
    """The events, and what each subscription selected from which position on."""

    def __init__(self) -> None:
        self.events: list[tuple[int, int, Event]] = []
        self.selected: dict[str, list[tuple[int, Subscription]]] = {}

    def in_force(self, name: str, position: int) -> Subscription | None:
        earlier = [definition for since, definition in self.selected[name] if since < position]
        return earlier[-1] if earlier else None

    def numbers(self, name: str) -> list[int]:
        return [
            number
            for position, number, happened in self.events
            if (definition := self.in_force(name, position)) is not None and matches(definition, happened)
        ]

    def visible(self, name: str, number: int) -> bool:
        """Return whether the password of an event is visible to a subscription."""
        position = next(position for position, each, _ in self.events if each == number)
        definition = self.in_force(name, position)
        assert definition is not None
        return not definition.hidden_fields


async def play(harness: DispatchHarness, expected: Expected, chance: random.Random, steps: int) -> None:
    """Publish random events and change random subscriptions among them."""
    async with harness.connected() as queues:
        subscriptions = Subscriptions(queues)
        for name in NAMES:
            if name not in expected.selected:
                record, _ = await subscriptions.add(some_selection(chance).for_dispatch(name))
                assert record.begin is not None
                expected.selected[name] = [(record.begin, record.definition)]
        for _ in range(steps):
            if chance.random() < 0.2:
                name, selection = chance.choice(NAMES), some_selection(chance)
                changed = await subscriptions.redefine(name, selection.apply_to)
                if changed.position is not None:
                    expected.selected[name].append((changed.position, changed.record.definition))
                continue
            number = len(expected.events)
            new = {"department": chance.choice(DEPARTMENTS), "password": "secret"}
            body = event(number, chance.choice(TOPICS), new=new)
            receipt = await queues.publish("incoming", body)
            expected.events.append((receipt.sequence, number, Event.decode(body)))


def check(harness: DispatchHarness, expected: Expected) -> None:
    for name in NAMES:
        numbers = harness.numbers(name)
        assert numbers == expected.numbers(name), name
        for number, row in zip(numbers, harness.broker.rows(f"stream:{name}"), strict=True):
            assert (b"secret" in row["data"]) is expected.visible(name, number)


def test_random_changes_among_events_are_exact_at_their_positions(
    harness: DispatchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    chance, expected = random.Random(seed), Expected()
    harness.make_group("late")

    asyncio.run(play(harness, expected, chance, 40))
    harness.dispatch()  # one batch, in which each subscription changes several times
    check(harness, expected)

    asyncio.run(play(harness, expected, chance, 30))
    with monkeypatch.context() as crashing:
        crashing.setattr(Dispatcher, "_record_progress", crash)
        broken = harness.start(max_offsets=9)
        with pytest.raises(Exception, match="crashed here"):
            broken.awaitTermination(PATIENCE_SECONDS)
    asyncio.run(play(harness, expected, chance, 10))
    harness.dispatch(max_offsets=9)  # repeats the batch that was written and not committed
    check(harness, expected)

    # A group that is far behind, to an empty queue: the registry has the newest definitions only as the newest.
    found = harness.found("ox")
    run_sync(harness.address, lambda queues: remove_queue(queues, "ox", found.incarnation))
    restore_queue(harness.address, "ox", found.incarnation)
    harness.dispatch("late")
    check(harness, expected)

    report = audit(harness.spark, ArchiveSource(harness.address, harness.directory / "archive"), 1, harness.last())
    assert report.clean, report.to_json()
    assert {each.subscription: each.expected for each in report.accounts} == {
        name: len(expected.numbers(name)) for name in NAMES
    }


def test_a_range_before_later_changes_is_audited_by_what_was_selected_in_it(harness: DispatchHarness) -> None:
    """The registry forgets the first of several changes when all readers have passed them, and the log has them all."""
    chance, expected = random.Random(3), Expected()
    topics = [Selection(realms_topics=(RealmTopic("udm", each),), filter=Filter(), hidden_fields=()) for each in TOPICS]
    asyncio.run(play(harness, expected, chance, 0))
    ends = [harness.last()]

    async def publish() -> None:
        async with harness.connected() as queues:
            # Of each topic another number: of what has left a queue, the audit knows only how many messages it was.
            for topic in [topic for count, topic in enumerate(TOPICS, 1) for _ in range(count)]:
                number = len(expected.events)
                body = event(number, topic)
                receipt = await queues.publish("incoming", body)
                expected.events.append((receipt.sequence, number, Event.decode(body)))

    async def change(selection: Selection) -> None:
        async with harness.connected() as queues:
            changed = await Subscriptions(queues).redefine("ox", selection.apply_to)
            assert changed.position is not None
            expected.selected["ox"].append((changed.position, changed.record.definition))

    async def take_all() -> None:
        """Do what a consumer does that acknowledges everything: then no reader needs the past selections."""
        async with harness.connected() as queues, open_pull(queues) as pull:
            await drain(pull)
            await until(lambda: is_empty(queues))

    for selection in topics:
        asyncio.run(change(selection))
        asyncio.run(publish())
        harness.dispatch()
        asyncio.run(take_all())
        ends.append(harness.last())
    assert len(harness.found("ox").record.past) == 1

    archive = ArchiveSource(harness.address, harness.directory / "archive")
    for first, last in [(1, end) for end in ends] + [(before + 1, after) for before, after in pairwise(ends)]:
        report = audit(harness.spark, archive, first, last, ["ox"])
        assert report.clean, (first, last, report.to_json())
        (account,) = report.accounts
        selected = expected.numbers("ox")
        assert account.expected == sum(
            number in selected for position, number, _ in expected.events if first <= position <= last
        )


def crash(*_: object) -> None:
    raise RuntimeError("crashed here")


def test_a_suspended_subscription_catches_up_by_what_it_selected_then(harness: DispatchHarness) -> None:
    """The archive fills the gap across two changes: first a catch-up job, then the dispatcher itself."""
    chance, expected = random.Random(7), Expected()
    asyncio.run(play(harness, expected, chance, 30))
    for name in NAMES:
        found = harness.found(name)
        assert found.record.begin is not None
        first = found.record.begin + 1
        why = Suspension(position=first, reason="full", at=found.record.created)
        state = DispatchState(incarnation=found.incarnation, next=first, suspended=why)
        run_sync(harness.address, suspend(name, state))
    harness.dispatch()
    assert [harness.numbers(name) for name in NAMES] == [[], [], []]

    async def resume() -> None:
        async with harness.connected() as queues:
            subscriptions = Subscriptions(queues)
            for name in NAMES[:2]:
                await subscriptions.resume(name)
            await run_jobs(harness)

    asyncio.run(resume())
    harness.resume(NAMES[2])
    asyncio.run(play(harness, expected, chance, 10))
    harness.dispatch()
    check(harness, expected)
    report = audit(harness.spark, ArchiveSource(harness.address, harness.directory / "archive"), 1, harness.last())
    assert report.clean, report.to_json()
    assert {each.subscription: each.queued for each in report.accounts} == {
        name: len(expected.numbers(name)) for name in NAMES
    }


def suspend(name: str, state: DispatchState) -> Callable[..., Any]:
    async def write(queues: Any) -> None:
        await (await Registry.open(queues)).put_dispatch(name, state, 0)

    return write


async def run_jobs(harness: DispatchHarness) -> int:
    """Run all jobs of the queue prefill, as a prefill worker does; return how many."""
    from purveyor.model.control_events import decode_job  # noqa: PLC0415

    async with harness.connected() as queues:
        context = JobContext(
            spark=harness.spark,
            archive=ArchiveSource(harness.address, harness.directory / "archive"),
            queues=queues,
            registry=await Registry.open(queues),
            progress_seconds=0.1,
        )
        done = 0
        while messages := await queues.fetch("stream:prefill", "prefill", 10, wait_seconds=0):
            for message in messages:
                await run_job(context, decode_job(message.data))
                await message.ack(confirm=True)
                done += 1
        return done


def test_objects_of_new_topics_are_prefilled_before_their_events_and_nothing_else_is(harness: DispatchHarness) -> None:
    group = "groups/group"

    async def begin() -> int | None:
        async with harness.connected() as queues:
            subscriptions = Subscriptions(queues)
            harness.publish([event(1, group, key="g1"), event(2, group, key="g2"), event(3, "mail/box", key="m")])
            users = (RealmTopic("udm", "users/user"),)
            await subscriptions.add(Subscription(name="ox", realms_topics=users))
            harness.publish([event(4, key="u"), event(5, group, key="g1")])
            topics = (*users, RealmTopic("udm", ".*/(user|group)"))
            added = await subscriptions.redefine(
                "ox", lambda now: replace(now, realms_topics=topics), prefill_new_topics=True
            )
            assert (await subscriptions.get("ox")).prefill is None, "the backlog flows until the dispatcher is there"
            return added.position

    boundary = asyncio.run(begin())
    harness.publish([event(6, group, key="g1"), event(7, key="u"), event(8, "mail/box", key="m")])
    harness.dispatch()
    state = harness.found("ox").prefill
    assert state is not None
    assert (state.status, state.position, state.through) == (PrefillStatus.PENDING, boundary, boundary)
    assert harness.numbers("ox") == [4, 6, 7]

    assert asyncio.run(run_jobs(harness)) == 1
    state = harness.found("ox").prefill
    assert state is not None
    assert (state.status, state.written) == (PrefillStatus.DONE, 2)
    rows = [row for row in harness.broker.rows("stream:ox") if row["subject"] == "ox.prefill"]
    assert [Event.decode(row["data"]).new["id"] for row in rows] == [2, 5], "g2, and g1 as of the change"

    # Nothing is prefilled twice: not by a batch that runs again, nor by another group of dispatchers.
    asyncio.run(play_nothing(harness))
    harness.publish([event(9, key="u")])
    harness.dispatch()
    assert asyncio.run(run_jobs(harness)) == 0
    assert harness.found("ox").prefill == state
    report = audit(harness.spark, ArchiveSource(harness.address, harness.directory / "archive"), 1, harness.last())
    assert report.clean, report.to_json()


def test_new_topics_are_prefilled_also_when_no_event_follows_their_change(harness: DispatchHarness) -> None:
    async def begin() -> int | None:
        async with harness.connected() as queues:
            subscriptions = Subscriptions(queues)
            harness.publish([event(1, "groups/group", key="g")])
            users = (RealmTopic("udm", "users/user"),)
            await subscriptions.add(Subscription(name="ox", realms_topics=users))
            topics = (*users, RealmTopic("udm", "groups/group"))
            added = await subscriptions.redefine(
                "ox", lambda now: replace(now, realms_topics=topics), prefill_new_topics=True
            )
            return added.position

    boundary = asyncio.run(begin())
    assert boundary == harness.last()
    harness.dispatch()
    assert asyncio.run(run_jobs(harness)) == 1
    state = harness.found("ox").prefill
    assert state is not None
    assert (state.status, state.position, state.written) == (PrefillStatus.DONE, boundary, 1)
    assert harness.numbers("ox") == [1]


async def play_nothing(harness: DispatchHarness) -> None:
    async with harness.connected() as queues:
        changed = await Subscriptions(queues).redefine("ox", lambda now: now)
        assert changed.position is None


def test_new_topics_wait_for_a_first_prefill_that_is_not_done(harness: DispatchHarness) -> None:
    """The first prefill is as of the begin, that of the new topics as of the change; one job writes both."""

    async def begin() -> None:
        async with harness.connected() as queues:
            subscriptions = Subscriptions(queues)
            harness.publish([event(1, key="u"), event(2, "groups/group", key="g")])
            users = (RealmTopic("udm", "users/user"),)
            await subscriptions.add(Subscription(name="ox", realms_topics=users, request_prefill=True))
            harness.publish([event(3, key="u"), event(4, "groups/group", key="g")])
            groups = (RealmTopic("udm", "groups/group"),)
            await subscriptions.redefine("ox", lambda now: replace(now, realms_topics=groups), prefill_new_topics=True)

    asyncio.run(begin())
    harness.publish([event(5, key="u"), event(6, "groups/group", key="g")])
    harness.dispatch()
    assert harness.numbers("ox") == [3, 6]
    first = harness.found("ox").prefill
    assert isinstance(first, PrefillState)
    assert (first.status, first.position) == (PrefillStatus.PENDING, harness.found("ox").record.begin)
    asyncio.run(run_jobs(harness))
    rows = [row for row in harness.broker.rows("stream:ox") if row["subject"] == "ox.prefill"]
    assert [Event.decode(row["data"]).new["id"] for row in rows] == [1, 4]
    done = harness.found("ox").prefill
    assert done is not None
    assert (done.status, done.total) == (PrefillStatus.DONE, 2)

"""Dead letters can be listed, redriven to where they were given up, each once, and discarded; none is lost."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from purveyor.delivery.dead_letters.park import attempts_of
from purveyor.delivery.dead_letters.redrive import CrashPoint
from purveyor.delivery.dead_letters.service import DeadLetterFilter, DeadLetters, open_dead_letters
from purveyor.delivery.pull import DeliveredMessage, PullService, open_pull
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.address import Address
from purveyor.jetstream.headers import POSITION, first
from purveyor.jetstream.streams import PageRequest, read_page
from purveyor.model.delivery_policy import Delivery, OrderBy, RetryPolicy
from purveyor.model.delivery_state import SubjectKind
from purveyor.model.errors import UnknownMessage, UnknownSubscription
from purveyor.model.message_headers import EVENT_ID
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.queues.catalogue import DEAD_LETTERS, LDIF, endpoint_queue, incoming
from purveyor.queues.client import Queues, connect
from purveyor.queues.dead_letters.letter import CUT_FROM_BYTES, DeadLetter, park
from tests.support.delivery import definition, stored
from tests.support.forgetting import forget_ids

OX = "stream:ox"
NOW = datetime(2026, 11, 15, 12, 0, 0, 0, UTC)


@pytest.fixture
async def pull(queues: Queues) -> AsyncIterator[PullService]:
    async with open_pull(queues) as opened:
        yield opened


@pytest.fixture
async def letters(queues: Queues) -> AsyncIterator[DeadLetters]:
    async with open_dead_letters(queues) as opened:
        yield opened


def event(number: int, key: str = "k") -> bytes:
    return json.dumps({"key": key, "body": {"new": {"number": number}}}).encode()


async def write(queues: Queues, count: int, *, kind: str = "main", first: int = 2, key: str | None = None) -> None:
    """Write messages as the dispatcher does, each with its own key unless one is given."""
    for position in range(first, first + count):
        headers = {POSITION: str(position), EVENT_ID: f"e-{position}", "Tenant": "north"}
        await queues.publish(f"ox.{kind}", event(position, key or f"k-{position}"), headers=headers)


async def reject(pull: PullService, count: int, reason: str = "no such mailbox") -> None:
    for message in await pull.lease("ox", max=count):
        await pull.reject("ox", message.sequence, f"{reason} {message.position}")


async def drain(pull: PullService) -> list[DeliveredMessage]:
    got = []
    while (message := await pull.next("ox", pop=True)) is not None:
        got.append(message)
    return got


def positions(messages: Sequence[DeliveredMessage]) -> list[int | None]:
    return [message.position for message in messages]


async def test_a_dead_letter_describes_its_message_and_goes_back_before_newer_ones(
    queues: Queues, subscriptions: Subscriptions, pull: PullService, letters: DeadLetters
) -> None:
    await subscriptions.add(definition())
    await write(queues, 4)
    await reject(pull, 2)
    [one, two] = (await letters.list(DeadLetterFilter(subscription="ox"))).letters
    assert one.letter is not None
    assert (one.reason, one.origin, one.letter.attempts) == ("no such mailbox 2", "subscription:ox", 1)
    assert (one.data, one.letter.headers["Tenant"], one.letter.details["position"]) == (event(2, "k-2"), ("north",), 2)
    assert await letters.show(two.id) == two

    held = await pull.lease("ox", max=1)  # a newer one is leased already, and is delivered again behind them
    assert positions(held) == [4]
    report = await letters.retry(DeadLetterFilter(ids=(two.id,)))
    assert (report.done, report.gone, report.failed, report.targets) == (1, 0, [], {"ox.retry": 1})
    assert (await letters.retry(DeadLetterFilter(ids=(one.id,)))).done == 1
    assert (await letters.list()).letters == ()
    got = await drain(pull)
    assert positions(got) == [2, 3, 4, 5]  # the lowest position first, in any order of redrive
    assert [message.kind for message in got] == [
        SubjectKind.RETRY,
        SubjectKind.RETRY,
        SubjectKind.MAIN,
        SubjectKind.MAIN,
    ]
    assert (got[0].data, first(got[0].headers, "Tenant"), first(got[0].headers, EVENT_ID)) == (
        event(2, "k-2"),
        "north",
        "e-2",
    )
    registry = await subscriptions.registry()
    assert (
        await registry.last_acknowledged(await subscriptions.get("ox")) == 5
    )  # a redrive does not set the watermark back


async def test_a_redriven_message_that_fails_again_keeps_its_history(
    queues: Queues, subscriptions: Subscriptions, pull: PullService, letters: DeadLetters
) -> None:
    await subscriptions.add(definition())
    await write(queues, 1)
    begun = datetime.now(UTC)
    for count in range(3):
        await reject(pull, 1, f"attempt {count}")
        [parked] = (await letters.list()).letters
        assert parked.letter is not None
        assert parked.letter.details.get("retries", 0) == count
        assert begun <= parked.letter.failed_first <= parked.letter.failed_last
        assert (await letters.retry(DeadLetterFilter())).done == 1
    assert positions(await drain(pull)) == [2]
    receipts = await read_page(queues, DEAD_LETTERS.stream, PageRequest(subject="dead-letters.settled.>"))
    assert [first(each.headers, "Purveyor-Fate") for each in receipts.messages] == ["retried"] * 3


async def test_by_key_a_redriven_message_waits_for_the_leased_one_and_precedes_the_next(
    queues: Queues, subscriptions: Subscriptions, pull: PullService, letters: DeadLetters
) -> None:
    topics = (RealmTopic("udm", "users/user"),)
    await subscriptions.add(
        Subscription(name="ox", realms_topics=topics, delivery=Delivery.PARALLEL, order_by=OrderBy.KEY)
    )
    await write(queues, 3, key="same")
    await reject(pull, 1)
    out = await pull.lease("ox", max=10)
    assert positions(out) == [3]
    await letters.retry(DeadLetterFilter(subscription="ox"))
    assert await pull.lease("ox", max=10) == []
    await pull.acknowledge("ox", out[0].sequence)
    for position in (2, 4):
        [message] = await pull.lease("ox", max=10)
        assert message.position == position
        await pull.acknowledge("ox", message.sequence)


async def test_a_process_with_a_full_buffer_finds_what_another_process_redrives(
    queues: Queues, subscriptions: Subscriptions, pull: PullService, address: Address
) -> None:
    await subscriptions.add(definition())
    await write(queues, 5)
    await reject(pull, 1)
    assert positions([message for message in [await pull.next("ox", pop=True)] if message]) == [3]
    async with connect(address) as others, open_dead_letters(others) as theirs:
        assert (await theirs.retry(DeadLetterFilter(subscription="ox"))).done == 1
    assert positions(await drain(pull)) == [2, 4, 5, 6]
    waiting = asyncio.create_task(pull.next("ox", timeout=30))  # a waiting consumer is woken
    await asyncio.sleep(0)
    await write(queues, 1, first=7)
    got = await waiting
    assert got is not None
    await pull.reject("ox", got.sequence, "no")
    waiting = asyncio.create_task(pull.next("ox", timeout=30))
    async with connect(address) as others, open_dead_letters(others) as theirs:
        await theirs.retry(DeadLetterFilter(subscription="ox"))
    got = await waiting
    assert got is not None
    assert (got.position, got.kind) == (7, SubjectKind.RETRY)


@pytest.mark.parametrize("point", [None, *CrashPoint])
async def test_a_redrive_that_crashes_and_is_repeated_puts_each_letter_back_once(
    queues: Queues, subscriptions: Subscriptions, pull: PullService, letters: DeadLetters, point: CrashPoint | None
) -> None:
    await subscriptions.add(definition())
    await write(queues, 6)
    await reject(pull, 4)
    await _killed(queues.address, point)
    await reject(pull, 1)
    newest = max(parked.id for parked in (await letters.list()).letters)
    await letters.retry(DeadLetterFilter(ids=(newest,)))
    consumed = positions(await drain(pull))  # redriven messages are consumed before the redrive is repeated
    assert len(consumed) == (2 if point is CrashPoint.RECORDED else 6)
    await _forget_ids(queues)
    report = await letters.retry(DeadLetterFilter(subscription="ox"))
    consumed += positions(await drain(pull))
    assert sorted(consumed, key=lambda position: position or 0) == [2, 3, 4, 5, 6, 7]
    assert (await letters.list()).letters == ()
    assert report.failed == []
    state = json.loads((await (await queues.bucket("acknowledged")).get("ox")).value)
    assert "putting" not in state


async def _killed(address: Address, point: CrashPoint | None) -> None:
    """Another process redrives all letters and dies on the way."""
    child = os.fork()
    if not child:

        def reach(here: CrashPoint) -> None:
            if here is point:
                os.kill(os.getpid(), signal.SIGKILL)

        async def run() -> None:
            async with connect(address) as queues, open_dead_letters(queues, reach=reach) as letters:
                await letters.retry(DeadLetterFilter(subscription="ox"))

        try:
            asyncio.new_event_loop().run_until_complete(run())
        finally:
            os._exit(0)
    _, status = await asyncio.to_thread(os.waitpid, child, 0)
    assert os.WIFSIGNALED(status) == (point is not None)


async def _forget_ids(queues: Queues) -> None:
    """Simulate a repetition after the duplicate window of two minutes."""
    await forget_ids(queues, OX, "ox.prefill")
    await forget_ids(queues, DEAD_LETTERS.stream, "dead-letters.probe")


async def test_concurrent_redrives_and_discards_settle_each_letter_once(
    queues: Queues, subscriptions: Subscriptions, pull: PullService, address: Address
) -> None:
    await subscriptions.add(definition())
    await write(queues, 60)
    await reject(pull, 60)

    async def work(number: int) -> tuple[int, int]:
        async with connect(address) as mine, open_dead_letters(mine) as letters:
            report = await letters.retry(DeadLetterFilter(subscription="ox"))
            assert report.failed == []
            return report.done, report.gone

    results = await asyncio.gather(*map(work, range(3)))
    assert sum(done for done, _ in results) == 60
    assert positions(await drain(pull)) == list(range(2, 62))


async def test_filters_by_reason_origin_and_page_select_what_is_redriven(
    queues: Queues, subscriptions: Subscriptions, pull: PullService, letters: DeadLetters
) -> None:
    await subscriptions.add(definition())
    await write(queues, 5)
    await reject(pull, 2, "No such Mailbox")
    await reject(pull, 3, "quota")
    page = await letters.list(limit=2)
    assert page.next is not None
    assert len((await letters.list(after=page.next)).letters) == 3
    assert len((await letters.list(DeadLetterFilter(origin="subscription:ox"))).letters) == 5
    assert (await letters.list(DeadLetterFilter(origin="other"))).letters == ()
    mailbox = DeadLetterFilter(subscription="ox", reason="mailbox")
    dry = await letters.discard(mailbox, dry_run=True)
    assert (dry.chosen, dry.done) == (2, 0)
    assert (await letters.retry(mailbox, dry_run=True)).targets == {"ox.retry": 2}
    assert (await letters.discard(mailbox)).done == 2
    assert (await letters.retry(DeadLetterFilter(reason="quota"), limit=2)).done == 2
    assert positions(await drain(pull)) == [4, 5]
    assert await letters.counts() == {"subscription-ox": 1}
    with pytest.raises(UnknownMessage):
        await letters.discard(DeadLetterFilter(ids=(4711,)))
    with pytest.raises(UnknownSubscription):
        await letters.list(DeadLetterFilter(subscription="nobody"))


async def test_letters_of_a_deleted_subscription_do_not_belong_to_the_next_of_its_name(
    queues: Queues, subscriptions: Subscriptions, pull: PullService, letters: DeadLetters
) -> None:
    await subscriptions.add(definition())
    await write(queues, 1)
    await reject(pull, 1)
    [parked] = (await letters.list()).letters
    await subscriptions.delete("ox")
    report = await letters.retry(DeadLetterFilter(ids=(parked.id,)))
    assert [failure.message for failure in report.failed] == ["no subscription 'ox'"]
    await subscriptions.add(definition())
    assert (await letters.list(DeadLetterFilter(subscription="ox"))).letters == ()
    with pytest.raises(UnknownMessage):
        await letters.show(parked.id, DeadLetterFilter(subscription="ox"))
    report = await letters.retry(DeadLetterFilter(ids=(parked.id,)))
    assert "earlier subscription" in report.failed[0].message
    assert (await letters.discard(DeadLetterFilter(ids=(parked.id,)))).done == 1


async def test_letters_of_other_parts_go_back_to_their_queues(queues: Queues, letters: DeadLetters) -> None:
    stage = endpoint_queue("orders.place", 2)
    for queue in (DEAD_LETTERS, LDIF, incoming(), stage):
        await queues.ensure(queue)

    def letter(origin: str, subject: str, **more: Any) -> DeadLetter:
        headers = {"Nats-Msg-Id": ("m-1",), "Tenant": ("north",), "Purveyor-Flow": ("{}",)}
        whole: dict[str, Any] = {"reason": "no", "data": b"body", "failed_first": NOW, "failed_last": NOW}
        return DeadLetter(origin=origin, subject=subject, headers=headers, position=7, **whole | more)

    for each in (
        letter("transform", "ldif.people"),
        letter("incoming", "incoming.ldif"),
        letter("stage:orders.place.1", "stage.orders.place.1"),
        letter("intake", "ldif.people", reason="line 3: no colon"),
        letter("stream:old", "old.things"),
        letter("incoming", "incoming", details={CUT_FROM_BYTES: 3_000_000}),
    ):
        await park(queues, each)
    await queues.publish("dead-letters.rubbish", b"\0\xff", headers={"Purveyor-First-Error": "yesterday"})

    report = await letters.retry(DeadLetterFilter())

    assert (report.done, report.chosen) == (3, 7)
    assert [failure.id for failure in report.failed] == [4, 5, 6, 7]
    errors = [f"{failure.message} | {failure.fix}" for failure in report.failed]
    for words, line in zip(
        ("purveyor import", "no queue accepts messages back", "lacks the end", "not a dead letter"), errors, strict=True
    ):
        assert words in line
    for stream, subject in (
        (LDIF.stream, "ldif.people"),
        (incoming().stream, "incoming"),
        (stage.stream, "stage.orders.place.1"),
    ):
        [found] = await stored(queues, stream)
        assert (found.subject, found.data, first(found.headers, "Tenant")) == (subject, b"body", "north")
        assert (first(found.headers, "Nats-Msg-Id") or "").startswith("m-1~retry-")
        assert ("Purveyor-Flow" in found.headers) == (stream == stage.stream)
    assert (await letters.discard(DeadLetterFilter())).done == 4  # damaged ones too
    assert (await letters.list()).letters == ()


@pytest.mark.parametrize(
    "ids", [{"Nats-Msg-Id": ("e-1",)}, {"Nats-Msg-Id": ("event:1a",), EVENT_ID: ("e-1",)}], ids=["before", "now"]
)
async def test_a_message_too_large_for_the_queue_is_redriven_with_its_headers(
    queues: Queues,
    subscriptions: Subscriptions,
    pull: PullService,
    letters: DeadLetters,
    ids: dict[str, tuple[str, ...]],
) -> None:
    record, _ = await subscriptions.add(definition())
    assert record.begin is not None
    position = record.begin + 5
    await queues.ensure(DEAD_LETTERS)
    large = DeadLetter(
        reason="too large for the queue",
        origin="ox",
        subject="incoming",
        data=event(1),
        headers={**ids, "Tenant": ("north",)},
        failed_first=NOW,
        failed_last=NOW,
        position=position,
    )
    await park(queues, large)
    assert len((await letters.list(DeadLetterFilter(subscription="ox"))).letters) == 1
    assert (await letters.retry(DeadLetterFilter(subscription="ox"))).done == 1
    [message] = await drain(pull)
    assert (message.position, message.data, first(message.headers, EVENT_ID)) == (position, event(1), "e-1")


async def test_logged_attempts_are_read_and_damaged_entries_are_not(queues: Queues, letters: DeadLetters) -> None:
    await queues.ensure(DEAD_LETTERS)
    log = [
        {"time": NOW.isoformat(), "status": 503, "error": None, "excerpt": "busy"},
        {"time": "?", "error": "reset"},
        7,
    ]
    for text in (json.dumps(log), "[", '{"a": 1}', "null"):
        made = DeadLetter(
            reason="r",
            origin="o",
            subject="s",
            data=text.encode(),
            failed_first=NOW,
            failed_last=NOW,
            details={"attempts_log": text},
        )
        await park(queues, made)
    [first_one, *others] = (await letters.list()).letters
    [busy, reset] = attempts_of(first_one)
    assert (busy.time, busy.status, busy.error, busy.excerpt) == (NOW, 503, None, "busy")
    assert (reset.time, reset.status, reset.error) == (None, None, "reset")
    assert [attempts_of(each) for each in others] == [(), (), ()]


async def test_a_queue_of_an_earlier_version_accepts_redriven_letters(
    queues: Queues, subscriptions: Subscriptions, pull: PullService, letters: DeadLetters
) -> None:
    await subscriptions.add(
        Subscription(name="ox", realms_topics=(RealmTopic("udm", "users/user"),), retry=RetryPolicy(max_attempts=1))
    )
    await queues.streams.update(OX, {"subjects": ["ox.main", "ox.prefill"]})
    await write(queues, 1)
    assert await pull.next("ox") is not None
    assert await pull.next("ox") is None  # the maximum of attempts is reached
    assert (await letters.retry(DeadLetterFilter())).done == 1
    assert positions(await drain(pull)) == [2]


async def test_the_retention_of_dead_letters_stays_as_set(queues: Queues, letters: DeadLetters) -> None:
    async def retention() -> timedelta:
        return (await queues.streams.info(DEAD_LETTERS.stream)).config.max_age

    await letters.set_retention(timedelta(days=30))
    await queues.ensure(DEAD_LETTERS)
    assert await retention() == timedelta(days=30)
    await letters.set_retention(timedelta(0))
    assert await retention() == timedelta(0)

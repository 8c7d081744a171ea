import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from purveyor.delivery.dead_letters.service import DeadLetterFilter, open_dead_letters
from purveyor.delivery.pull import open_pull
from purveyor.jetstream.bulk.net.pool import request_api
from purveyor.jetstream.server import EmbeddedServer
from purveyor.model.delivery_policy import Delivery
from purveyor.model.errors import UnknownSubscription
from purveyor.model.registration import DispatchState, Record, Suspension
from purveyor.pipeline.audit import Account, audit
from purveyor.pipeline.audit.report import Difference
from purveyor.queues.client import connect
from purveyor.queues.dead_letters.letter import DeadLetter, park, subscription_origin
from tests.support.nats_servers import OwnServer
from tests.support.prefill_harness import PrefillHarness


@pytest.fixture
async def harness(
    own_server: OwnServer, spark: SparkSession, tmp_path: Path, unique: str
) -> AsyncIterator[PrefillHarness]:
    server: EmbeddedServer = own_server()
    async with connect(server.address) as queues:
        yield await PrefillHarness.make(queues, spark, tmp_path / "archive", unique)


class Dispatched:
    """A subscription whose queue was written by hand, as a dispatcher would."""

    def __init__(self, harness: PrefillHarness, record: Record) -> None:
        assert record.begin is not None
        self.harness = harness
        self.record = record
        self.name = record.name
        self.first = record.begin + 1

    async def put(self, *positions: int) -> None:
        for position in positions:
            headers = {"Purveyor-Position": str(position)}
            await self.harness.queues.publish(f"{self.name}.main", b"{}", headers=headers)

    async def take(self, *positions: int, acknowledge: bool = True) -> None:
        """Remove messages, having noted the last as acknowledged or not."""
        if acknowledge:
            bucket = await self.harness.queues.bucket("acknowledged")
            value = {"incarnation": self.record.incarnation, "position": max(positions)}
            await bucket.put(self.name, json.dumps(value).encode())
        for message in await self.harness.stored(self.name, "main"):
            if message.position in positions:
                await self.harness.queues.streams.delete_message(f"stream:{self.name}", message.sequence)

    def reached(self, position: int) -> None:
        """The dispatcher has come so far."""
        address = self.harness.queues.address
        request_api(address, "CONSUMER.RESET.stream:incoming.dispatcher", {"seq": position + 1})

    async def account(self, first: int = 1, last: int = 1000) -> Account:
        shop = self.harness.context
        report = await shop.run_on_spark(lambda: audit(shop.spark, shop.archive, first, last, [self.name]))
        [account] = report.accounts
        assert report.clean == account.clean
        assert json.dumps(report.to_json())
        return account


@pytest.fixture
async def dispatched(harness: PrefillHarness, unique: str) -> Dispatched:
    """A subscription to ten events, of which nothing is written yet, and which the dispatcher has passed."""
    await harness.publish("a/x", "0", {"id": 0})
    record, _ = await harness.add(unique, "a/x", prefill=False)
    made = Dispatched(harness, record)
    for number in range(10):
        await harness.publish("a/x", str(number), {"id": number})
        await harness.publish("b/y", str(number), {"id": number})
    made.reached(made.first + 19)
    return made


def positions(dispatched: Dispatched) -> list[int]:
    return [dispatched.first + 2 * number for number in range(10)]


def found(account: Account, kind: Difference) -> list[int | None]:
    return [place.position for place in account.found(kind).first]


async def test_all_is_well_when_everything_is_acknowledged_queued_or_parked(dispatched: Dispatched) -> None:
    wanted = positions(dispatched)
    await dispatched.put(*wanted)
    letter = DeadLetter(
        reason="refused",
        origin=subscription_origin(dispatched.name),
        subject=f"{dispatched.name}.main",
        data=b"{}",
        headers={"Purveyor-Position": (str(wanted[5]),)},
        failed_first=dispatched.record.created,
        failed_last=dispatched.record.created,
        position=6,
    )
    await park(dispatched.harness.queues, letter)
    await dispatched.take(*wanted[:3])
    await dispatched.take(wanted[5], acknowledge=False)

    account = await dispatched.account()

    assert account.clean
    counts = (account.expected, account.delivered, account.queued, account.dead_lettered, account.pending)
    assert counts == (10, 3, 6, 1, 0)


async def test_parallel_acknowledgements_rejects_and_replay_are_distinguished_and_a_loss_is_found(
    harness: PrefillHarness, dispatched: Dispatched
) -> None:
    wanted, name = positions(dispatched), dispatched.name
    await harness.subscriptions.redefine(name, lambda now: replace(now, delivery=Delivery.PARALLEL, order_by=None))
    await dispatched.put(*wanted)
    await harness.run(await harness.subscriptions.replay(name, wanted[7], wanted[8]))
    async with open_pull(harness.queues) as pull:
        replayed = await pull.lease(name, max=2)
        live = {message.position: message.sequence for message in await pull.lease(name, max=100)}
        assert list(live) == wanted
        await pull.acknowledge(name, replayed[0].sequence)
        await pull.reject(name, replayed[1].sequence, "of the copy alone")  # the live one of position 8 is queued still
        for number in (6, 1, 4):
            await pull.acknowledge(name, live[wanted[number]])
        await pull.reject(name, live[wanted[3]], "no")

        account = await dispatched.account()
        assert account.clean
        counts = (account.expected, account.delivered, account.queued, account.dead_lettered)
        assert counts == (10, 3, 6, 1)

        await harness.queues.streams.delete_message(f"stream:{name}", live[wanted[2]])  # nobody had acknowledged it
        account = await dispatched.account()
        assert (account.expected, account.delivered, account.queued, account.dead_lettered) == (10, 3, 5, 1)
        assert account.found(Difference.MISSING).count == 1
        [place] = found(account, Difference.MISSING)
        assert place in wanted[1:5]  # the neighbours that are left say so much


async def test_ordered_acknowledgements_and_rejects_add_up(harness: PrefillHarness, dispatched: Dispatched) -> None:
    wanted, name = positions(dispatched), dispatched.name
    await dispatched.put(*wanted)
    async with open_pull(harness.queues) as pull:
        leased = await pull.lease(name, max=6)
        await pull.acknowledge_up_to(name, leased[2].sequence)
        await pull.reject(name, leased[3].sequence, "no")
        await pull.acknowledge(name, leased[4].sequence)

        account = await dispatched.account()

    assert account.clean
    counts = (account.expected, account.delivered, account.queued, account.dead_lettered, account.written_twice)
    assert counts == (10, 4, 5, 1, 0)


async def test_letters_that_are_put_back_or_discarded_stay_accounted_for(
    harness: PrefillHarness, dispatched: Dispatched
) -> None:
    wanted, name, queues = positions(dispatched), dispatched.name, harness.queues
    await dispatched.put(*wanted[:8])
    for position in wanted[8:]:  # these were too large: they never came to the queue
        headers = {"Nats-Msg-Id": (str(position),)}
        now = dispatched.record.created
        large = DeadLetter(
            reason="too large", origin=name, subject="incoming", data=b"{}", headers=headers,
            failed_first=now, failed_last=now, position=position,
        )  # fmt: skip
        await park(queues, large)

    def counts(account: Account) -> tuple[int, ...]:
        assert account.clean, account
        return (
            account.expected, account.delivered, account.queued, account.dead_lettered, account.discarded,
            account.expired,
        )  # fmt: skip

    async with open_pull(queues) as pull, open_dead_letters(queues) as letters:
        for message in await pull.lease(name, max=5):
            await pull.reject(name, message.sequence, f"no {message.position}")
        parked = (await letters.list(DeadLetterFilter(origin=name))).letters
        [one] = [each.id for each in parked if each.letter is not None and each.letter.position == wanted[8]]
        await letters.discard(DeadLetterFilter(ids=(one,)))
        await letters.discard(DeadLetterFilter(reason=f"no {wanted[0]}"))
        assert (await letters.retry(DeadLetterFilter(subscription=name))).done == 5
        back = await pull.lease(name, max=5)
        assert [message.position for message in back] == [*wanted[1:5], wanted[9]]
        for message in back[:2]:
            await pull.acknowledge(name, message.sequence)
        await pull.reject(name, back[4].sequence, "no again")  # it was too large at first
        assert counts(await dispatched.account()) == (10, 2, 5, 1, 2, 0)

        await letters.discard(DeadLetterFilter(subscription=name))
        await harness.subscriptions.redefine(name, lambda now: replace(now, retention_seconds=60))
    async with open_pull(queues, clock=lambda: time.time() + 120) as pull:
        assert await pull.expire(name) == 5
    assert counts(await dispatched.account()) == (10, 7, 0, 0, 3, 5)


async def test_every_kind_of_difference_is_found(dispatched: Dispatched) -> None:
    wanted = positions(dispatched)
    await dispatched.put(*wanted[:4], wanted[5], wanted[4], wanted[6], wanted[6], wanted[6] + 1, *wanted[7:])
    await dispatched.take(wanted[2], acknowledge=False)
    await dispatched.harness.queues.publish(f"{dispatched.name}.main", b"from nowhere")

    account = await dispatched.account()

    assert not account.clean
    assert found(account, Difference.MISSING) == [wanted[2]]
    assert found(account, Difference.DISORDERED) == [wanted[4]]
    assert found(account, Difference.DOUBLED) == [wanted[6]]
    assert found(account, Difference.UNEXPECTED) == [None, wanted[6] + 1]
    assert (account.expected, account.queued) == (10, 9)


async def test_a_double_that_was_acknowledged_meanwhile_shows_in_what_the_queue_ever_took(
    dispatched: Dispatched,
) -> None:
    wanted = positions(dispatched)
    await dispatched.put(*wanted[:3], wanted[2], *wanted[3:])
    await dispatched.take(*wanted)

    account = await dispatched.account()

    assert account.written_twice == 1
    assert not account.clean


async def test_what_the_dispatcher_has_not_reached_is_pending_and_what_it_is_ahead_with_is_queued(
    dispatched: Dispatched,
) -> None:
    wanted = positions(dispatched)
    dispatched.reached(wanted[5])
    await dispatched.put(*wanted[:8])

    account = await dispatched.account()

    assert account.clean
    assert (account.expected, account.queued, account.pending, account.reached) == (10, 8, 2, wanted[5])


async def test_a_suspended_subscription_was_reached_up_to_where_it_is_suspended(dispatched: Dispatched) -> None:
    wanted = positions(dispatched)
    await dispatched.put(*wanted[:4])
    reason = Suspension(position=wanted[4], reason="full", at=dispatched.record.created)
    state = DispatchState(incarnation=dispatched.record.incarnation, next=wanted[4], suspended=reason)
    await dispatched.harness.context.registry.put_dispatch(dispatched.name, state, 0)

    account = await dispatched.account()

    assert account.clean
    assert (account.queued, account.pending, account.suspended) == (4, 6, "full")


async def test_only_the_range_asked_for_is_compared(dispatched: Dispatched) -> None:
    wanted = positions(dispatched)
    await dispatched.put(*wanted[3:], wanted[0])

    account = await dispatched.account(wanted[3], wanted[8])

    assert account.clean
    assert (account.expected, account.queued) == (6, 6)


async def test_a_queue_that_is_gone_is_all_missing(dispatched: Dispatched) -> None:
    await dispatched.harness.queues.streams.remove(f"stream:{dispatched.name}")

    account = await dispatched.account()

    assert found(account, Difference.MISSING) == positions(dispatched)


async def test_an_unknown_subscription_is_an_error(harness: PrefillHarness) -> None:
    with pytest.raises(UnknownSubscription):
        audit(harness.context.spark, harness.context.archive, 1, 10, ["nobody"])
    assert audit(harness.context.spark, harness.context.archive, 1, 10).clean

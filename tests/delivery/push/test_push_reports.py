"""A worker stores why it cannot push as soon as the server is available."""

import asyncio

from purveyor.delivery.push.push_reports import PushProblems, read_problems
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.address import Address
from purveyor.model.delivery_policy import Delivery, Push
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.queues.client import connect
from tests.support.proxy import TcpProxy
from tests.support.waiting import until

PATIENCE_SECONDS = 2.0
"""Of the worker's connection; enough for a busy machine to open it."""


async def test_a_problem_set_or_removed_during_an_outage_is_stored_afterwards(
    address: Address, tcp_proxy: TcpProxy, unique: str
) -> None:
    async with (
        connect(address) as queues,
        connect(tcp_proxy.address(address), patience_seconds=PATIENCE_SECONDS) as of_worker,
    ):
        topics, push = (RealmTopic("shop", unique),), Push(endpoints=("https://example.com/in",))
        subscriptions = Subscriptions(queues)
        await subscriptions.add(
            Subscription(name=unique, realms_topics=topics, delivery=Delivery.PUSH, push=push, order_by=None)
        )
        found = await subscriptions.get(unique)
        problems = PushProblems(of_worker)

        async def is_stored(expected: list[str]) -> bool:
            return [each.reason for each in (await read_problems(queues, [found])).values()] == expected

        problems.set(unique, found.incarnation, "no secret")
        await until(lambda: is_stored(["no secret"]))
        for reason, expected in (("another reason", ["another reason"]), ("", [])):
            tcp_proxy.refuse()
            problems.set(unique, found.incarnation, reason)
            await asyncio.sleep(1.5 * PATIENCE_SECONDS)  # the outage lasts longer than the worker's patience
            assert not await is_stored(expected)
            tcp_proxy.restore()
            await until(lambda expected=expected: is_stored(expected))  # type: ignore[misc]
        await problems.close()

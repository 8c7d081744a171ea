"""`purveyor archive audit`: a table, JSON, and an exit code for scripts."""

import asyncio

import pytest
from pyspark.sql import SparkSession

from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk.net.pool import request_api
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.queues.client import connect
from tests.support.command_line import invoke, url_of
from tests.support.nats_servers import OwnServer
from tests.support.spark_session import spark

__all__ = ["spark"]

EVENT = b'{"publisher_name":"t","ts":"2026-01-01T00:00:00Z","realm":"r","topic":"t","body":{"old":{},"new":{"id":1}}}'


async def dispatched(address: Address, *written: int) -> None:
    """A subscription that begins at position 1 and has three events, some of them in its queue."""
    async with connect(address) as queues:
        await Subscriptions(queues).add(Subscription(name="ox", realms_topics=(RealmTopic("r", "t"),)))
        for _ in range(3):
            await queues.publish("incoming", EVENT)
        for position in written:
            await queues.publish("ox.main", EVENT, headers={"Purveyor-Position": str(position)})
    request_api(address, "CONSUMER.RESET.stream:incoming.dispatcher", {"seq": 5})


@pytest.mark.usefixtures("spark")
def test_the_audit_reports_missing_messages_with_exit_code_1(
    own_server: OwnServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = own_server().address
    monkeypatch.setenv("PURVEYOR_NATS_URL", url_of(address))
    assert "no subscriptions" in invoke("archive", "audit").err
    asyncio.run(dispatched(address, 2, 3))

    outcome = invoke("archive", "audit")
    assert (outcome.code, outcome.err) == (1, "")
    assert outcome.out.splitlines()[1].split() == ["ox", "3", "0", "2", "0", "0", "1", "0", "0", "0"]
    assert outcome.out.splitlines()[2:] == ["ox: missing at 4", "There are differences in positions 1 to 4."]

    reported = invoke("archive", "audit", "--to", "3", "--subscription", "ox", "--json").ok().json
    assert (reported["clean"], reported["subscriptions"][0]["expected"]) == (True, 2)
    invoke("archive", "audit", "--subscription", "nobody").refused("no subscription 'nobody'")
    invoke("archive", "audit", "--from", "9", "--to", "3").refused("before it begins")


def test_an_audit_needs_a_server(spark: SparkSession) -> None:
    assert spark is not None
    invoke("archive", "audit").refused("no NATS server is set")

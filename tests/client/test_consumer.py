import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from purveyor import Consumer, ConsumerOptions, Message
from purveyor.jetstream import bulk
from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk.net.pool import request_api
from purveyor.model.errors import AuthenticationFailed, InvalidInput, LeaseLost, PrefillFailed, ServerUnavailable
from tests.support.nats_servers import OwnServer
from tests.support.proxy import TcpProxy
from tests.support.running_api import PASSWORD, RunningApi, event, fill, subscribe
from tests.support.waiting import PATIENCE_SECONDS, until

EXAMPLE = Path(__file__).parents[2] / "examples" / "consumer.py"


class Subscribed:
    """A subscription, its consumers, and its queue."""

    def __init__(self, api: RunningApi, address: Address, name: str) -> None:
        self.api = api
        self.address = address
        self.name = name

    def consumer(self, url: str | None = None, **options: Any) -> Consumer:
        return Consumer(url or self.api.url, self.name, password=PASSWORD, options=ConsumerOptions(**options))

    def fill(self, *numbers: int) -> None:
        fill(self.address, self.name, numbers)

    def left(self) -> int:
        return int(request_api(self.address, f"STREAM.INFO.stream:{self.name}")["state"]["messages"])

    async def emptied(self) -> None:
        await until(lambda: self.left() == 0)


@pytest.fixture
def ordered(running_api: RunningApi, admin: httpx.Client, address: Address, name: str) -> Subscribed:
    subscribe(running_api, admin, name)
    return Subscribed(running_api, address, name)


@pytest.fixture
def parallel(running_api: RunningApi, admin: httpx.Client, address: Address, name: str) -> Subscribed:
    subscribe(running_api, admin, name, delivery="parallel")
    return Subscribed(running_api, address, name)


def number(message: Message) -> int:
    return int(message.new["number"])


async def test_messages_come_in_order_and_are_deleted_when_acknowledged(ordered: Subscribed) -> None:
    ordered.fill(*range(1, 8))
    seen = []
    async with ordered.consumer(batch=3) as consumer:
        async for message in consumer:
            seen.append((number(message), message.position, message.num_delivered, message.realm, message.topic))
            await message.ack()
            with pytest.raises(InvalidInput, match="settled already"):
                await message.retry()
            if number(message) == 7:
                consumer.stop()
    assert seen == [(each, each, 1, "udm", "users/user") for each in range(1, 8)]
    await ordered.emptied()


async def test_a_message_has_the_id_of_its_event_and_the_key_of_its_object(ordered: Subscribed) -> None:
    bodies: list[dict[str, Any]] = [
        {"key": "given"},
        {"body": {"old": {"dn": "cn=a"}, "new": {}}},
        {"body": {"old": {}, "new": {"n": 1}}},
    ]
    rows: list[bulk.Outgoing] = []
    for place, body in enumerate(bodies, start=1):
        headers = {"Purveyor-Position": str(place), **({"Purveyor-Id": "order-7"} if place == 1 else {})}
        rows.append((f"{ordered.name}.main", json.dumps({**event(), **body}).encode(), headers, None))
    bulk.publish_many(ordered.address, bulk.outgoing(rows))
    seen = []
    async with ordered.consumer() as consumer:
        async for message in consumer:
            seen.append((message.event_id, message.key))
            await message.ack()
            if len(seen) == 3:
                consumer.stop()
    assert seen == [("order-7", "given"), (None, "cn=a"), (None, None)]


async def test_a_waiting_consumer_gets_a_new_message(ordered: Subscribed) -> None:
    async with ordered.consumer() as consumer:
        waiting: asyncio.Future[Message] = asyncio.ensure_future(anext(aiter(consumer)))
        await asyncio.to_thread(ordered.fill, 1)
        message = await asyncio.wait_for(waiting, 120)
        await message.ack()


async def test_a_message_is_delivered_again_or_becomes_a_dead_letter(ordered: Subscribed) -> None:
    ordered.fill(1, 2, 3)
    seen = []
    async with ordered.consumer() as consumer:
        async for message in consumer:
            seen.append((number(message), message.num_delivered))
            if message.num_delivered == 1 and number(message) == 1:
                await message.nack(delay=0)  # what was fetched behind it is given back with it
            elif number(message) == 2:
                await message.reject("no such mailbox")
            else:
                await message.ack()
            if number(message) == 3:
                consumer.stop()
    assert seen == [(1, 1), (1, 2), (2, 1), (3, 1)]
    await ordered.emptied()


async def test_a_handler_that_fails_is_called_again_with_the_same_message_first(
    ordered: Subscribed, caplog: pytest.LogCaptureFixture
) -> None:
    ordered.fill(1, 2, 3)
    seen = []

    async def handle(message: Message) -> None:
        seen.append(number(message))
        if seen == [1, 2]:
            raise RuntimeError("the mailbox is locked")
        if len(seen) == 4:
            consumer.stop()

    async with ordered.consumer() as consumer:
        await consumer.run(handle)
    assert seen == [1, 2, 2, 3]
    assert "the mailbox is locked" in caplog.text
    await ordered.emptied()


async def test_handlers_work_at_the_same_time_where_delivery_is_parallel(parallel: Subscribed) -> None:
    parallel.fill(*range(1, 31))
    seen: list[int] = []
    at_once = asyncio.Barrier(5)

    async def handle(message: Message) -> None:
        await at_once.wait()
        seen.append(number(message))
        if len(seen) == 30:
            consumer.stop()

    async with parallel.consumer(batch=4) as consumer:
        await asyncio.wait_for(consumer.run(handle, concurrency=5), 120)
    assert sorted(seen) == list(range(1, 31))
    await parallel.emptied()


async def test_ordered_delivery_refuses_concurrency(ordered: Subscribed) -> None:
    async with ordered.consumer() as consumer:
        with pytest.raises(InvalidInput, match="one after the other"):
            await consumer.run(lambda message: message.ack(), concurrency=2)
        with pytest.raises(InvalidInput):
            await consumer.run(lambda message: message.ack(), concurrency=0)


async def test_batches_are_acknowledged_at_once_or_in_part(parallel: Subscribed) -> None:
    parallel.fill(*range(1, 26))
    sizes = []
    async with parallel.consumer(batch=10) as consumer:
        async for batch in consumer.batches():
            sizes.append(len(batch))
            if len(sizes) == 1:
                await batch.ack(up_to=batch.messages[3])
                with pytest.raises(InvalidInput):
                    await batch.ack(up_to=Message({}, "", 1, 1, 1, _leases=consumer._require_open()))
                await batch.retry(delay=0)
            else:
                await batch.ack()
            if sum(sizes) == 31:
                consumer.stop()
    assert sizes == [10, 10, 10, 1]
    await parallel.emptied()


async def test_a_lease_is_extended_while_a_handler_works(parallel: Subscribed) -> None:
    parallel.fill(1)
    async with parallel.consumer(lease_seconds=6) as consumer, parallel.consumer(wait_seconds=9) as other:
        message = await anext(aiter(consumer))
        assert await other._fetch(1) == []  # it waited for longer than the lease
        assert not message.lost
        await message.ack()


async def test_a_lost_lease_is_an_error(ordered: Subscribed) -> None:
    ordered.fill(1)
    with TcpProxy(*_host(ordered.api.url)) as proxy:
        url = f"http://127.0.0.1:{proxy.port}"
        async with (
            ordered.consumer(url, lease_seconds=1, patience_seconds=1) as first,
            ordered.consumer(lease_seconds=60) as second,
        ):
            lost = await anext(aiter(first))
            proxy.cut()
            proxy.refuse()
            taken = await anext(aiter(second))
            assert taken.num_delivered == 2
            with pytest.raises(ServerUnavailable):
                await lost.ack()
            proxy.restore()
            await until(lambda: lost.lost)
            with pytest.raises(LeaseLost):
                await lost.retry()
            await taken.ack()


async def test_a_stop_gives_unhandled_messages_back_at_once(parallel: Subscribed) -> None:
    parallel.fill(*range(1, 6))
    begun, go_on = asyncio.Event(), asyncio.Event()
    done = []

    async def handle(message: Message) -> None:
        begun.set()
        await go_on.wait()
        done.append(number(message))

    async with parallel.consumer(lease_seconds=3600) as consumer:
        running = asyncio.create_task(consumer.run(handle))
        await begun.wait()
        consumer.stop()
        go_on.set()
        await running
    assert done == [1]
    async with parallel.consumer(batch=10) as other:
        async for batch in other.batches():
            assert sorted(number(message) for message in batch) == [2, 3, 4, 5]
            await batch.ack()
            other.stop()


async def test_a_block_that_ends_with_an_error_gives_its_messages_back(ordered: Subscribed) -> None:
    ordered.fill(1, 2)

    async def fail() -> None:
        async with ordered.consumer(lease_seconds=3600) as consumer:
            async for message in consumer:
                number(message) // 0

    with pytest.raises(ZeroDivisionError):
        await fail()
    async with ordered.consumer() as other:
        message = await anext(aiter(other))
        assert (number(message), message.num_delivered) == (1, 2)


async def test_a_wrong_login_is_an_error_at_once_and_a_token_is_a_login(
    ordered: Subscribed, running_api: RunningApi
) -> None:
    with pytest.raises(AuthenticationFailed):
        async with Consumer(running_api.url, ordered.name, password="wrong"):
            pass
    for password, token in ((None, None), ("a", "b")):
        with pytest.raises(InvalidInput):
            Consumer(running_api.url, ordered.name, password=password, token=token)
    mine = running_api.client(ordered.name, PASSWORD)
    made = mine.post("/v1/tokens", json={}).json()
    ordered.fill(1, 2)
    async with Consumer(running_api.url, ordered.name, token=made["token"]) as consumer:
        messages = aiter(consumer)
        await (await anext(messages)).ack()
        assert mine.delete(f"/v1/tokens/{made['id']}").status_code == 200
        with pytest.raises(AuthenticationFailed):
            await (await anext(messages)).ack()


async def test_a_login_that_ends_ends_the_run(parallel: Subscribed, running_api: RunningApi) -> None:
    mine = running_api.client(parallel.name, PASSWORD)
    made = mine.post("/v1/tokens", json={}).json()
    parallel.fill(1, 2)

    async def handle(_message: Message) -> None:
        await asyncio.to_thread(mine.delete, f"/v1/tokens/{made['id']}")

    async with Consumer(running_api.url, parallel.name, token=made["token"]) as consumer:
        with pytest.raises(AuthenticationFailed):
            await consumer.run(handle, concurrency=2)


@pytest.fixture
def failed(running_api: RunningApi, admin: httpx.Client, name: str) -> str:
    subscribe(running_api, admin, name, request_prefill=True)
    response = admin.patch(f"/v1/subscriptions/{name}/prefill", json={"status": "failed", "reason": "the disk is full"})
    assert response.status_code == 200
    return name


async def test_a_failed_prefill_is_an_error(running_api: RunningApi, failed: str) -> None:
    name = failed
    async with Consumer(running_api.url, name, password=PASSWORD) as consumer:
        with pytest.raises(PrefillFailed, match="the disk is full"):
            await anext(aiter(consumer))


@pytest.mark.parametrize(
    "wrong", [{"instance": ""}, {"instance": "x\n"}, {"batch": 0}, {"batch": 1001}, {"wait_seconds": 0}]
)
def test_invalid_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        ConsumerOptions(**wrong)


async def test_the_consumer_waits_for_an_unavailable_api_or_server(own_server: OwnServer, tmp_path: Path) -> None:
    directory = tmp_path / "store"
    server = own_server(directory=directory)
    seen: list[int] = []

    async def handle(message: Message) -> None:
        seen.append(number(message))

    with RunningApi(lambda: server.address, patience_seconds=2) as api, TcpProxy(*_host(api.url)) as proxy:
        await asyncio.to_thread(api.when_ready)
        subscribe(api, api.client("admin", "admin-secret"), "ox")
        url = f"http://127.0.0.1:{proxy.port}"
        async with Consumer(url, "ox", password=PASSWORD) as consumer:
            running = asyncio.create_task(consumer.run(handle))
            await asyncio.to_thread(fill, server.address, "ox", range(1, 4))
            await until(lambda: seen[-1:] == [3])
            proxy.refuse()
            proxy.cut()
            await asyncio.to_thread(fill, server.address, "ox", range(4, 6))
            proxy.restore()
            await until(lambda: seen[-1:] == [5])
            await asyncio.to_thread(server.stop)
            await until(lambda: api.anybody.get("/readyz").status_code == 503)
            server = await asyncio.to_thread(lambda: own_server(directory=directory))
            await asyncio.to_thread(fill, server.address, "ox", range(6, 8))
            await until(lambda: seen[-1:] == [7])
            consumer.stop()
            await running
    assert sorted(set(seen)) == list(range(1, 8))
    assert seen == sorted(seen)  # a message may come twice, none too early


def test_the_example_keeps_a_copy_and_stops_on_a_signal(ordered: Subscribed, tmp_path: Path) -> None:
    file = tmp_path / "users.json"
    ordered.fill(1, 2)
    variable = f"{ordered.name.upper()}_PASSWORD"
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLE), ordered.api.url, ordered.name, str(file)],
        env={**os.environ, variable: PASSWORD},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == [f"users/user u-{each}: changed\n" for each in (1, 2)]
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.communicate()
    assert file.read_text() == '{"u-1": {"uuid": "u-1", "number": 1}, "u-2": {"uuid": "u-2", "number": 2}}'


def _host(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port

import asyncio
import json
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest

from purveyor import Event, EventsRefused, Publisher, PublisherOptions
from purveyor.client.api_client import RequestRefused
from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk.net.pool import request_api
from purveyor.model.errors import AuthenticationFailed, InvalidInput, PermissionDenied, ServerUnavailable
from tests.support.nats_servers import OwnServer
from tests.support.proxy import TcpProxy
from tests.support.running_api import RunningApi, count, read_incoming_rows
from tests.support.waiting import until


def made(number: int, topic: str, **fields: Any) -> Event:
    given = {"publisher_name": "shop", "ts": datetime(2026, 11, 18, tzinfo=UTC), "realm": "shop", "topic": topic}
    return Event(**{**given, "new": {"id": f"o-{number}", "number": number}, **fields})


def publisher(url: str, user: str = "events", **options: Any) -> Publisher:
    return Publisher(url, user, password=f"{user}-secret", options=PublisherOptions(**options))


def stored_of(address: Address, topic: str) -> list[dict[str, Any]]:
    found = read_incoming_rows(address, 1, count_last(address))
    return [row for row in found if json.loads(row["data"]).get("topic") == topic]


def count_last(address: Address) -> int:
    return int(request_api(address, "STREAM.INFO.stream:incoming")["state"]["last_seq"])


def numbers(rows: list[dict[str, Any]]) -> list[int]:
    return [json.loads(row["data"])["body"]["new"]["number"] for row in rows]


async def test_one_event_is_stored_once_under_its_id(running_api: RunningApi, address: Address, unique: str) -> None:
    async with publisher(running_api.url) as sender:
        first = await sender.publish(made(1, unique), id=f"{unique}-1")
        again = await sender.publish(made(1, unique), id=f"{unique}-1")
        assert (first.id, first.duplicate, again.duplicate) == (f"{unique}-1", False, True)
        assert again.position == first.position
        other = await sender.publish({**made(2, unique).to_json(), "id": f"{unique}-2"})
        assert other.id == f"{unique}-2"
        assert len((await sender.publish(made(3, unique))).id) == 36
    assert numbers(stored_of(address, unique)) == [1, 2, 3]


async def test_a_batch_of_any_size_is_stored_in_order_and_a_repetition_stores_nothing(
    running_api: RunningApi, address: Address, unique: str
) -> None:
    events = [made(number, unique) for number in range(2300)]
    ids = [f"{unique}-{number}" for number in range(2300)]
    async with publisher(running_api.url) as sender:
        first = await sender.publish_many(events, ids=ids)
        assert (first.stored, first.duplicates) == (2300, 0)
        again = await sender.publish_many(events[500:700], ids=ids[500:700])
        assert (again.stored, again.duplicates) == (0, 200)
        assert (await sender.publish_many([])).stored == 0
        with pytest.raises(InvalidInput, match="the same id"):
            await sender.publish_many(events[:2], ids=["a", "a"])
        with pytest.raises(InvalidInput, match="1 ids for 2 events"):
            await sender.publish_many(events[:2], ids=["a"])
    assert numbers(stored_of(address, unique)) == list(range(2300))


async def test_each_refused_event_of_a_batch_is_named_and_the_others_are_stored(
    running_api: RunningApi, address: Address, unique: str
) -> None:
    events: list[Any] = [made(number, unique) for number in range(40)]
    events[3] = made(3, unique, realm="r" * 300)  # refused here, by the rules of the edge
    events[17] = {**made(17, unique).to_json(), "topic": ""}  # refused by the API
    events[18] = {**made(18, unique).to_json(), "ts": {1}}
    events[39] = {**made(39, unique).to_json(), "body": {"old": {}, "new": {"text": "x" * (17 << 20)}}}
    async with publisher(running_api.url) as sender:
        with pytest.raises(EventsRefused) as refused:
            await sender.publish_many(events, ids=[f"{unique}-{number}" for number in range(40)])
    found = {each.index: each.error.message for each in refused.value.refused}
    assert list(found) == [3, 17, 18, 39]
    assert "realm is 300 bytes long" in found[3]
    assert "topic" in found[17]
    assert "no JSON form" in found[18]
    assert "the server takes" in found[39]
    assert refused.value.refused[1].id == f"{unique}-17"
    assert refused.value.published.stored == 36
    assert numbers(stored_of(address, unique)) == [each for each in range(40) if each not in found]


async def test_a_single_refused_event_is_an_error_that_names_the_field(running_api: RunningApi, unique: str) -> None:
    async with publisher(running_api.url) as sender:
        with pytest.raises(InvalidInput, match="topic is 2000 bytes"):
            await sender.publish(made(1, "x" * 2000))
        with pytest.raises(RequestRefused, match="'realm'") as refused:
            await sender.publish({**made(1, unique).to_json(), "realm": 7})
        assert refused.value.status == 422
        with pytest.raises(RequestRefused, match="the server takes") as refused:
            await sender.publish(made(1, unique, new={"text": "x" * (17 << 20)}))
        assert refused.value.status == 413
        with pytest.raises(InvalidInput, match="id is 300 bytes"):
            await sender.publish(made(1, unique), id="i" * 300)


async def test_a_wrong_login_and_a_foreign_realm_are_errors_at_once(running_api: RunningApi, unique: str) -> None:
    async with Publisher(running_api.url, password="wrong") as sender:
        with pytest.raises(AuthenticationFailed):
            await sender.publish(made(1, unique))
    async with publisher(running_api.url, "shop") as sender:
        assert (await sender.publish(made(1, unique))).position
        with pytest.raises(PermissionDenied, match="may not publish into the realm"):
            await sender.publish_many([made(2, unique), made(3, unique, realm="udm")])
    with pytest.raises(InvalidInput, match="a password or with a token"):
        Publisher(running_api.url)
    with pytest.raises(InvalidInput, match="give up to 80"):
        PublisherOptions(patience_seconds=300)


@pytest.fixture
def token(running_api: RunningApi) -> str:
    created: str = running_api.client("events", "events-secret").post("/v1/tokens", json={}).json()["token"]
    return created


async def test_a_token_is_a_login(running_api: RunningApi, unique: str, token: str) -> None:
    async with Publisher(running_api.url, token=token) as sender:
        assert not (await sender.publish(made(1, unique))).duplicate


async def test_events_are_stored_once_through_lost_answers_and_an_outage(
    running_api: RunningApi, address: Address, unique: str
) -> None:
    url = httpx.URL(running_api.url)
    with TcpProxy(url.host, url.port or 80) as proxy:
        async with publisher(f"http://127.0.0.1:{proxy.port}") as sender:
            assert (await sender.publish(made(0, unique))).position
            proxy.refuse()
            accepted = proxy.accepted
            waiting = asyncio.ensure_future(sender.publish_many([made(number, unique) for number in range(1, 4000)]))
            await asyncio.sleep(0)
            proxy.restore()
            await until(lambda: some(address, unique, 1001))
            proxy.cut()
            assert (await asyncio.wait_for(waiting, 120)).position
            assert proxy.accepted >= accepted
    assert numbers(stored_of(address, unique)) == list(range(4000))


async def some(address: Address, topic: str, least: int) -> bool:
    return len(await asyncio.to_thread(stored_of, address, topic)) >= least


async def test_the_publisher_waits_for_the_nats_server_and_loses_its_patience(own_server: OwnServer) -> None:
    server = own_server()
    with RunningApi(lambda: server.address, patience_seconds=0.5) as api:
        api.when_ready()
        async with publisher(api.url, patience_seconds=1.0) as sender:
            await sender.publish(made(1, "t"))
            server.stop()
            with pytest.raises(ServerUnavailable):
                await sender.publish(made(2, "t"), id="two")
        async with publisher(api.url) as sender:
            waiting = asyncio.ensure_future(sender.publish(made(2, "t"), id="two"))
            await asyncio.to_thread(server.start)
            assert (await asyncio.wait_for(waiting, 120)).position == 2
    assert count(server.address) == 2

import contextlib
import json
from typing import Any

import httpx
import pytest

from purveyor.jetstream.address import Address
from tests.support.nats_servers import OwnServer
from tests.support.running_api import RunningApi, count, event, problem, read_incoming, read_incoming_rows

LINES = {"Content-Type": "application/x-ndjson"}


def test_202_means_stored_with_the_login_that_sent_it(events: httpx.Client, address: Address) -> None:
    sent = event(1, key="k", attributes={"tenant": "north"}, publisher_name="somebody else")
    answer = events.post("/v1/messages", json=sent)
    assert answer.status_code == 202
    reported = answer.json()
    assert reported["duplicate"] is False
    found = read_incoming(address, reported["position"])
    assert json.loads(found["data"]) == sent
    headers = dict(found["headers"])
    assert headers | {"Purveyor-Login": ["events"], "Purveyor-Id": [reported["id"]]} == headers


def test_an_event_is_kept_before_any_dispatcher_has_run(own_server: OwnServer) -> None:
    address = own_server().address
    with RunningApi(lambda: address) as api:
        events = api.client("events", "events-secret")
        api.when_ready()
        assert events.post("/v1/messages", json=event()).status_code == 202
    assert count(address) == 1
    assert json.loads(read_incoming(address, 1)["data"]) == event()


def test_a_repetition_is_known_by_its_id_or_by_the_key_of_the_request(events: httpx.Client, unique: str) -> None:
    first = events.post("/v1/messages", json=event(id=unique)).json()
    assert first["id"] == unique
    assert events.post("/v1/messages", json=event(id=unique)).json() == {**first, "duplicate": True}
    header = {"Idempotency-Key": f"{unique}-key"}
    one = events.post("/v1/messages", json=event(), headers=header).json()
    assert one["id"] == f"{unique}-key"
    assert events.post("/v1/messages", json=event(), headers=header).json() == {**one, "duplicate": True}
    header = {"Idempotency-Key": f"{unique}-many"}
    many = events.post("/v1/messages", json=[event(n) for n in range(3)], headers=header).json()
    assert (many["stored"], many["duplicates"]) == (3, 0)
    again = events.post("/v1/messages", json=[event(n) for n in range(3)], headers=header).json()
    assert again == {"position": many["position"], "stored": 0, "duplicates": 3}


@pytest.mark.parametrize("size", [1, 2, 1000])
def test_many_are_stored_in_their_order(events: httpx.Client, address: Address, size: int) -> None:
    sent = [event(number) for number in range(size)]
    answer = events.post("/v1/messages", json=sent)
    assert answer.status_code == 202
    last = answer.json()["position"]
    assert answer.json() == {"position": last, "stored": size, "duplicates": 0}
    stored = read_incoming_rows(address, last - size + 1, last)
    assert [json.loads(row["data"]) for row in stored] == sent


def test_lines_of_json_are_taken_too(events: httpx.Client, address: Address) -> None:
    text = "\n".join(json.dumps(event(number)) for number in range(3)) + "\n\n"
    answer = events.post("/v1/messages", content=text, headers=LINES)
    assert answer.json() | {"stored": 3, "duplicates": 0} == answer.json()
    last = answer.json()["position"]
    assert json.loads(read_incoming(address, last)["data"]) == event(2)


@pytest.mark.parametrize(
    ("broken", "word"),
    [
        ([event(1), {**event(2), "realm": ""}], "event 2"),
        ([event(1)] * 1001, "1001"),
        ([], "0 events"),
        ([event(1, id="same"), event(2, id="same")], "same id"),
        ([event(1), event(2, id="a\nb")], "event 2"),
        ([event(1), "x"], "event 2"),
    ],
    ids=["broken", "too many", "none", "same id", "bad id", "no object"],
)
def test_many_are_all_stored_or_none(events: httpx.Client, address: Address, broken: list[Any], word: str) -> None:
    before = count(address)
    assert word in problem(events.post("/v1/messages", json=broken), 422)["detail"]
    assert count(address) == before


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"7",
        b'"x"',
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a": 1e999}',
        b"NaN",
        json.dumps({**event(), "body": {}}).encode(),
        json.dumps({**event(), "body": {"old": {}, "new": {}}}).encode(),
        json.dumps({**event(), "ts": "yesterday"}).encode(),
        json.dumps({**event(), "publisher_name": 7}).encode(),
        json.dumps({key: value for key, value in event().items() if key != "ts"}).encode(),
        json.dumps({**event(), "topic": "a\u2028b"}).encode(),
        json.dumps({**event(), "attributes": {"a": 1}}).encode(),
        json.dumps({**event(), "id": "x" * 257}).encode(),
        json.dumps({**event(), "id": 7}).encode(),
    ],
)
def test_what_is_no_event_is_422(events: httpx.Client, body: bytes) -> None:
    problem(events.post("/v1/messages", content=body, headers={"Content-Type": "application/json"}), 422)


def test_a_broken_line_is_reported_by_its_number(events: httpx.Client) -> None:
    reported = problem(events.post("/v1/messages", content=json.dumps(event()) + "\n{\n", headers=LINES), 422)
    assert "line 2" in reported["detail"]


def test_a_publisher_keeps_to_its_realms(api: RunningApi, address: Address) -> None:
    shop = api.client("shop", "shop-secret")
    assert shop.post("/v1/messages", json=event(realm="shop")).status_code == 202
    before = count(address)
    assert "'udm'" in problem(shop.post("/v1/messages", json=event()), 403)["detail"]
    problem(shop.post("/v1/messages", json=[event(realm="shop"), event(realm="udm")]), 403)
    assert count(address) == before


def test_only_publishers_publish(admin: httpx.Client, api: RunningApi) -> None:
    problem(admin.post("/v1/messages", json=event()), 403)
    problem(api.client().post("/v1/messages", json=event()), 401)


def test_too_much_is_413(events: httpx.Client) -> None:
    large = event()
    large["body"]["new"]["photo"] = "x" * (17 << 20)
    problem(events.post("/v1/messages", json=large), 413)
    problem(events.post("/v1/messages", content=b"x" * (33 << 20)), 413)
    chunks = (b"x" * (1 << 20) for _ in range(33))
    with contextlib.suppress(httpx.WriteError):  # refused while it was still being sent
        problem(events.post("/v1/messages", content=chunks), 413)

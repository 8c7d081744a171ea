"""Any message in a queue reaches its consumer as JSON or becomes a dead letter; it blocks no other message."""

import json
from typing import Any

import httpx
import pytest

from purveyor.app.json_views import message_json
from purveyor.delivery.pull import DeliveredMessage
from purveyor.jetstream.address import Address
from purveyor.model.json_fields import Json
from purveyor.queues.client import Queues
from tests.support import malformed_messages
from tests.support.running_api import Consumer, RunningApi, event, fill, on_server, subscribe


def put(address: Address, name: str) -> int:
    """All rubbish, with a good message behind each; how many messages that is."""

    async def work(queues: Queues) -> None:
        for body, lines in malformed_messages.ALL.values():
            await malformed_messages.put(queues, f"{name}.main", body, lines)
            await malformed_messages.put(queues, f"{name}.main", json.dumps(event(1)).encode())

    on_server(address, work)
    return 2 * len(malformed_messages.ALL)


def test_rubbish_is_handed_out_in_order(consumer: Consumer, address: Address) -> None:
    total = put(address, consumer.name)
    for number in range(total):
        answer = consumer.get("messages/next", params={"timeout": 0})
        assert answer.status_code == 200, answer.text
        found = json.loads(answer.content.decode("utf-8"))
        assert found["sequence_number"] == number + 1
        assert not [name for name in answer.headers if "evil" in name]
        assert consumer.set_status(found["sequence_number"], status="ok").status_code == 200
    assert consumer.next() is None
    assert consumer.get().status_code == 200  # what it tells of its queue can be told


@pytest.mark.parametrize("order_by", [None, "key"])
def test_rubbish_is_leased(
    api: RunningApi, admin: httpx.Client, name: str, address: Address, order_by: str | None
) -> None:
    consumer = subscribe(api, admin, name, delivery="parallel", order_by=order_by)
    total, got = put(address, name), set[int]()
    while len(got) < total:
        answer = consumer.post("messages/lease", json={"max": 1000, "timeout": 0})
        assert answer.status_code == 200, answer.text
        found = json.loads(answer.content.decode("utf-8"))["messages"]
        assert found
        got |= {each["sequence_number"] for each in found}
        for each in found:
            assert consumer.set_status(each["sequence_number"], status="ok").status_code == 200


def test_rubbish_can_be_rejected_listed_and_put_back(consumer: Consumer, address: Address) -> None:
    total = put(address, consumer.name)
    while (found := consumer.next()) is not None:
        assert consumer.set_status(found["sequence_number"], status="reject", reason="rubbish").status_code == 200
    letters = consumer.get("dead-letters", params={"limit": 1000}).json()["dead_letters"]
    assert len(letters) == total
    for each in letters:
        assert consumer.get(f"dead-letters/{each['id']}").status_code == 200
    done = consumer.post("dead-letters", json={"all": True}).json()
    assert (done["done"], done["failed"]) == (total, [])
    sequences = set()
    while (found := consumer.next()) is not None:
        sequences.add(found["sequence_number"])
        assert consumer.set_status(found["sequence_number"], status="ok").status_code == 200
    assert len(sequences) == total


@pytest.mark.parametrize("how", ["next", "pop", "lease"])
def test_a_message_of_which_no_answer_can_be_made_is_a_dead_letter(
    consumer: Consumer, address: Address, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """If one message fails, the API delivers the next one and does not lose the failed one."""
    whole = message_json

    def broken(message: DeliveredMessage, more: Json) -> bytes:
        if message.sequence in (1, 2):
            raise RuntimeError("no such letter")
        return whole(message, more)

    monkeypatch.setattr("purveyor.app.http.messages.message_json", broken)
    fill(address, consumer.name, range(1, 4))
    found: Any
    if how == "lease":
        (found,) = consumer.post("messages/lease", json={"max": 10, "timeout": 0}).json()["messages"]
    else:
        found = consumer.next(pop=how == "pop")
    assert found["sequence_number"] == 3
    letters = consumer.get("dead-letters").json()["dead_letters"]
    assert [each["reason"] for each in letters] == ["the API cannot encode it: RuntimeError: no such letter"] * 2
    if how != "pop":
        assert consumer.set_status(3, status="ok").status_code == 200
    assert consumer.next() is None

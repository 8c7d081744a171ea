"""An unmodified consumer of the older system: HTTP Basic, one message at a time, its models, its handling of errors."""

import json
from collections.abc import Iterator
from datetime import datetime
from enum import Enum
from functools import partial
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, model_validator

from purveyor.jetstream import bulk
from purveyor.jetstream.address import Address
from purveyor.pipeline.transform import load_mapping
from purveyor.pipeline.transform.live_directory import LiveDirectory
from purveyor.pipeline.transform.record_transform import Message, TransformRules, transform
from tests.pipeline.transform.memory import MemoryPages, MemoryStore, body, modify
from tests.support.running_api import RunningApi, event, fill

ADA = "uid=ada,cn=users,dc=example,dc=com"
PASSWORD = "its password"


class PublisherName(Enum):
    """The publishers of changes that it knows."""

    LIVE = "udm-listener"
    PREFILL = "udm-pre-fill"


class Body(BaseModel):
    """The two objects of a message: never null, not both empty, of a type."""

    old: dict[str, Any]
    new: dict[str, Any]

    @model_validator(mode="after")
    def check(self) -> "Body":
        assert self.old or self.new
        assert all(each["objectType"] for each in (self.old, self.new) if each)
        return self


class OlderMessage(BaseModel):
    """A message as its models read it."""

    publisher_name: PublisherName
    ts: datetime
    realm: str
    topic: str
    body: Body
    sequence_number: int
    num_delivered: int


class Unauthorized(Exception):
    """The login is wrong, or the subscription is another one's."""


class OlderClient:
    """The calls of its client library."""

    def __init__(self, url: str, user: str, password: str) -> None:
        self._session = httpx.Client(auth=(user, password), timeout=300)
        self._url = url

    def _call(self, method: str, path: str, **more: Any) -> Any:
        answer = self._session.request(method, f"{self._url}/v1/{path}", **more)
        if answer.status_code == 401 and answer.headers["WWW-Authenticate"].startswith("Basic"):
            raise Unauthorized(answer.text)
        answer.raise_for_status()
        return answer.json()

    def create_subscription(self, name: str, password: str, realms_topics: list[tuple[str, str]]) -> None:
        wanted = {
            "name": name,
            "realms_topics": [{"realm": realm, "topic": topic} for realm, topic in realms_topics],
            "request_prefill": False,
            "password": password,
        }
        self._call("POST", "subscriptions", json=wanted)

    def get_subscription(self, name: str) -> Any:
        return self._call("GET", f"subscriptions/{name}")

    def get_subscription_message(self, name: str, timeout: float = 10) -> Any:
        return self._call("GET", f"subscriptions/{name}/messages/next", params={"timeout": timeout, "pop": "false"})

    def set_message_status(self, name: str, sequence_number: int) -> None:
        self._call("PATCH", f"subscriptions/{name}/messages/{sequence_number}/status", json={"status": "ok"})

    def cancel_subscription(self, name: str) -> None:
        self._call("DELETE", f"subscriptions/{name}")

    def close(self) -> None:
        self._session.close()


@pytest.fixture
def admin(api: RunningApi) -> Iterator[OlderClient]:
    client = OlderClient(api.url, "admin", "admin-secret")
    yield client
    client.close()


@pytest.fixture
def consumer(api: RunningApi, name: str) -> Iterator[OlderClient]:
    client = OlderClient(api.url, name, PASSWORD)
    yield client
    client.close()


def test_it_works_as_it_did(admin: OlderClient, consumer: OlderClient, address: Address, name: str) -> None:
    admin.create_subscription(name, PASSWORD, [("udm", "users/user"), ("udm", "groups/.*")])
    admin.create_subscription(name, PASSWORD, [("udm", "users/user"), ("udm", "groups/.*")])
    assert consumer.get_subscription(name)["prefill_queue_status"] == "done"
    assert consumer.get_subscription_message(name, timeout=0) is None
    fill(address, name, range(1, 4))
    for number in (1, 2, 3):
        first = consumer.get_subscription_message(name)
        again = consumer.get_subscription_message(name)
        assert first == {**event(number), "sequence_number": number, "num_delivered": 1}
        assert again == {**first, "num_delivered": 2}
        consumer.set_message_status(name, again["sequence_number"])
    assert consumer.get_subscription_message(name, timeout=0.1) is None
    consumer.cancel_subscription(name)


def test_it_understands_the_changes_of_a_directory(
    admin: OlderClient, consumer: OlderClient, address: Address, name: str
) -> None:
    admin.create_subscription(name, PASSWORD, [("udm", "users/user")])
    person = {"objectClass": ["inetOrgPerson", "posixAccount"], "uid": ["ada"], "sn": ["Byron"], "uidNumber": ["2005"]}
    records = (
        body(ADA, "add", attributes={**person, "userPassword": ["s3cret"]}),
        modify(ADA, ("replace", "sn", ["Lovelace"]), ("add", "mail", ["ada@example.com"])),
        body(ADA, "delete"),
    )
    directory = LiveDirectory(MemoryStore(), MemoryPages())
    rules = TransformRules(load_mapping(), 1 << 20)
    moment = datetime.fromisoformat("2026-01-31T12:00:00+00:00")
    outputs = [
        output
        for number, record in enumerate(records, 1)
        for output in transform(directory, rules, Message(number, moment, "ldif.hq", {}, record))
    ]
    queued: list[bulk.Outgoing] = [(f"{name}.main", output.data, None, output.msg_id) for output in outputs]
    bulk.publish_many(address, bulk.outgoing(queued))

    accounts: dict[str, tuple[str, list[str]]] = {}
    seen = []
    while (given := consumer.get_subscription_message(name, timeout=0)) is not None:
        message = OlderMessage.model_validate(given)
        assert (message.publisher_name, message.realm, message.topic) == (PublisherName.LIVE, "udm", "users/user")
        assert "s3cret" not in json.dumps(given)
        old, new = message.body.old, message.body.new
        if new:
            properties = new["properties"]
            accounts[new["id"]] = (properties["lastname"], properties["e-mail"])
            assert properties["mailPrimaryAddress"] is None
            assert (new["dn"], new["position"]) == (ADA, "cn=users,dc=example,dc=com")
        else:
            del accounts[old["id"]]
        seen.append((bool(old), bool(new), dict(accounts)))
        consumer.set_message_status(name, message.sequence_number)
    assert seen == [
        (False, True, {"ada": ("Byron", [])}),
        (True, True, {"ada": ("Lovelace", ["ada@example.com"])}),
        (True, False, {}),
    ]


def test_another_subscription_is_unauthorized_as_it_was(
    api: RunningApi, admin: OlderClient, consumer: OlderClient, address: Address, name: str
) -> None:
    other = f"{name}-b"
    for each in (name, other):
        admin.create_subscription(each, PASSWORD, [("udm", "users/user")])
    fill(address, other, [1])
    for asked in (other, f"{name}-missing"):
        for call in (
            partial(consumer.get_subscription_message, timeout=0),
            partial(consumer.set_message_status, sequence_number=1),
            consumer.get_subscription,
            consumer.cancel_subscription,
        ):
            with pytest.raises(Unauthorized):
                call(asked)
    with pytest.raises(Unauthorized):
        admin.get_subscription_message(name, timeout=0)
    wrong = OlderClient(api.url, name, "a wrong password")
    with pytest.raises(Unauthorized):
        wrong.get_subscription_message(name, timeout=0)
    wrong.close()
    theirs = OlderClient(api.url, other, PASSWORD)
    assert theirs.get_subscription_message(other, timeout=0)["sequence_number"] == 1, "nothing happened to it"
    theirs.close()
    assert consumer.get_subscription(name)["name"] == name, "its own login still works"

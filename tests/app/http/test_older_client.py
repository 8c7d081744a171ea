"""An unmodified consumer of the older system: HTTP Basic, one message at a time."""

from typing import Any

import httpx

from purveyor.jetstream.address import Address
from tests.support.running_api import RunningApi, event, fill


class OlderClient:
    """The calls of its client library."""

    def __init__(self, url: str, user: str, password: str) -> None:
        self._session = httpx.Client(auth=(user, password), timeout=300)
        self._url = url

    def create_subscription(self, name: str, password: str, realms_topics: list[tuple[str, str]]) -> None:
        answer = self._session.post(
            f"{self._url}/v1/subscriptions",
            json={
                "name": name,
                "realms_topics": [{"realm": realm, "topic": topic} for realm, topic in realms_topics],
                "request_prefill": False,
                "password": password,
            },
        )
        answer.raise_for_status()

    def get_subscription(self, name: str) -> Any:
        answer = self._session.get(f"{self._url}/v1/subscriptions/{name}")
        answer.raise_for_status()
        return answer.json()

    def get_subscription_message(self, name: str, timeout: float = 10) -> Any:
        answer = self._session.get(
            f"{self._url}/v1/subscriptions/{name}/messages/next", params={"timeout": timeout, "pop": "false"}
        )
        answer.raise_for_status()
        return answer.json()

    def set_message_status(self, name: str, sequence_number: int) -> None:
        answer = self._session.patch(
            f"{self._url}/v1/subscriptions/{name}/messages/{sequence_number}/status", json={"status": "ok"}
        )
        answer.raise_for_status()

    def cancel_subscription(self, name: str) -> None:
        self._session.delete(f"{self._url}/v1/subscriptions/{name}").raise_for_status()

    def close(self) -> None:
        self._session.close()


def test_it_works_as_it_did(api: RunningApi, address: Address, name: str) -> None:
    admin, consumer = OlderClient(api.url, "admin", "admin-secret"), OlderClient(api.url, name, "its password")
    admin.create_subscription(name, "its password", [("udm", "users/user"), ("udm", "groups/.*")])
    admin.create_subscription(name, "its password", [("udm", "users/user"), ("udm", "groups/.*")])
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
    admin.close()
    consumer.close()

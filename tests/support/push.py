"""An HTTP endpoint in its own process, and a subscription that pushes to it."""

import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from purveyor.delivery.push.egress_policy import parse_ranges
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.headers import POSITION
from purveyor.jetstream.streams import StoredMessage
from purveyor.model.delivery_policy import Delivery, OrderBy, Push, RetryPolicy
from purveyor.model.errors import UnknownMessage, UnknownStream
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.queues.catalogue import DEAD_LETTERS
from purveyor.queues.client import Queues
from purveyor.queues.dead_letters.letter import DeadLetter, subject_token
from tests.support.waiting import until

LOCAL = parse_ranges(["127.0.0.1"])


SWIFT = RetryPolicy(max_attempts=None, min_backoff_seconds=0.01, max_backoff_seconds=0.05)


_PROGRAM = Path(__file__).parent / "push_endpoint.py"


class Site:
    """An endpoint of `push_endpoint.py`."""

    def __init__(self, port: int = 0) -> None:
        self._process = subprocess.Popen([sys.executable, str(_PROGRAM), str(port)], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}")

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def seen(self, name: str) -> list[dict[str, Any]]:
        """Return the requests for a subscription, in the order of the responses."""
        found = self._client.get("/seen").json()["seen"]
        return [each for each in found if each["path"].endswith(f"for={name}") or f"for={name}&" in each["path"]]

    def most_connections(self) -> int:
        return int(self._client.get("/seen").json()["most"])

    def set_status(self, status: int) -> None:
        self._client.post(f"/set/{status}")

    def stop(self) -> None:
        self._client.close()
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture(scope="session")
def site() -> Iterator[Site]:
    found = Site()
    yield found
    found.stop()


class PushSubscription:
    """A push subscription to the test endpoint."""

    def __init__(self, queues: Queues, subscriptions: Subscriptions, site: Site, name: str) -> None:
        self.queues = queues
        self.subscriptions = subscriptions
        self.site = site
        self.name = name
        self._position = 0

    async def add(
        self,
        *paths: str,
        order_by: OrderBy | None = None,
        retry: RetryPolicy = SWIFT,
        urls: tuple[str, ...] = (),
        **push: Any,
    ) -> None:
        """Add the subscription, with these paths of the endpoint."""
        mark = f"for={self.name}"
        endpoints = urls or tuple(self.site.url(f"{path}{'&' if '?' in path else '?'}{mark}") for path in paths)
        await self.subscriptions.add(
            Subscription(
                name=self.name,
                realms_topics=(RealmTopic("udm", "none"),),
                delivery=Delivery.PUSH,
                order_by=order_by,
                retry=retry,
                push=Push(endpoints=endpoints, **push),
            )
        )

    async def change(self, **push: Any) -> None:
        """Change push settings."""

        def changed(now: Subscription) -> Subscription:
            assert now.push is not None
            return dataclasses.replace(now, push=dataclasses.replace(now.push, **push))

        await self.subscriptions.redefine(self.name, changed)

    async def write(self, *events: dict[str, Any]) -> None:
        """Write messages as the dispatcher does."""
        for new in events:
            self._position += 1
            event = {"publisher_name": "t", "ts": "2026-01-01T00:00:00Z", "realm": "udm", "topic": "users/user"}
            body = json.dumps({**event, "body": {"old": {}, "new": {"n": self._position, **new}}}).encode()
            position = str(self._position + 1_000_000)
            await self.queues.publish(f"{self.name}.main", body, headers={POSITION: position})

    async def waiting(self) -> int:
        return (await self.queues.streams.info(f"stream:{self.name}")).state.messages

    async def drained(self) -> None:
        await until(self._is_empty)

    async def _is_empty(self) -> bool:
        return await self.waiting() == 0

    async def letters(self) -> list[DeadLetter]:
        """Return its dead letters."""
        return [DeadLetter.from_message(each.headers, each.data) for each in await self._parked()]

    async def letter_sequences(self) -> list[int]:
        return [each.sequence for each in await self._parked()]

    async def _parked(self) -> list[StoredMessage]:
        found: list[StoredMessage] = []
        subject = f"dead-letters.{subject_token(f'subscription:{self.name}')}"
        with contextlib.suppress(UnknownMessage, UnknownStream):
            while True:
                after = found[-1].sequence + 1 if found else 1
                found.append(await self.queues.streams.get_next(DEAD_LETTERS.stream, after, subject))
        return found

    def seen(self) -> list[dict[str, Any]]:
        return self.site.seen(self.name)

    def acked(self) -> list[int]:
        """Return the numbers of the acknowledged messages, in order."""
        return [each["n"] for each in self.seen() if each["status"] in (102, 200, 201, 202, 204)]


Events = list[tuple[str, str, str]]

"""nats-server stops and restarts under load: the API answers 503 at worst, and loses or repeats nothing."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from purveyor.jetstream import bulk
from purveyor.jetstream.server import ServerOptions
from purveyor.model.message_headers import EVENT_ID
from tests.support.killing import kill_server
from tests.support.nats_servers import OwnServer
from tests.support.running_api import Consumer, RunningApi, event, fill, subscribe
from tests.support.scale import LONG
from tests.support.waiting import PATIENCE_SECONDS, wait_until

ROUNDS = 20 if LONG else 2
MESSAGES = 20_000 if LONG else 2_000
SYNCED = ServerOptions(sync="always")
"""Otherwise a killed server loses its last confirmed writes."""


@pytest.mark.chaos
def test_a_server_that_restarts_under_load_costs_no_more_than_503(own_server: OwnServer, tmp_path: Path) -> None:
    directory = tmp_path / "store"
    server = own_server(SYNCED, directory=directory)
    with RunningApi(lambda: server.address, patience_seconds=2) as api:
        api.when_ready()
        admin = api.client("admin", "admin-secret")
        over = threading.Event()
        publisher, puller = Publisher(api, over), Puller(subscribe(api, admin, "ox"), over)
        leaser, looker = Leaser(subscribe(api, admin, "zoo"), over), Looker(admin, over)
        for name in ("ox", "zoo"):
            fill(server.address, name, range(1, MESSAGES))
        workers = [publisher, puller, leaser, looker]
        for worker in workers:
            worker.start()
        for number in range(ROUNDS):
            go_on([publisher.accepted, puller.taken, leaser.taken])
            if number % 2:
                kill_server(server)  # it is started again at once
                continue
            server.stop()
            wait_until(lambda: api.anybody.get("/readyz").status_code == 503)
            server = own_server(SYNCED, directory=directory)
        go_on([publisher.accepted, puller.taken, leaser.taken])
        over.set()
        for worker in workers:
            worker.join(PATIENCE_SECONDS)
            worker.check()
        batches = bulk.read_range(server.address, "stream:incoming", 1, 1 << 40)
        log = [dict(row["headers"]) for batch in batches for row in batch.to_pylist() if row["subject"] == "incoming"]
    ids = [headers[EVENT_ID][0] for headers in log]
    assert len(set(ids)) == len(ids)
    assert set(publisher.accepted) <= set(ids)
    for taken in (puller.taken, leaser.taken):
        assert taken == list(range(1, len(taken) + 1))


def go_on(lists: Sequence[Sequence[object]]) -> None:
    """Wait until all of them have grown."""
    before = [len(each) for each in lists]
    wait_until(lambda: all(len(each) > size + 5 for each, size in zip(lists, before, strict=True)))


def test_a_server_that_moved_is_found_where_it_is(own_server: OwnServer) -> None:
    first, second = own_server(), own_server()
    there = [first.address]
    with RunningApi(lambda: there[0], patience_seconds=2) as api:
        api.when_ready()
        first.stop()
        there[0] = second.address
        wait_until(lambda: api.anybody.get("/readyz").status_code == 503)
        api.when_ready()
        assert api.client("events", "events-secret").post("/v1/messages", json=event()).json()["position"] == 1


class Worker(threading.Thread):
    """Repeat a request until the test ends; retry after 503."""

    def __init__(self, over: threading.Event) -> None:
        super().__init__()
        self.over = over
        self.statuses: set[int] = set()
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            while not self.over.is_set():
                self.turn()
        except Exception as error:  # noqa: BLE001 - told by check
            self.failure = error

    def turn(self) -> None:
        raise NotImplementedError

    def note(self, answer: httpx.Response) -> bool:
        self.statuses.add(answer.status_code)
        if answer.status_code == 503:
            assert answer.headers["Retry-After"]
        return answer.is_success

    def check(self) -> None:
        assert self.failure is None, self.failure
        assert all(status < 300 or status == 503 for status in self.statuses), self.statuses


class Publisher(Worker):
    def __init__(self, api: RunningApi, over: threading.Event) -> None:
        super().__init__(over)
        self._client = api.client("events", "events-secret")
        self.accepted: list[str] = []
        self._number = 0

    def turn(self) -> None:
        self._number += 1
        many = self._number % 3 == 0
        ids = [f"e-{self._number}-{part}" for part in range(5 if many else 1)]
        body: Any = [event(self._number, id=each) for each in ids]
        while not self.note(self._client.post("/v1/messages", json=body if many else body[0])):
            if self.over.is_set():
                return
        self.accepted += ids


class Puller(Worker):
    def __init__(self, consumer: Consumer, over: threading.Event) -> None:
        super().__init__(over)
        self._consumer = consumer
        self.taken: list[int] = []

    def turn(self) -> None:
        answer = self._consumer.get("messages/next", params={"timeout": 1})
        if not self.note(answer):
            return
        message = answer.json()
        path = f"messages/{message['sequence_number']}/status"
        while True:
            reported = self._consumer.patch(path, json={"status": "ok"})
            if reported.status_code == 404:
                break  # acknowledged by a request whose answer was lost
            if self.note(reported):
                break
            if self.over.is_set():
                return
        self.taken.append(message["sequence_number"])


class Leaser(Worker):
    """Lease many messages and acknowledge them together."""

    def __init__(self, consumer: Consumer, over: threading.Event) -> None:
        super().__init__(over)
        self._consumer = consumer
        self.taken: list[int] = []

    def turn(self) -> None:
        answer = self._consumer.post("messages/lease", json={"max": 3, "timeout": 1})
        if not self.note(answer):
            return
        sequences = [message["sequence_number"] for message in answer.json()["messages"]]
        while True:
            reported = self._consumer.patch("messages/status", json={"status": "ok", "up_to": sequences[-1]})
            if reported.status_code == 404:
                break  # acknowledged by a request whose answer was lost
            if self.note(reported):
                assert reported.json() == {"acknowledged": len(sequences)}
                break
            if self.over.is_set():
                return
        self.taken += sequences


class Looker(Worker):
    def __init__(self, admin: httpx.Client, over: threading.Event) -> None:
        super().__init__(over)
        self._admin = admin

    def turn(self) -> None:
        for path in ("/v1/subscriptions", "/v1/subscriptions/ox", "/readyz", "/healthz", "/v1/tokens"):
            self.note(self._admin.get(path))

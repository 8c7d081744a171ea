"""The HTTP API on a free port, with a real nats-server behind it, and plain httpx clients."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from typing import Any, Self, TypeVar

import httpx

from purveyor.app.http.application import Api, ApiOptions
from purveyor.app.http.authentication import Login, Role
from purveyor.app.http.server import ApiServer, listen
from purveyor.app.process_setup import event_loop_factory
from purveyor.app.wiring import build_api
from purveyor.jetstream import bulk
from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk.net.pool import request_api
from purveyor.queues.client import Queues, connect
from purveyor.queues.registry import Registry
from tests.support.waiting import PATIENCE_SECONDS, wait_until

LOGINS = (
    Login(role=Role.ADMIN, username="admin", password="admin-secret"),
    Login(role=Role.EVENTS, username="events", password="events-secret"),
    Login(role=Role.PREFILL, username="prefill", password="prefill-secret"),
    Login(role=Role.EVENTS, username="shop", password="shop-secret", realms=frozenset({"shop"})),
)


T = TypeVar("T")


PASSWORD = "the consumer's secret"


class RunningApi:
    """The API in a thread with its own event loop."""

    def __init__(
        self,
        find_address: Callable[[], Address],
        *,
        patience_seconds: float = 60.0,
        options: Mapping[str, Any] | None = None,
        **server: Any,
    ) -> None:
        self._given = server
        self._options = ApiOptions(
            find_address=find_address, logins=LOGINS, patience_seconds=patience_seconds, **(options or {})
        )
        self._listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._loop: asyncio.AbstractEventLoop
        self._api: Api
        self._server: ApiServer
        self._clients: list[httpx.Client] = []
        self.anybody: httpx.Client

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._api = build_api(self._options)
        self._server = ApiServer(self._api, on_ready=self._ready.set, **self._given)
        await self._server.serve([self._listener])

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(PATIENCE_SECONDS)
        self.anybody = self.client()
        return self

    def when_ready(self) -> Self:
        """Wait until the API has reached the NATS server."""
        wait_until(lambda: self.anybody.get("/readyz").status_code == 200)
        return self

    @property
    def under_way(self) -> int:
        """Return the number of requests that the server has not answered yet."""
        return len(self._server.server_state.tasks)

    def __exit__(self, *_: object) -> None:
        for client in self._clients:
            client.close()
        self.stop()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._server.stop)
            self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive()
        self._listener.close()

    def change_password(self, user: str, password: str) -> None:
        """Change the password of a login in the settings before the start."""
        logins = [replace(login, password=password) if login.username == user else login for login in LOGINS]
        self._options = replace(self._options, logins=logins)

    def forget_logins(self) -> None:
        """Drop the cached logins, as the API does when the NATS server was away."""

        async def forget() -> None:
            self._api.authenticator.invalidate(None)

        asyncio.run_coroutine_threadsafe(forget(), self._loop).result(PATIENCE_SECONDS)

    def in_its_loop(self, work: Callable[[Api], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine in the event loop of the API."""
        return asyncio.run_coroutine_threadsafe(work(self._api), self._loop).result(PATIENCE_SECONDS)

    def client(self, user: str = "", password: str = "", **more: Any) -> httpx.Client:
        auth = (user, password) if user else None
        # Without TLS there is nothing to verify, and loading all authorities takes longer than a request.
        new = httpx.Client(base_url=self.url, auth=auth, timeout=60, trust_env=False, verify=False, **more)
        self._clients.append(new)
        return self._clients[-1]


def wanted(name: str, **more: Any) -> dict[str, Any]:
    """Return the request body of a subscription."""
    return {
        "name": name,
        "realms_topics": [{"realm": "udm", "topic": "users/user"}],
        "request_prefill": False,
        "password": PASSWORD,
        **more,
    }


def event(number: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "publisher_name": "hr",
        "ts": "2026-01-01T12:00:00+00:00",
        "realm": "udm",
        "topic": "users/user",
        "body": {"old": {}, "new": {"uuid": f"u-{number}", "number": number}},
        **more,
    }


class Consumer:
    """A client that is logged in as a subscription; paths are relative to it."""

    def __init__(self, client: httpx.Client, name: str) -> None:
        self.client = client
        self.name = name

    def call(self, method: str, path: str = "", **more: Any) -> httpx.Response:
        return self.client.request(method, f"/v1/subscriptions/{self.name}" + (f"/{path}" if path else ""), **more)

    def get(self, path: str = "", **more: Any) -> httpx.Response:
        return self.call("GET", path, **more)

    def post(self, path: str, **more: Any) -> httpx.Response:
        return self.call("POST", path, **more)

    def patch(self, path: str = "", **more: Any) -> httpx.Response:
        return self.call("PATCH", path, **more)

    def next(self, instance: str | None = None, **params: Any) -> Any:
        """Return the next message; do not wait unless a timeout is given."""
        headers = {} if instance is None else {"X-Consumer-Instance": instance}
        answer = self.get("messages/next", params={"timeout": 0, **params}, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def set_status(self, sequence: int, instance: str | None = None, **body: Any) -> httpx.Response:
        headers = {} if instance is None else {"X-Consumer-Instance": instance}
        return self.patch(f"messages/{sequence}/status", json=body, headers=headers)


def subscribe(api: RunningApi, admin: httpx.Client, name: str, **more: Any) -> Consumer:
    assert admin.post("/v1/subscriptions", json=wanted(name, **more)).status_code == 201
    return Consumer(api.client(name, PASSWORD), name)


def fill(address: Address, name: str, numbers: Iterable[int], kind: str = "main", **more: Any) -> None:
    """Write messages to a queue as the pipeline does, one for each number."""
    messages: list[bulk.Outgoing] = [
        (
            f"{name}.{kind}",
            json.dumps(event(number, **more)).encode(),
            {"Purveyor-Position": str(number), "Purveyor-Id": f"event-{number}"},
            f"{name}-{kind}-{number}",
        )
        for number in numbers
    ]
    bulk.publish_many(address, bulk.outgoing(messages))


def on_server(address: Address, work: Callable[[Queues], Awaitable[T]]) -> T:
    """Run a coroutine with a connection to the NATS server, without the API."""

    async def connected() -> T:
        async with connect(address, name="tests", patience_seconds=60) as queues:
            return await work(queues)

    return asyncio.run(connected())


def begin_replay(address: Address, name: str, job: str) -> None:
    """Begin a replay as a prefill worker does: from then on another one may be requested."""

    async def forget(queues: Queues) -> None:
        await (await Registry.open(queues)).waiting_replays.forget(name, job)

    on_server(address, forget)


def problem(answer: httpx.Response, status: int) -> dict[str, Any]:
    """Assert that a response is an error as application/problem+json, and return its body."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = answer.json()
    assert body["status"] == status
    assert body["detail"]
    assert body["fix"]
    return body


def read_incoming_rows(address: Address, first: int, last: int) -> list[dict[str, Any]]:
    return [row for batch in bulk.read_range(address, "stream:incoming", first, last) for row in batch.to_pylist()]


def read_incoming(address: Address, position: int) -> dict[str, Any]:
    return read_incoming_rows(address, position, position)[0]


def count(address: Address) -> int:
    return int(request_api(address, "STREAM.INFO.stream:incoming")["state"]["last_seq"])

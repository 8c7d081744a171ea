"""Faults of the pipeline and of `purveyor up`, as the guide to troubleshooting describes them: on one real `up`."""

import asyncio
import re
import tomllib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from purveyor.app.console.snapshot import Collector
from purveyor.app.console.time_series import History
from purveyor.app.http.application import ApiOptions
from purveyor.app.wiring import open_services
from purveyor.delivery.credentials import PasswordHasher
from purveyor.jetstream.address import Address
from purveyor.jetstream.server import find_running_server
from purveyor.queues.client import Queues, connect
from tests.support.command_line import invoke
from tests.support.fault_guide import FaultCheck, faults_of
from tests.support.faulty_system import NO_PIPELINE, alerts, conditions_later, doctor, readiness
from tests.support.processes import descendants, suspended
from tests.support.up_program import Up
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.first, pytest.mark.timeout(1200)]
T = TypeVar("T")
_PROBLEM = re.compile(r"^(problem|died|killed|full|waiting): | ERROR ")
"""Lines of the log that are no part of normal life."""
TOPICS = [{"realm": "udm", "topic": "users/user"}]


class UpSystem:
    """A running `purveyor up`."""

    def __init__(self, data: Path, up: Up) -> None:
        self.data, self.up = data, up
        ready = up.wait_for("ready", "API")
        up.wait_for("up", "everything")
        passwords = tomllib.loads(Path(ready["passwords"]).read_text())
        self.client = httpx.Client(base_url=ready["url"], timeout=60, trust_env=False)
        self._admin = ("admin", passwords["admin_password"])
        self._events = ("events", passwords["events_password"])
        self._history = History()
        self._published = 0

    @property
    def address(self) -> Address:
        found = find_running_server(self.data / "nats")
        assert found is not None
        return found

    def subscribe(self, name: str, **more: Any) -> None:
        body = {"name": name, "realms_topics": TOPICS, "password": f"{name}-password", **more}
        added = self.client.post("/v1/subscriptions", json=body, auth=self._admin)
        assert added.status_code == 201, added.text

    def delete(self, name: str) -> None:
        assert self.client.delete(f"/v1/subscriptions/{name}", auth=self._admin).status_code == 200

    def publish(self, count: int = 1) -> None:
        for _ in range(count):
            self._published += 1
            event = {"publisher_name": "hr", "ts": "2026-01-01T00:00:00Z", "realm": "udm", "topic": "users/user"}
            body = {"old": {}, "new": {"uuid": f"u-{self._published}"}}
            assert self.client.post("/v1/messages", json={**event, "body": body}, auth=self._events).status_code == 202

    def is_well(self) -> bool:
        return not [text for text in self.doctor(0.0) if text.startswith("wrong: ") and not self.is_background(text)]

    def console(self, minutes: float) -> list[str]:
        return asyncio.run(self._read_console(minutes))

    async def _read_console(self, minutes: float) -> list[str]:
        options = ApiOptions(find_address=lambda: self.address, logins=())
        async with (
            connect(self.address, name="tests", patience_seconds=5) as queues,
            open_services(queues, hasher=PasswordHasher(), options=options) as services,
        ):
            snapshot = await Collector(lambda: services).read()
        return alerts(snapshot, self._history, minutes)

    def doctor(self, minutes: float) -> list[str]:
        return asyncio.run(conditions_later(self.address, minutes)) if minutes else doctor(self.data)

    def readyz(self) -> list[str]:
        return readiness(self.client)

    def log(self, since: float) -> list[str]:
        """Return what `up` printed, and the log of the pipeline."""
        printed = [f"{each['event']}: {each['part']}: {each.get('detail')}" for each in self.up.events]
        files = (self.data / "logs").glob("pipeline*.log")
        return [*printed, *(line for file in files for line in file.read_text(errors="replace").splitlines())]

    def page(self) -> str:
        return self.client.get("/metrics").text

    def is_background(self, text: str) -> bool:
        is_finding = text.startswith(("red: ", "wrong: ", "warning: "))
        return bool(NO_PIPELINE.search(text)) or not (is_finding or _PROBLEM.search(text))

    def on_server(self, work: Callable[[Queues], Awaitable[T]]) -> T:
        async def connected() -> T:
            async with connect(self.address, name="tests", patience_seconds=60) as queues:
                return await work(queues)

        return asyncio.run(connected())


@pytest.fixture
def system(tmp_path: Path) -> Iterator[UpSystem]:
    up = Up(tmp_path / "data", "--master", "local[2]")
    try:
        running = UpSystem(tmp_path / "data", up)
        yield running
        running.client.close()
    finally:
        up.close()


def test_each_fault_of_a_running_up_shows(system: UpSystem, request: pytest.FixtureRequest) -> None:
    """One `up` for all of them: it takes half a minute to start."""
    steps = {
        "Another up uses the data directory": _another_up,
        "Dispatch cannot read an event": _a_poison_event,
        "The API is frozen": _a_frozen_api,
        "The JVM is frozen": _a_frozen_jvm,
        "The queue of a subscription is full": _a_full_queue,
        "A prefill fails": _a_prefill_fails,
    }
    faults = faults_of(request)
    assert set(faults) == set(steps)
    for title, step in steps.items():
        step(faults[title], system)
        assert not faults[title].unchecked, title


def _another_up(fault: FaultCheck, system: UpSystem) -> None:
    outcome = invoke("--data-dir", str(system.data), "up", "--port", "0")
    assert outcome.code == 1
    fault.shows(system, log=[outcome.err])


def _a_poison_event(fault: FaultCheck, system: UpSystem) -> None:
    before = system.page()

    async def publish(queues: Queues) -> None:
        await queues.publish("incoming", b"this is no event", msg_id="poison")

    system.on_server(publish)
    fault.shows(system, before=before)


def _a_full_queue(fault: FaultCheck, system: UpSystem) -> None:
    async def limit(queues: Queues) -> None:
        await queues.streams.update("stream:mail", {"max_msgs": 1, "discard": "new"})

    system.subscribe("mail")
    system.on_server(limit)
    system.publish(5)
    fault.shows(system, "mail")
    system.delete("mail")


def _a_prefill_fails(fault: FaultCheck, system: UpSystem) -> None:
    files = wait_until(lambda: sorted((system.data / "archive" / "events").glob("*/*.parquet")))
    before = {path: path.read_bytes() for path in files}
    for path in files:
        path.write_bytes(b"this is no Parquet file")
    system.subscribe("late", request_prefill=True)
    fault.shows(system, "late")
    for path, content in before.items():
        path.write_bytes(content)
    system.delete("late")


def _a_frozen_jvm(fault: FaultCheck, system: UpSystem) -> None:
    (jvm,) = descendants(system.up.process.pid, "org.apache.spark.deploy.SparkSubmit")
    with suspended(jvm):
        system.publish(3)
        fault.shows(system)
    wait_until(system.is_well)


def _a_frozen_api(fault: FaultCheck, system: UpSystem) -> None:
    with suspended(system.up.pid_of("serve api")):
        fault.shows(system)

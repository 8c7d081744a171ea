"""A deployment without a pipeline in which tests cause faults: a nats-server, the API, and perhaps a push worker."""

import asyncio
import json
import logging
import re
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import httpx

from purveyor.app.console.alert_groups import all_alerts
from purveyor.app.console.alerts import Level
from purveyor.app.console.snapshot import Collector, SystemSnapshot, recorded_numbers
from purveyor.app.console.time_series import History
from purveyor.app.doctor.conditions import judge
from purveyor.app.doctor.machine_checks import Finding
from purveyor.app.doctor.observation import observe
from purveyor.app.http.application import Api
from purveyor.app.http.context import Services
from purveyor.app.running_parts import API, NATS, announce
from purveyor.app.subscription_input import PushInput
from purveyor.delivery.push.egress_policy import parse_ranges
from purveyor.jetstream.address import Address
from purveyor.jetstream.server import EmbeddedServer, ServerEvent, ServerOptions
from purveyor.queues.client import connect
from purveyor.queues.permissions import component_users
from purveyor.queues.registry import Snapshot, read_snapshot
from tests.support.command_line import PROGRAM, invoke
from tests.support.processes import environment
from tests.support.running_api import RunningApi
from tests.support.waiting import PATIENCE_SECONDS, wait_until

LEVELS = {Level.STUCK: "red", Level.WARNING: "warning", Level.NOTE: "note", Level.FINE: "fine"}
NO_PIPELINE = re.compile(
    r"[Nn]o pipeline|GiB are free|NATS user of|writes messages to disk up to|^(started|stopped|ready): "
)
"""What a deployment without a pipeline, on the disk of this machine, shows without any other fault."""


class Records(logging.Handler):
    """Keeps the log of this process."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.note(record.getMessage())

    def note(self, text: str) -> None:
        self.lines.append((time.monotonic(), text))


class PushProcess:
    """`purveyor serve push` with its output."""

    def __init__(self, data: Path) -> None:
        words = ("--data-dir", str(data), "serve", "push", "--allow", "127.0.0.0/8")
        self.process = subprocess.Popen(
            [*PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment()
        )
        self.lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        wait_until(lambda: any("ready" in line for _, line in self.lines))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line))

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE_SECONDS)
        self._reader.join(PATIENCE_SECONDS)
        assert self.process.stdout is not None
        self.process.stdout.close()


class FaultySystem:
    """A nats-server and the API on one data directory."""

    def __init__(self, data: Path, options: ServerOptions | None = None) -> None:
        self.data = data
        self._options = options or ServerOptions(sync="2m", users=component_users())
        self._stack = ExitStack()
        self._records = Records()
        self.push: PushProcess | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            server = EmbeddedServer(self.data / "nats", self._options, on_event=self._note)
            self.server = stack.enter_context(server)
            stack.enter_context(announce(self.data, NATS))
            anywhere = PushInput(allowed=parse_ranges(["0.0.0.0/0"]))  # the push worker refuses what it must not reach
            self.api = stack.enter_context(
                RunningApi(lambda: self.server.address, patience_seconds=1, options={"push": anywhere})
            )
            self.api.when_ready()
            stack.enter_context(announce(self.data, API, url=self.api.url))
            self.admin = self.api.client("admin", "admin-secret")
            self.events = self.api.client("events", "events-secret")
            self._collector = self.api.in_its_loop(_collector)
            logging.getLogger("purveyor").addHandler(self._records)
            stack.callback(logging.getLogger("purveyor").removeHandler, self._records)
            stack.callback(self.stop_push)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _note(self, event: ServerEvent) -> None:
        self._records.note(f"{event.kind.value}: NATS: {event.detail}")

    def start_push(self) -> None:
        """Start a push worker, unless one runs."""
        if self.push is None:
            self.push = PushProcess(self.data)

    def stop_push(self) -> None:
        if self.push is not None:
            self.push.stop()
            self.push = None

    @property
    def address(self) -> Address:
        return self.server.address

    def console(self, minutes: float) -> list[str]:
        collector = self._collector

        async def read(_: Api) -> SystemSnapshot:
            return await collector.read(fresh=True)

        return alerts(self.api.in_its_loop(read), collector.history, minutes)

    def doctor(self, minutes: float) -> list[str]:
        if not minutes:
            return doctor(self.data)
        return asyncio.run(conditions_later(self.address, minutes))

    def readyz(self) -> list[str]:
        return readiness(self.api.anybody)

    def log(self, since: float) -> list[str]:
        lines = [*self._records.lines, *(self.push.lines if self.push is not None else ())]
        return [text for at, text in lines if at >= since]

    def page(self) -> str:
        return self.api.anybody.get("/metrics").text

    def is_background(self, text: str) -> bool:
        return bool(NO_PIPELINE.search(text))


async def _collector(api: Api) -> Collector:
    def services() -> Services:
        return api.services

    return Collector(services)


def alerts(snapshot: SystemSnapshot, history: History, minutes: float) -> list[str]:
    """Return the alerts of the console; with `minutes`, those of a system that stays for so long as it is."""
    if minutes:
        later = timedelta(minutes=minutes)
        pipelines = tuple(replace(each, at=each.at + later) for each in snapshot.pipelines)
        snapshot, history = replace(snapshot, at=snapshot.at + later, pipelines=pipelines), History()
        for share in (1.0, 0.5, 0.0):
            history.add(snapshot.at.timestamp() - share * later.total_seconds(), recorded_numbers(snapshot))
    return [f"{LEVELS[each.level]}: {each.title}. {each.reason}. {each.next}" for each in all_alerts(snapshot, history)]


def findings(found: Sequence[Finding]) -> list[str]:
    return [f"{each.weight.value}: {each.about}: {each.text}. Fix: {each.fix}" for each in found]


def doctor(data: Path, *flags: str) -> list[str]:
    """Run `purveyor doctor`, and return its findings."""
    outcome = invoke("--data-dir", str(data), *flags, "doctor", "--json")
    found: list[dict[str, Any]] = json.loads(outcome.out)["findings"]
    wrong = any(each["weight"] == "wrong" for each in found)
    assert outcome.code == (1 if wrong else 0), outcome
    return [f"{each['weight']}: {each['about']}: {each['text']}. Fix: {each.get('fix')}" for each in found]


async def conditions_later(address: Address, minutes: float) -> list[str]:
    """Return what `doctor` says about a deployment that stays for some time as it is."""
    async with connect(address, name="tests", patience_seconds=60) as queues:
        usages = await queues.streams.usage()
        seen = await observe(queues, await read_snapshot(queues, Snapshot()), usages)
    later = timedelta(minutes=minutes)
    aged = replace(
        seen,
        at=seen.at + later,
        pipelines=[replace(each, at=each.at + later) for each in seen.pipelines],
        push_workers=[replace(each, at=each.at + later) for each in seen.push_workers],
    )
    return findings([each.finding() for each in judge(aged)])


def readiness(client: httpx.Client) -> list[str]:
    """Return the status and the texts of `/readyz`."""
    answer = client.get("/readyz")
    body = answer.json()
    texts = [each["text"] for each in body.get("degraded", ())]
    return [f"{answer.status_code} {body.get('status')}", *texts, str(body.get("detail", "")), str(body.get("fix", ""))]


class StoppedSystem:
    """A data directory on which nothing runs: only `doctor` and the output of commands say something."""

    def __init__(self, data: Path) -> None:
        self._data = data

    def console(self, minutes: float) -> list[str]:
        raise AssertionError("there is no console")

    def doctor(self, minutes: float) -> list[str]:
        return doctor(self._data)

    def readyz(self) -> list[str]:
        raise AssertionError("there is no API")

    def log(self, since: float) -> list[str]:
        return []

    def page(self) -> str:
        raise AssertionError("there are no metrics")

    def is_background(self, text: str) -> bool:
        return bool(NO_PIPELINE.search(text))

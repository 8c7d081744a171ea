"""One event on its way from `POST /v1/messages` to the answer of a consumer's long poll, through `purveyor up`.

The peer is the bare copy of one message through Spark, from the source to the sink, on a server of the same kind. The
first event after `ready`, a steady rate and a nearly idle system are measured in one run of `up`, and the processor
time and memory of each of its processes while nothing happens.
"""

import asyncio
import base64
import contextlib
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.api import free_port, nats_url
from benchmarks.http_client import HttpConnection
from benchmarks.ldap_source import serving
from benchmarks.report import Row, Section, machine_load
from benchmarks.spark import probe
from benchmarks.spark_probe import cpu_seconds
from purveyor.jetstream.address import Address
from purveyor.jetstream.server import EmbeddedServer

BUSY_RATE: Final = 15.0
IDLE_INTERVAL_SECONDS: Final = 1.5
_WARM_SECONDS: Final = 60.0
_BUSY_EVENTS: Final = 600
_IDLE_EVENTS: Final = 60
_REST_SECONDS: Final = 20.0
_SETTLE_SECONDS: Final = 5.0
_PATIENCE_SECONDS: Final = 60.0
_NAME: Final = "bench"
_PASSWORD: Final = "bench-secret"
_MASTER: Final = "local[2]"


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """What one process costs while no event comes."""

    name: str
    cores: float
    memory_mb: float


@dataclass
class Found:
    """The latencies in milliseconds."""

    first: float = 0.0
    busy: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    rest: list[ProcessUse] = field(default_factory=list)


def run(_address: Address, *, warm_seconds: float = _WARM_SECONDS, busy_events: int = _BUSY_EVENTS) -> list[Section]:
    """Measure on servers of their own, which sync every write as they do by default."""
    with tempfile.TemporaryDirectory() as directory, EmbeddedServer(Path(directory) / "store") as server:
        bare = probe(server.address, "tuned", "latency")["single"]["p50"]
    with tempfile.TemporaryDirectory() as directory, EmbeddedServer(Path(directory) / "store") as server:
        port, url = free_port(), nats_url(server.address)
        passwords = {f"PURVEYOR_{who}_PASSWORD": _PASSWORD for who in ("ADMIN", "EVENTS", "PREFILL")}
        arguments = ("up", "--json", "--port", str(port), "--master", _MASTER)
        with serving(Path(directory) / "data", arguments, url, **passwords) as up:
            _wait_until_ready(up)
            found = asyncio.run(_Measurement(f"http://127.0.0.1:{port}", up.pid).run(warm_seconds, busy_events))
    return [_section(found, bare), _rest_section(found.rest)]


def _wait_until_ready(up: "subprocess.Popen[str]") -> None:
    assert up.stdout is not None
    for line in up.stdout:
        event = json.loads(line)
        if (event["event"], event.get("part")) == ("up", "everything"):
            return
    raise RuntimeError("up ended before it was ready")


def _section(found: Found, bare: float) -> Section:
    busy, late, idle = statistics.median(found.busy), _percentile(found.busy, 99), statistics.median(found.idle)
    rows = [
        Row("POST to long poll at 15 events/s, p50 / bare copy of one message", busy, bare, "ms", at_most=1.35),
        Row("the same, p99 / p50", late, busy, "ms", at_most=2.5),
        Row("one event every 1.5 s, p50 / p50 at 15 events/s", idle, busy, "ms", at_most=1.15),
        Row("one event every 1.5 s, p99 / p50", _percentile(found.idle, 99), idle, "ms"),
        Row("first event after ready / p50 at 15 events/s", found.first, busy, "ms", at_most=3),
    ]
    words = (
        f"`purveyor up` on {_MASTER}, on a server that syncs every write; one subscription, one consumer with a long "
        f"poll. The first event comes {_SETTLE_SECONDS:g} s after the subscription was added to a system that was just "
        f"ready; then {len(found.busy)} events at {BUSY_RATE:g} per second after a minute of the same, then "
        f"{len(found.idle)} events, one every {IDLE_INTERVAL_SECONDS:g} s. The bare copy is a Spark query from the "
        "`jetstream` source to the sink, p50 of 100 messages one at a time, right before. The machine was "
        f"{machine_load()}."
    )
    return Section("Latency: POST to long poll", words, rows)


def _rest_section(processes: list[ProcessUse]) -> Section:
    cores = sum(each.cores for each in processes)
    memory = sum(each.memory_mb for each in processes)
    rows = [Row("all processes: processor / one core", cores, 1.0, "cores")]
    for name in dict.fromkeys(each.name for each in processes):
        alike = [each for each in processes if each.name == name]
        used, note = sum(each.memory_mb for each in alike), f"{sum(each.cores for each in alike):.3f} cores"
        rows.append(Row(f"{name} ({len(alike)}): memory / all processes", used, memory, "MB", note=note))
    words = (
        f"`purveyor up` for {_REST_SECONDS:g} s without an event, after the run above, without the NATS server. Memory "
        "is the proportional set size: pages that processes share count once."
    )
    return Section("Latency: an idle system", words, rows)


def _percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


class _Measurement:
    """One publisher and one consumer of the API."""

    def __init__(self, base: str, up: int) -> None:
        self._base = base
        self._up = up
        self._sent: dict[int, float] = {}
        self._taken: dict[int, float] = {}
        self._arrived = asyncio.Event()
        self._number = 0

    async def run(self, warm_seconds: float, busy_events: int) -> Found:
        """Measure the first event, the steady rate, the nearly idle system, and the system at rest."""
        self._consumer = await HttpConnection.open(self._base)
        self._publisher = await HttpConnection.open(self._base)
        await self._subscribe()
        consuming = asyncio.create_task(self._consume())
        found = Found()
        try:
            await asyncio.sleep(_SETTLE_SECONDS)  # the subscription begins with an event of its own
            [found.first] = await self._publish(1, 0.0)
            await self._publish(round(warm_seconds * BUSY_RATE), 1 / BUSY_RATE)
            found.busy = await self._publish(busy_events, 1 / BUSY_RATE)
            print(f"latency: first {found.first:.0f} ms, busy {statistics.median(found.busy):.0f} ms", flush=True)
            await asyncio.sleep(5 * IDLE_INTERVAL_SECONDS)
            found.idle = await self._publish(_IDLE_EVENTS, IDLE_INTERVAL_SECONDS)
            print(f"latency: idle {statistics.median(found.idle):.0f} ms", flush=True)
            await asyncio.sleep(5 * IDLE_INTERVAL_SECONDS)
            found.rest = await asyncio.to_thread(_measure_rest, self._up)
        finally:
            consuming.cancel()
            self._consumer.close()
            self._publisher.close()
        return found

    async def _publish(self, events: int, interval: float) -> list[float]:
        """Publish events at an interval; return how long each was on its way, in milliseconds."""
        began, first = time.perf_counter(), self._number
        for number in range(events):
            await asyncio.sleep(max(0.0, began + number * interval - time.perf_counter()))
            body = {
                "publisher_name": "bench",
                "ts": "2026-01-01T00:00:00+00:00",
                "realm": "bench",
                "topic": "bench/0",
                "body": {"old": {}, "new": {"number": self._number, "text": "x" * 700}},
            }
            self._sent[self._number] = time.perf_counter()
            self._number += 1
            status, answer = await self._publisher.request(
                "POST", "/v1/messages", _login("events"), json.dumps(body).encode()
            )
            assert status == 202, answer
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while len(self._taken) < self._number:
                self._arrived.clear()
                await self._arrived.wait()
        return [1000 * (self._taken[each] - self._sent[each]) for each in range(first, self._number)]

    async def _consume(self) -> None:
        path = f"/v1/subscriptions/{_NAME}/messages"
        while True:
            status, answer = await self._consumer.request("GET", f"{path}/next?timeout=10", _login(_NAME))
            received = time.perf_counter()
            assert status == 200, answer
            message = json.loads(answer)
            if message is None:
                continue
            self._taken[message["body"]["new"]["number"]] = received
            self._arrived.set()
            done = f"{path}/{message['sequence_number']}/status"
            status, answer = await self._consumer.request("PATCH", done, _login(_NAME), b'{"status": "ok"}')
            assert status == 200, answer

    async def _subscribe(self) -> None:
        wanted = [{"realm": "bench", "topic": "bench/0"}]
        body = {"name": _NAME, "realms_topics": wanted, "password": _PASSWORD}
        login = _login("admin")
        status, answer = await self._publisher.request("POST", "/v1/subscriptions", login, json.dumps(body).encode())
        assert status == 201, answer


def _measure_rest(up: int) -> list[ProcessUse]:
    before, began = cpu_seconds(up), time.perf_counter()
    time.sleep(_REST_SECONDS)
    after, seconds = cpu_seconds(up), time.perf_counter() - began
    found = []
    for pid, spent in after.items():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            found.append(ProcessUse(_name(pid), (spent - before.get(pid, 0.0)) / seconds, _proportional_mb(pid)))
    return sorted(found, key=lambda each: -each.memory_mb)


def _proportional_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def _name(pid: int) -> str:
    """Return what a process is, from its command line."""
    words = Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")
    if Path(words[0]).name == "java":
        return "JVM"
    module = next((each for each in words if each.startswith("pyspark.")), None)
    if module is not None:
        return f"Python of Spark ({module.rpartition('.')[2]})"
    known = [each for each in words[1:] if each in {"up", "serve", "api", "pipeline", "push", "ldap", "nats"}]
    return " ".join(["purveyor", *known])


def _login(user: str) -> Mapping[str, str]:
    token = base64.b64encode(f"{user}:{_PASSWORD}".encode()).decode()
    return {"Authorization": f"Basic {token}", "Content-Type": "application/json"}

"""Compare push with a plain httpx loop, and with its own HTTP client without a queue, to the same endpoint.

The worker is `purveyor serve push` in its own process, and so is the endpoint. PURVEYOR_BENCH_SHORT makes every
measurement smaller, to check that the benchmark runs.
"""

import asyncio
import json
import os
import socket
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import httpx
import uvloop

from benchmarks.api import free_port, memory_mb, nats_url, start_process
from benchmarks.report import Row, Section
from purveyor.delivery.push.egress_policy import parse_ranges
from purveyor.delivery.push.endpoint_pool import EndpointHealth, EndpointSender
from purveyor.delivery.push.http_pool import HttpPool
from purveyor.delivery.push.push_request import PushSecrets, SecretCipher
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.delivery.transitions import DeliveredMessage
from purveyor.jetstream import publish_many
from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import outgoing
from purveyor.jetstream.headers import POSITION
from purveyor.model.delivery_policy import Delivery, Push
from purveyor.model.delivery_state import SubjectKind
from purveyor.model.registration import Record, RecordState
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.queues.client import Queues, connect

SHORT: Final = bool(os.environ.get("PURVEYOR_BENCH_SHORT"))
SIZE: Final = 800
PUSHES: Final = 5_000 if SHORT else 50_000
SLOW_PUSHES: Final = 2_000 if SHORT else 10_000
HEALTHY: Final = 20 if SHORT else 100
EACH: Final = 100 if SHORT else 300
IDLE: Final = 200 if SHORT else 10_000
_ROUNDS: Final = 1 if SHORT else 3
_SEQUENTIAL: Final = 500 if SHORT else 3_000
_SEQUENTIAL_SLOW: Final = 20 if SHORT else 60
_CONCURRENT_REQUESTS: Final = 256
_IDLE_SECONDS: Final = 5 if SHORT else 30
_WAIT_SECONDS: Final = 600


def run(address: Address) -> list[Section]:
    """Measure the push rates."""
    return _run_with_worker(address, _measure)


def idle(address: Address) -> list[Section]:
    """Measure what idle subscriptions cost."""
    return _run_with_worker(address, _measure_idle)


def _run_with_worker(
    address: Address, measure: Callable[[Address, str, int], Awaitable[list[Section]]]
) -> list[Section]:
    port = free_port()
    with tempfile.TemporaryDirectory() as directory:
        settings = {
            "PURVEYOR_NATS_URL": nats_url(address),
            "PURVEYOR_DATA_DIR": directory,
            "PURVEYOR_PUSH_ALLOW": "127.0.0.1",
        }
        serve = ("-c", "from purveyor.app.cli import main; main()", "serve", "push")
        with (
            start_process(("-m", "benchmarks.push_endpoint", str(port)), {}),
            start_process(serve, settings) as worker,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            return runner.run(_await(measure(address, f"http://127.0.0.1:{port}", worker.pid)))


async def _await(sections: Awaitable[list[Section]]) -> list[Section]:
    return await sections


async def _measure(address: Address, base: str, _: int) -> list[Section]:
    await asyncio.to_thread(_wait_until_up, base)
    async with connect(address, name="bench", patience_seconds=60) as queues, httpx.AsyncClient() as client:
        bench = _Bench(address, queues, Subscriptions(queues), base, client)
        for name, path in (("fast", "/in"), ("slow", "/slow")):
            await bench.add(name, path)
        pushed, bare, one = await _rates(bench)
        slow = await bench.push("slow", SLOW_PUSHES)
        slow_one = await asyncio.to_thread(_sequential, f"{base}/slow", _SEQUENTIAL_SLOW)
        print(f"push: 50 ms: {slow:,.0f}/s, one at a time {slow_one:,.0f}/s", flush=True)
        alone, beside = await _with_dead_endpoint(bench)
    description = (
        f"Messages of {SIZE} bytes to an aiohttp endpoint on the same machine; {PUSHES:,} of them, with 50 ms "
        f"{SLOW_PUSHES:,}. Best of {_ROUNDS} rounds in which all take turns. The client alone sends the same requests, "
        f"built beforehand, {_CONCURRENT_REQUESTS} at a time."
    )
    rows = [
        Row("push / one at a time with httpx", pushed, one, at_least=5),
        Row("push / the same HTTP client without a queue", pushed, bare, at_least=0.5),
        Row("endpoint takes 50 ms / one at a time", slow, slow_one, at_least=20),
        Row(f"{HEALTHY} subscriptions, beside a dead endpoint / without it", beside, alone, at_least=0.9),
    ]
    return [Section("Push", description, rows)]


async def _measure_idle(address: Address, base: str, pid: int) -> list[Section]:
    await asyncio.to_thread(_wait_until_up, base)
    async with connect(address, name="bench", patience_seconds=60) as queues, httpx.AsyncClient() as client:
        bench = _Bench(address, queues, Subscriptions(queues), base, client)
        await bench.add("one")
        await bench.push("one", 100)
        found = await _idle(bench, pid)
    description = (
        f"A worker with {IDLE:,} registered subscriptions, compared with one. Their queues do not exist, because "
        f"nothing was written to them. CPU is measured for {_IDLE_SECONDS} s after the worker has checked them all."
    )
    rows = [
        Row(f"memory with {IDLE:,} idle subscriptions / with one", found.after, found.before, "MB"),
        Row(f"CPU with {IDLE:,} idle subscriptions / one core", found.cpu, 1.0, "cores", note=f"{found.cpu:.1%}"),
    ]
    return [Section("Push: idle", description, rows)]


@dataclass(slots=True)
class _Bench:
    address: Address
    queues: Queues
    subscriptions: Subscriptions
    base: str
    client: httpx.AsyncClient
    written: int = 1

    async def add(self, name: str, path: str = "/in", base: str | None = None) -> None:
        await self.subscriptions.add(_definition(name, f"{base or self.base}{path}"))

    async def push(self, name: str, count: int) -> float:
        """Return the rate for a backlog, from the resume of the subscription until the endpoint has all messages."""
        await self.subscriptions.pause(name)
        await self.fill((name,), count)
        before = await self.arrived()
        began = time.perf_counter()
        await self.subscriptions.resume(name)
        await self.until(before + count)
        return count / (time.perf_counter() - began)

    async def fill(self, names: Sequence[str], count: int) -> None:
        first, self.written = self.written, self.written + count
        messages = (
            (f"{name}.main", _event(number), {POSITION: str(number)}, f"{name}-{number}")
            for name in names
            for number in range(first, first + count)
        )
        await asyncio.to_thread(publish_many, self.address, outgoing(messages))

    async def arrived(self) -> int:
        return int((await self.client.get(f"{self.base}/")).text)

    async def until(self, count: int) -> None:
        async with asyncio.timeout(_WAIT_SECONDS):
            while await self.arrived() < count:  # noqa: ASYNC110 - the endpoint has to be polled
                await asyncio.sleep(0.05)


async def _rates(bench: _Bench) -> tuple[float, float, float]:
    pushed = bare = one = 0.0
    for turn in range(_ROUNDS):
        one = max(one, await asyncio.to_thread(_sequential, f"{bench.base}/in", _SEQUENTIAL))
        bare = max(bare, await _client_alone(bench.base, PUSHES))
        pushed = max(pushed, await bench.push("fast", PUSHES))
        print(
            f"push: round {turn + 1} of {_ROUNDS}: {pushed:,.0f}/s, client alone {bare:,.0f}/s, httpx {one:,.0f}/s",
            flush=True,
        )
    return pushed, bare, one


def _sequential(url: str, count: int) -> float:
    body, headers = _event(1), {"content-type": "application/json"}
    with httpx.Client() as client:
        client.post(url, content=body, headers=headers)
        began = time.perf_counter()
        for _ in range(count):
            client.post(url, content=body, headers=headers).raise_for_status()
        return count / (time.perf_counter() - began)


async def _client_alone(base: str, count: int) -> float:
    """Return the rate of the HTTP client alone, with as many requests in flight as push may have."""
    push = Push(endpoints=(f"{base}/in",))
    pool = HttpPool(parse_ranges(["127.0.0.1"]))
    sender = EndpointSender(push.targets[0], EndpointHealth(), pool.host(push.targets[0]))
    with tempfile.TemporaryDirectory() as directory:
        sender.configure("fast", push, PushSecrets.decrypt(push, SecretCipher.from_directory(Path(directory))))
    request = sender.build_request(_delivered(_event(1)))
    slots = asyncio.Semaphore(_CONCURRENT_REQUESTS)

    async def post() -> None:
        outcome = await sender.host.post(request, 10.0)
        assert outcome.status == 204, outcome
        slots.release()

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            await slots.acquire()
            group.create_task(post())
    rate = count / (time.perf_counter() - began)
    pool.close()
    return rate


async def _with_dead_endpoint(bench: _Bench) -> tuple[float, float]:
    """Return the rates of many subscriptions, without and with one more whose endpoint is down."""
    names = [f"healthy-{number}" for number in range(HEALTHY)]
    for name in names:
        await bench.add(name)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        await bench.add("dead", base=f"http://127.0.0.1:{closed.getsockname()[1]}")
        await bench.subscriptions.pause("dead")
        await bench.fill(("dead",), EACH)
        rates = [0.0, 0.0]
        for turn in range(_ROUNDS + 1):
            for at, act in enumerate((bench.subscriptions.pause, bench.subscriptions.resume)):
                await act("dead")
                before = await bench.arrived()
                began = time.perf_counter()
                await bench.fill(names, EACH)
                await bench.until(before + EACH * HEALTHY)
                if turn:  # the first turn opens the state writers
                    rates[at] = max(rates[at], EACH * HEALTHY / (time.perf_counter() - began))
        await bench.subscriptions.delete("dead")
    print(f"push: {HEALTHY} subscriptions: {rates[0]:,.0f}/s, beside a dead endpoint {rates[1]:,.0f}/s", flush=True)
    return rates[0], rates[1]


@dataclass(frozen=True, slots=True)
class _Idle:
    before: float
    after: float
    cpu: float


async def _idle(bench: _Bench, pid: int) -> _Idle:
    """Measure memory and CPU of a worker with many idle subscriptions."""
    before = memory_mb(pid)
    registry = await bench.subscriptions.registry()
    limit = asyncio.Semaphore(50)

    async def add(number: int) -> None:
        definition = _definition(f"idle-{number}", f"{bench.base}/in")
        record = Record(incarnation=str(uuid.uuid4()), definition=definition, created=datetime.now(UTC), begin=1)
        async with limit:
            await registry.create(replace(record, state=RecordState.ACTIVE))

    await asyncio.gather(*map(add, range(IDLE)))
    used = _cpu(pid)
    while True:  # until the worker has checked the last one
        await asyncio.sleep(3)
        used, last = _cpu(pid), used
        if used - last < 1.0:
            break
    began, start = _cpu(pid), time.perf_counter()
    await asyncio.sleep(_IDLE_SECONDS)
    share = (_cpu(pid) - began) / (time.perf_counter() - start)
    print(f"push: {IDLE:,} idle: {memory_mb(pid):,.0f} MB, {share:.1%} of a core", flush=True)
    return _Idle(before, memory_mb(pid), share)


def _cpu(pid: int) -> float:
    """Return the seconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _definition(name: str, url: str) -> Subscription:
    topics = (RealmTopic("udm", "none"),)
    push = Push(endpoints=(url,))
    return Subscription(name=name, realms_topics=topics, delivery=Delivery.PUSH, order_by=None, push=push)


def _event(number: int) -> bytes:
    new = {"uuid": f"{number:032x}", "username": f"user{number}", "description": ""}
    event = {"publisher_name": "bench", "ts": "2026-01-01T00:00:00Z", "realm": "udm", "topic": "bench"}
    complete = {**event, "body": {"old": {}, "new": new}}
    new["description"] = "x" * (SIZE - len(json.dumps(complete)))
    return json.dumps(complete).encode()


def _delivered(data: bytes) -> DeliveredMessage:
    return DeliveredMessage(
        sequence=1, position=1, kind=SubjectKind.MAIN, data=data, headers={}, num_delivered=1, lease=None, until=None
    )


def _wait_until_up(base: str) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            httpx.get(f"{base}/")
        except httpx.HTTPError:
            time.sleep(0.1)
        else:
            return
    raise RuntimeError("the endpoint did not come up")

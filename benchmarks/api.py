"""Compare the HTTP API with that of the older system (`peer_api`), on the same server in the same run.

Each API runs in its own process. The same client calls both; it keeps its connections and costs little. Each rate is
the best of several rounds in which both take turns.
"""

import asyncio
import base64
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import aiohttp
import fastavro
import uvloop

from benchmarks import peer_api
from benchmarks.http_client import HttpConnection
from benchmarks.report import Row, Section
from purveyor.jetstream import publish_many
from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import outgoing

MESSAGE_BYTES: Final = 800
CONSUMER_COUNT: Final = 20
LONG_POLL_COUNT: Final = 500
ROUND_SECONDS: Final = 2.0
ROUND_COUNT: Final = 5
_LEASE_SIZE: Final = 100
POST_SIZE: Final = 1000
PASSWORD: Final = "bench-secret"
_OK: Final = b'{"status": "ok"}'
_READY_TIMEOUT_SECONDS: Final = 60


def run(address: Address) -> list[Section]:
    """Measure the API and return the report."""
    with tempfile.TemporaryDirectory() as directory:
        url = nats_url(address)
        ours_port, peer_port = free_port(), free_port()
        settings = {
            "PURVEYOR_NATS_URL": url,
            "PURVEYOR_DATA_DIR": directory,
            **{f"PURVEYOR_{who}_PASSWORD": PASSWORD for who in ("ADMIN", "EVENTS", "PREFILL")},
        }
        serve = ("-c", "from purveyor.app.cli import main; main()", "serve", "api", "--port", str(ours_port))
        with (
            start_process(serve, settings) as ours,
            start_process(("-m", "benchmarks.peer_api", str(peer_port)), {"NATS_URL": url}),
        ):
            bench = BenchSetup(address, f"http://127.0.0.1:{ours_port}", f"http://127.0.0.1:{peer_port}", ours.pid)
            with asyncio.Runner(
                loop_factory=uvloop.new_event_loop
            ) as runner:  # a fast client: the benchmark measures the server
                return runner.run(_measure(bench))


@dataclass(frozen=True, slots=True)
class BenchSetup:
    """The addresses of the servers, and the process of the API."""

    address: Address
    ours: str
    peer: str
    pid: int


@dataclass(slots=True)
class RequestTimes:
    """The durations of requests in seconds, and the number of errors."""

    seconds: list[float] = field(default_factory=list)
    errors: int = 0

    def at(self, share: float) -> float:
        """Return a percentile in milliseconds."""
        found = sorted(self.seconds)
        return 1000 * found[min(int(len(found) * share), len(found) - 1)]


async def _measure(bench: BenchSetup) -> list[Section]:
    names = [f"bench-{number}" for number in range(CONSUMER_COUNT)]
    async with open_session() as session:
        await wait_until_ready(session, f"{bench.ours}/readyz")
        await wait_until_ready(session, f"{bench.peer}/openapi.json")
        await peer_api.prepare(nats_url(bench.address), names)
        for name in names:
            await subscribe(session, bench.ours, name)
        peers, ours, leased = await _measure_pulls(session, bench, names)
        print("api: long polls", flush=True)
        idle = await _measure_long_polls(bench, names[0])
        print("api: posts", flush=True)
        one_by_one, in_bulk = await _measure_posts(session, bench)
        print("api: posts with schemas", flush=True)
        checked = await _measure_validated_posts(session, bench)
    rows = [
        Row("next + ok, 1 consumer / one at a time", ours[1].rate, peers[1].rate, at_least=10),
        Row(f"lease of {_LEASE_SIZE} + one ok, 1 consumer / one at a time", leased, peers[1].rate, at_least=100),
        Row(
            f"next + ok, {CONSUMER_COUNT} consumers / one at a time",
            ours[CONSUMER_COUNT].rate,
            peers[CONSUMER_COUNT].rate,
            at_least=10,
        ),
        Row(
            f"{CONSUMER_COUNT} consumers: p99 / p50 of a request",
            ours[CONSUMER_COUNT].times.at(0.99),
            ours[CONSUMER_COUNT].times.at(0.5),
            "ms",
            at_most=20,
            note=f"{ours[CONSUMER_COUNT].times.errors} errors",
        ),
        Row(
            f"memory with {LONG_POLL_COUNT} long polls, last round / first",
            idle.during[-1],
            idle.during[0],
            "MB",
            at_most=1.05,
        ),
        Row(f"memory after {LONG_POLL_COUNT} long polls / before", idle.after, idle.before, "MB"),
        Row("POST of 1,000 at once / one by one", in_bulk, one_by_one, "events/s"),
        *(
            Row(f"POST of 1,000 at once with {words} / without a schema", rate, checked[""], "events/s")
            for words, rate in checked.items()
            if words
        ),
    ]
    words = (
        f"Messages of {MESSAGE_BYTES} bytes; next + ok is one GET and one PATCH. The peer makes two connections per "
        "request and gives one message at a time; it checks no password. "
        f"Best of {ROUND_COUNT} rounds in which both take turns."
    )
    return [Section("HTTP API", words, rows)]


@dataclass(frozen=True, slots=True)
class PullResult:
    """The rate and the request times of a round."""

    rate: float
    times: RequestTimes


async def _measure_pulls(
    session: aiohttp.ClientSession, bench: BenchSetup, names: Sequence[str]
) -> tuple[dict[int, PullResult], dict[int, PullResult], float]:
    peers: dict[int, PullResult] = {}
    ours: dict[int, PullResult] = {}
    leased = 0.0
    for turn in range(ROUND_COUNT):
        for consumers in (1, CONSUMER_COUNT):
            few = names[:consumers]
            await asyncio.to_thread(fill, bench.address, few, max(400, 6000 // consumers), peer_api.stream_of)
            _keep_best(peers, consumers, await pull_round(bench.peer, few))
            await asyncio.to_thread(fill, bench.address, few, max(2000, 20_000 // consumers), queue_subject)
            _keep_best(ours, consumers, await pull_round(bench.ours, few))
            print(
                f"api: round {turn + 1} of {ROUND_COUNT}, {consumers} consumers: {ours[consumers].rate:,.0f}/s, "
                f"peer {peers[consumers].rate:,.0f}/s",
                flush=True,
            )
        await asyncio.to_thread(fill, bench.address, names[:1], 60_000, queue_subject)
        leased = max(leased, await _lease(session, bench, names[0]))
        print(f"api: round {turn + 1} of {ROUND_COUNT}, leases: {leased:,.0f}/s", flush=True)
    return peers, ours, leased


def _keep_best(found: dict[int, PullResult], consumers: int, pulled: PullResult) -> None:
    if consumers not in found or pulled.rate > found[consumers].rate:
        found[consumers] = pulled


async def pull_round(base: str, names: Sequence[str]) -> PullResult:
    """Run one consumer for each subscription for some seconds: GET next, PATCH ok."""
    times = RequestTimes()
    done = 0
    end = 0.0
    lines = [await HttpConnection.open(base) for _ in names]

    async def consume(connection: HttpConnection, name: str) -> None:
        nonlocal done
        path, headers = f"/v1/subscriptions/{name}/messages", login(name)
        while True:
            message = await _time_request(times, connection.request("GET", f"{path}/next?timeout=5", headers))
            if message is None:
                raise RuntimeError(f"{name} ran out of messages")
            await _time_request(
                times, connection.request("PATCH", f"{path}/{message['sequence_number']}/status", headers, _OK)
            )
            done += 1
            if time.perf_counter() >= end:
                return

    # Once unmeasured: the first login of each is checked with argon2, its first message creates the state writer.
    await asyncio.gather(*map(consume, lines, names))
    times, done = RequestTimes(), 0
    began = time.perf_counter()
    end = began + ROUND_SECONDS
    await asyncio.gather(*map(consume, lines, names))
    rate = done / (time.perf_counter() - began)
    for connection in lines:
        connection.close()
    return PullResult(rate, times)


async def _time_request(times: RequestTimes, asking: Awaitable[tuple[int, bytes]]) -> Any:
    began = time.perf_counter()
    status, body = await asking
    times.errors += status >= 400
    times.seconds.append(time.perf_counter() - began)
    return json.loads(body)


async def _lease(session: aiohttp.ClientSession, bench: BenchSetup, name: str) -> float:
    url, headers = f"{bench.ours}/v1/subscriptions/{name}/messages", login(name)
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < ROUND_SECONDS:
        async with session.post(f"{url}/lease", json={"max": _LEASE_SIZE, "timeout": 5}, headers=headers) as answer:
            messages = (await answer.json())["messages"]
        body = {"status": "ok", "up_to": messages[-1]["sequence_number"]}
        async with session.patch(f"{url}/status", json=body, headers=headers) as reported:
            done += (await reported.json())["acknowledged"]
    return done / (time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The memory of the API in MB, before, during and after long polls."""

    before: float
    during: tuple[float, ...]
    after: float


async def _measure_long_polls(bench: BenchSetup, name: str) -> MemoryUse:
    """Measure memory during several rounds of long polls without messages."""
    headers = login(name)
    async with open_session() as session:
        while True:  # what is left of the other measurements
            url = f"{bench.ours}/v1/subscriptions/{name}/messages"
            async with session.post(f"{url}/lease", json={"max": 1000}, headers=headers) as answer:
                messages = (await answer.json())["messages"]
            if not messages:
                break
            body = {"status": "ok", "up_to": messages[-1]["sequence_number"]}
            async with session.patch(f"{url}/status", json=body, headers=headers) as reported:
                reported.raise_for_status()

        async def poll(number: int) -> None:
            mine = headers | {"X-Consumer-Instance": f"idle-{number}"}
            async with session.get(f"{url}/next?timeout=3", headers=mine) as answer:
                assert await answer.json() is None

        before = memory_mb(bench.pid)
        during = []
        for _ in range(5):
            polls = [asyncio.create_task(poll(number)) for number in range(LONG_POLL_COUNT)]
            await asyncio.sleep(2.5)
            during.append(memory_mb(bench.pid))
            await asyncio.gather(*polls)
    return MemoryUse(before, tuple(during), memory_mb(bench.pid))


async def _measure_posts(session: aiohttp.ClientSession, bench: BenchSetup) -> tuple[float, float]:
    """Return the rates of single events and of arrays, each from the best round."""
    url = f"{bench.ours}/v1/messages"

    async def one() -> int:
        async with session.post(url, json=make_event(0), headers=login("events")) as answer:
            assert answer.status == 202
        return 1

    many_events = [make_event(number) for number in range(POST_SIZE)]

    async def many() -> int:
        async with session.post(url, json=many_events, headers=login("events")) as answer:
            assert answer.status == 202
        return POST_SIZE

    one_by_one = in_bulk = 0.0
    for _ in range(ROUND_COUNT):
        one_by_one = max(one_by_one, await _measure_rate(one))
        in_bulk = max(in_bulk, await _measure_rate(many))
    return one_by_one, in_bulk


async def _measure_validated_posts(session: aiohttp.ClientSession, bench: BenchSetup) -> dict[str, float]:
    """Return the rates of arrays by schema; the empty name is without a schema. All take turns."""
    names = ("uuid", "username", "description")
    record = {"type": "record", "name": "User", "fields": [{"name": name, "type": "string"} for name in names]}
    text = {"type": "string", "maxLength": 1000}
    form = {"type": "object", "properties": dict.fromkeys(names, text), "required": list(names)}
    avro = {"type": "avro", "definition": record}
    schemas: dict[str, dict[str, Any]] = {
        "a JSON Schema": {"definition": form},
        "Avro": avro,
        "binary Avro": {**avro, "encoding": "binary"},
    }
    bodies = {"": [make_event(number) for number in range(POST_SIZE)]}
    for number, (words, schema) in enumerate(schemas.items()):
        topic = f"checked-{number}"
        body = {"name": topic, "realms_topics": [{"realm": "udm", "topic": topic}], **schema}
        async with session.post(f"{bench.ours}/v1/schemas", json=body, headers=login("admin")) as answer:
            assert answer.status == 201, await answer.text()
        bodies[words] = [{**each, "topic": topic} for each in bodies[""]]
    for each in bodies["binary Avro"]:
        data = io.BytesIO()
        fastavro.schemaless_writer(data, record, each["body"]["new"])
        each["body"] = {"new": base64.b64encode(data.getvalue()).decode()}
    rates = dict.fromkeys(bodies, 0.0)

    async def many(words: str) -> int:
        async with session.post(f"{bench.ours}/v1/messages", data=texts[words], headers=login("events")) as answer:
            assert answer.status == 202, await answer.text()
        return POST_SIZE

    texts = {words: json.dumps(each).encode() for words, each in bodies.items()}
    for _ in range(ROUND_COUNT):
        for words in bodies:
            rates[words] = max(rates[words], await _measure_rate(partial(many, words)))
    return rates


async def _measure_rate(way: Callable[[], Awaitable[int]]) -> float:
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < ROUND_SECONDS:
        done += await way()
    return done / (time.perf_counter() - began)


def login(name: str) -> dict[str, str]:
    encoded = base64.b64encode(f"{name}:{PASSWORD}".encode()).decode()
    return {"Authorization": f"Basic {encoded}", "Content-Type": "application/json"}


def make_event(number: int) -> dict[str, Any]:
    new = {"uuid": f"{number:032x}", "username": f"user{number}", "description": ""}
    event = {"publisher_name": "bench", "ts": "2026-01-01T00:00:00Z", "realm": "udm", "topic": "bench"}
    reported: dict[str, Any] = {**event, "body": {"old": {}, "new": new}}
    new["description"] = "x" * (MESSAGE_BYTES - len(json.dumps(reported)))
    return reported


def queue_subject(name: str) -> str:
    return f"{name}.main"


_filled: dict[str, int] = {}


def fill(address: Address, names: Sequence[str], count: int, subject_of: Callable[[str], str]) -> None:
    """Write `count` messages to each queue, as the dispatcher would."""
    for name in names:
        subject = subject_of(name)
        first = _filled.get(subject, 1)
        _filled[subject] = first + count
        messages = (
            (
                subject,
                json.dumps(make_event(number)).encode(),
                {"Purveyor-Position": str(number)},
                f"{subject}-{number}",
            )
            for number in range(first, first + count)
        )
        publish_many(address, outgoing(messages))


async def subscribe(session: aiohttp.ClientSession, base: str, name: str) -> None:
    body = {"name": name, "realms_topics": [{"realm": "udm", "topic": "none"}], "password": PASSWORD}
    async with session.post(f"{base}/v1/subscriptions", json=body, headers=login("admin")) as answer:
        assert answer.status == 201, await answer.text()


@asynccontextmanager
async def open_session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
    ) as session:
        yield session


async def wait_until_ready(session: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(_READY_TIMEOUT_SECONDS):
        while True:
            try:
                async with session.get(url) as answer:
                    if answer.ok:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)


@contextmanager
def start_process(arguments: Sequence[str], environment: dict[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, *arguments], env=os.environ | environment, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(_READY_TIMEOUT_SECONDS)


def memory_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def nats_url(address: Address) -> str:
    host, port = address.hosts()[0]
    return f"nats://{address.user}:{address.password}@{host}:{port}"

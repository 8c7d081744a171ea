"""The HTTP API beside the way of the older system (`peer_api`), on the same server in the same run.

Both serve in a process of their own and are asked by the same client, which keeps its connections and costs little.
Each rate is the best of several rounds in which both take turns.
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
from benchmarks.http_line import HttpLine
from benchmarks.report import Row, Section
from purveyor.jetstream import publish_many
from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import outgoing

SIZE: Final = 800
CONSUMERS: Final = 20
POLLS: Final = 500
_SECONDS: Final = 2.0
_ROUNDS: Final = 5
_BATCH: Final = 100
_BULK: Final = 1000
_SECRET: Final = "bench-secret"
_OK: Final = b'{"status": "ok"}'
_WAIT_SECONDS: Final = 60


def run(address: Address) -> list[Section]:
    """All figures of the API."""
    with tempfile.TemporaryDirectory() as directory:
        url = _url(address)
        ours_port, peer_port = _free_port(), _free_port()
        settings = {
            "PURVEYOR_NATS_URL": url,
            "PURVEYOR_DATA_DIR": directory,
            **{f"PURVEYOR_{who}_PASSWORD": _SECRET for who in ("ADMIN", "EVENTS", "PREFILL")},
        }
        serve = ("-c", "from purveyor.app.cli import main; main()", "serve", "api", "--port", str(ours_port))
        with (
            _process(serve, settings) as ours,
            _process(("-m", "benchmarks.peer_api", str(peer_port)), {"NATS_URL": url}),
        ):
            bench = Bench(address, f"http://127.0.0.1:{ours_port}", f"http://127.0.0.1:{peer_port}", ours.pid)
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # the client is not what is measured
                return runner.run(_measure(bench))


@dataclass(frozen=True, slots=True)
class Bench:
    """Where everything is."""

    address: Address
    ours: str
    peer: str
    pid: int


@dataclass(slots=True)
class Times:
    """How long the requests took, in seconds, and how many went wrong."""

    seconds: list[float] = field(default_factory=list)
    errors: int = 0

    def at(self, share: float) -> float:
        """A percentile, in milliseconds."""
        found = sorted(self.seconds)
        return 1000 * found[min(int(len(found) * share), len(found) - 1)]


async def _measure(bench: Bench) -> list[Section]:
    names = [f"bench-{number}" for number in range(CONSUMERS)]
    async with _session() as session:
        await _until_ready(session, f"{bench.ours}/readyz")
        await _until_ready(session, f"{bench.peer}/openapi.json")
        await peer_api.prepare(_url(bench.address), names)
        for name in names:
            await _subscribe(session, bench, name)
        peers, ours, leased = await _pulls(session, bench, names)
        print("api: long polls", flush=True)
        idle = await _idle_polls(bench, names[0])
        print("api: posts", flush=True)
        one_by_one, in_bulk = await _posts(session, bench)
        print("api: posts with schemas", flush=True)
        checked = await _checked_posts(session, bench)
    rows = [
        Row("next + ok, 1 consumer / one at a time", ours[1].rate, peers[1].rate, at_least=10),
        Row(f"lease of {_BATCH} + one ok, 1 consumer / one at a time", leased, peers[1].rate, at_least=100),
        Row(
            f"next + ok, {CONSUMERS} consumers / one at a time",
            ours[CONSUMERS].rate,
            peers[CONSUMERS].rate,
            at_least=10,
        ),
        Row(
            f"{CONSUMERS} consumers: p99 / p50 of a request",
            ours[CONSUMERS].times.at(0.99),
            ours[CONSUMERS].times.at(0.5),
            "ms",
            at_most=20,
            note=f"{ours[CONSUMERS].times.errors} errors",
        ),
        Row(f"memory with {POLLS} long polls, last round / first", idle.during[-1], idle.during[0], "MB", at_most=1.05),
        Row(f"memory after {POLLS} long polls / before", idle.after, idle.before, "MB"),
        Row("POST of 1,000 at once / one by one", in_bulk, one_by_one, "events/s"),
        *(
            Row(f"POST of 1,000 at once with {words} / without a schema", rate, checked[""], "events/s")
            for words, rate in checked.items()
            if words
        ),
    ]
    words = (
        f"Messages of {SIZE} bytes; next + ok is one GET and one PATCH. The peer makes two connections per request and "
        f"gives one message at a time; it checks no password. Best of {_ROUNDS} rounds in which both take turns."
    )
    return [Section("HTTP API", words, rows)]


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a round reached."""

    rate: float
    times: Times


async def _pulls(
    session: aiohttp.ClientSession, bench: Bench, names: Sequence[str]
) -> tuple[dict[int, Pulled], dict[int, Pulled], float]:
    peers: dict[int, Pulled] = {}
    ours: dict[int, Pulled] = {}
    leased = 0.0
    for turn in range(_ROUNDS):
        for consumers in (1, CONSUMERS):
            few = names[:consumers]
            await asyncio.to_thread(_fill, bench.address, few, max(400, 6000 // consumers), peer_api.stream_of)
            _best(peers, consumers, await _pull(bench.peer, few))
            await asyncio.to_thread(_fill, bench.address, few, max(2000, 20_000 // consumers), _subject)
            _best(ours, consumers, await _pull(bench.ours, few))
            print(
                f"api: round {turn + 1} of {_ROUNDS}, {consumers} consumers: {ours[consumers].rate:,.0f}/s, "
                f"peer {peers[consumers].rate:,.0f}/s",
                flush=True,
            )
        await asyncio.to_thread(_fill, bench.address, names[:1], 60_000, _subject)
        leased = max(leased, await _lease(session, bench, names[0]))
        print(f"api: round {turn + 1} of {_ROUNDS}, leases: {leased:,.0f}/s", flush=True)
    return peers, ours, leased


def _best(found: dict[int, Pulled], consumers: int, pulled: Pulled) -> None:
    if consumers not in found or pulled.rate > found[consumers].rate:
        found[consumers] = pulled


async def _pull(base: str, names: Sequence[str]) -> Pulled:
    """GET next, PATCH ok, by one consumer for each subscription, for some seconds."""
    times = Times()
    done = 0
    end = 0.0
    lines = [await HttpLine.to(base) for _ in names]

    async def consume(line: HttpLine, name: str) -> None:
        nonlocal done
        path, headers = f"/v1/subscriptions/{name}/messages", _login(name)
        while True:
            message = await _timed(times, line.ask("GET", f"{path}/next?timeout=5", headers))
            if message is None:
                raise RuntimeError(f"{name} ran out of messages")
            await _timed(times, line.ask("PATCH", f"{path}/{message['sequence_number']}/status", headers, _OK))
            done += 1
            if time.perf_counter() >= end:
                return

    # Once around unmeasured: the first login of each is checked with argon2, the first message opens its desk.
    await asyncio.gather(*map(consume, lines, names))
    times, done = Times(), 0
    began = time.perf_counter()
    end = began + _SECONDS
    await asyncio.gather(*map(consume, lines, names))
    rate = done / (time.perf_counter() - began)
    for line in lines:
        line.close()
    return Pulled(rate, times)


async def _timed(times: Times, asking: Awaitable[tuple[int, bytes]]) -> Any:
    began = time.perf_counter()
    status, body = await asking
    times.errors += status >= 400
    times.seconds.append(time.perf_counter() - began)
    return json.loads(body)


async def _lease(session: aiohttp.ClientSession, bench: Bench, name: str) -> float:
    url, headers = f"{bench.ours}/v1/subscriptions/{name}/messages", _login(name)
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < _SECONDS:
        async with session.post(f"{url}/lease", json={"max": _BATCH, "timeout": 5}, headers=headers) as answer:
            messages = (await answer.json())["messages"]
        body = {"status": "ok", "up_to": messages[-1]["sequence_number"]}
        async with session.patch(f"{url}/status", json=body, headers=headers) as told:
            done += (await told.json())["acknowledged"]
    return done / (time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class Idle:
    """Memory of the API, in MB."""

    before: float
    during: tuple[float, ...]
    after: float


async def _idle_polls(bench: Bench, name: str) -> Idle:
    """Long polls that nothing comes for, several rounds of them."""
    headers = _login(name)
    async with _session() as session:
        while True:  # what is left of the other measurements
            url = f"{bench.ours}/v1/subscriptions/{name}/messages"
            async with session.post(f"{url}/lease", json={"max": 1000}, headers=headers) as answer:
                messages = (await answer.json())["messages"]
            if not messages:
                break
            body = {"status": "ok", "up_to": messages[-1]["sequence_number"]}
            async with session.patch(f"{url}/status", json=body, headers=headers) as told:
                told.raise_for_status()

        async def poll(number: int) -> None:
            mine = headers | {"X-Consumer-Instance": f"idle-{number}"}
            async with session.get(f"{url}/next?timeout=3", headers=mine) as answer:
                assert await answer.json() is None

        before = _memory(bench.pid)
        during = []
        for _ in range(5):
            polls = [asyncio.create_task(poll(number)) for number in range(POLLS)]
            await asyncio.sleep(2.5)
            during.append(_memory(bench.pid))
            await asyncio.gather(*polls)
    return Idle(before, tuple(during), _memory(bench.pid))


async def _posts(session: aiohttp.ClientSession, bench: Bench) -> tuple[float, float]:
    """Events one after the other by one publisher, and in arrays; the best round of each."""
    url = f"{bench.ours}/v1/messages"

    async def one() -> int:
        async with session.post(url, json=_event(0), headers=_login("events")) as answer:
            assert answer.status == 202
        return 1

    many_events = [_event(number) for number in range(_BULK)]

    async def many() -> int:
        async with session.post(url, json=many_events, headers=_login("events")) as answer:
            assert answer.status == 202
        return _BULK

    one_by_one = in_bulk = 0.0
    for _ in range(_ROUNDS):
        one_by_one = max(one_by_one, await _rate(one))
        in_bulk = max(in_bulk, await _rate(many))
    return one_by_one, in_bulk


async def _checked_posts(session: aiohttp.ClientSession, bench: Bench) -> dict[str, float]:
    """Events in arrays, by the schema of their topic; without one under the empty name. All take turns."""
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
    bodies = {"": [_event(number) for number in range(_BULK)]}
    for number, (words, schema) in enumerate(schemas.items()):
        topic = f"checked-{number}"
        body = {"name": topic, "realms_topics": [{"realm": "udm", "topic": topic}], **schema}
        async with session.post(f"{bench.ours}/v1/schemas", json=body, headers=_login("admin")) as answer:
            assert answer.status == 201, await answer.text()
        bodies[words] = [{**each, "topic": topic} for each in bodies[""]]
    for each in bodies["binary Avro"]:
        data = io.BytesIO()
        fastavro.schemaless_writer(data, record, each["body"]["new"])
        each["body"] = {"new": base64.b64encode(data.getvalue()).decode()}
    rates = dict.fromkeys(bodies, 0.0)

    async def many(words: str) -> int:
        async with session.post(f"{bench.ours}/v1/messages", data=texts[words], headers=_login("events")) as answer:
            assert answer.status == 202, await answer.text()
        return _BULK

    texts = {words: json.dumps(each).encode() for words, each in bodies.items()}
    for _ in range(_ROUNDS):
        for words in bodies:
            rates[words] = max(rates[words], await _rate(partial(many, words)))
    return rates


async def _rate(way: Callable[[], Awaitable[int]]) -> float:
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < _SECONDS:
        done += await way()
    return done / (time.perf_counter() - began)


def _login(name: str) -> dict[str, str]:
    login = base64.b64encode(f"{name}:{_SECRET}".encode()).decode()
    return {"Authorization": f"Basic {login}", "Content-Type": "application/json"}


def _event(number: int) -> dict[str, Any]:
    new = {"uuid": f"{number:032x}", "username": f"user{number}", "description": ""}
    event = {"publisher_name": "bench", "ts": "2026-01-01T00:00:00Z", "realm": "udm", "topic": "bench"}
    told: dict[str, Any] = {**event, "body": {"old": {}, "new": new}}
    new["description"] = "x" * (SIZE - len(json.dumps(told)))
    return told


def _subject(name: str) -> str:
    return f"{name}.main"


_filled: dict[str, int] = {}


def _fill(address: Address, names: Sequence[str], count: int, subject_of: Callable[[str], str]) -> None:
    """What dispatch would write: so many messages into each queue."""
    for name in names:
        subject = subject_of(name)
        first = _filled.get(subject, 1)
        _filled[subject] = first + count
        messages = (
            (subject, json.dumps(_event(number)).encode(), {"Purveyor-Position": str(number)}, f"{subject}-{number}")
            for number in range(first, first + count)
        )
        publish_many(address, outgoing(messages))


async def _subscribe(session: aiohttp.ClientSession, bench: Bench, name: str) -> None:
    body = {"name": name, "realms_topics": [{"realm": "udm", "topic": "none"}], "password": _SECRET}
    async with session.post(f"{bench.ours}/v1/subscriptions", json=body, headers=_login("admin")) as answer:
        assert answer.status == 201, await answer.text()


@asynccontextmanager
async def _session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        auto_decompress=False,
    ) as session:
        yield session


async def _until_ready(session: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(_WAIT_SECONDS):
        while True:
            try:
                async with session.get(url) as answer:
                    if answer.ok:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)


@contextmanager
def _process(arguments: Sequence[str], environment: dict[str, str]) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, *arguments], env=os.environ | environment, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(_WAIT_SECONDS)


def _memory(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _url(address: Address) -> str:
    host, port = address.hosts()[0]
    return f"nats://{address.user}:{address.password}@{host}:{port}"

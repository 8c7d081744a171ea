"""A change in slapd on its way to the long poll of a consumer, through `purveyor up`: one at a time, and by parts.

Each stream is read by a consumer of its own, whose messages carry the time at which the server stored them.
"""

import asyncio
import base64
import contextlib
import itertools
import json
import random
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import nats
from nats.aio.msg import Msg

from benchmarks.api import free_port, nats_url
from benchmarks.http_client import HttpConnection
from benchmarks.ldap_source import PEOPLE, running_directory, serving
from benchmarks.report import Row, Section, machine_load
from purveyor.jetstream.address import Address
from purveyor.jetstream.server import EmbeddedServer
from tests.support.slapd import ADMIN_DN, ADMIN_PASSWORD, READER_DN, READER_PASSWORD, SUFFIX, Slapd

PEOPLE_COUNT: Final = 1000
_CHANGES: Final = 200
_WARM_SECONDS: Final = 60.0
_PAUSE_SECONDS: Final = 0.2
_PATIENCE_SECONDS: Final = 120.0
_NAME: Final = "bench"
_PASSWORD: Final = "bench-secret"
_QUEUES: Final = ("ldif", "incoming", _NAME)
_MARK: Final = re.compile(rb"change-(\d+)\.")
_PARTS: Final = (
    "slapd and the source: until stored in ldif",
    "transform: until stored in incoming",
    "dispatch: until stored in the queue of the subscription",
    "delivery: until the consumer has the answer of its long poll",
)


def run(_address: Address, *, people: int = PEOPLE_COUNT, changes: int = _CHANGES) -> list[Section]:
    """Measure on a server of its own, which syncs every write as it does by default."""
    with (
        tempfile.TemporaryDirectory() as directory,
        EmbeddedServer(Path(directory) / "store") as server,
        running_directory(Path(directory) / "slapd", people) as slapd,
    ):
        port, url = free_port(), nats_url(server.address)
        settings = {
            "PURVEYOR_LDAP_URI": slapd.uri,
            "PURVEYOR_LDAP_BASE": SUFFIX,
            "PURVEYOR_LDAP_BIND_DN": READER_DN,
            "PURVEYOR_LDAP_PASSWORD": READER_PASSWORD,
            **{f"PURVEYOR_{who}_PASSWORD": _PASSWORD for who in ("ADMIN", "EVENTS", "PREFILL")},
        }
        arguments = ("up", "--json", "--port", str(port), "--master", "local[2]")
        with serving(Path(directory) / "data", arguments, url, **settings) as up:
            assert up.stdout is not None
            awaited = {("following", "LDAP"), ("up", "everything")}
            for line in up.stdout:
                event = json.loads(line)
                awaited.discard((event["event"], event.get("part", "")))
                if not awaited:
                    break
            with _editing(slapd) as editor:
                found = asyncio.run(_Live(f"http://127.0.0.1:{port}", url, editor, people).measure(changes))
    return [_section(found, people)]


@contextlib.contextmanager
def _editing(slapd: Slapd) -> Iterator["subprocess.Popen[bytes]"]:
    command = ["ldapmodify", "-x", "-H", slapd.uri, "-D", ADMIN_DN, "-w", ADMIN_PASSWORD]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()


def _section(changes: list[tuple[float, ...]], people: int) -> Section:
    """Each change is its times in seconds: written to slapd, stored in each queue, and received."""
    totals = [(times[-1] - times[0]) * 1000 for times in changes]
    parts = [[(after - before) * 1000 for before, after in itertools.pairwise(times)] for times in changes]
    middle, late = _percentile(totals, 50), _percentile(totals, 99)
    rows = [Row("change to long poll, p99 / p50", late, middle, "ms")]
    for number, name in enumerate(_PARTS):
        found = [each[number] for each in parts]
        note = f"p99 {_percentile(found, 99):,.0f} ms"
        rows.append(Row(f"{name}, p50 / the whole", _percentile(found, 50), middle, "ms", note=note))
    words = (
        f"`purveyor up` follows a slapd with {people:,} people on a server that syncs every write. {len(changes)} "
        "changes, each made when the consumer had the one before, after a minute of the same; the times are those at "
        "which the streams stored the messages. The peer of the first row is its p50, of the others the p50 of all. "
        f"The machine was {machine_load()}."
    )
    return Section("LDAP: latency", words, rows)


def _percentile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


@dataclass
class _Live:
    """One consumer of the API, and the times at which changes passed the queues."""

    base: str
    nats_url: str
    editor: "subprocess.Popen[bytes]"
    """An ldapmodify that applies each record as it comes."""
    people: int
    _seen: dict[str, dict[int, float]] = field(default_factory=lambda: {name: {} for name in _QUEUES})
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def measure(self, changes: int) -> list[tuple[float, ...]]:
        """Return the times of each change."""
        http = await HttpConnection.open(self.base)
        await self._subscribe(http)
        spy = await nats.connect(self.nats_url)
        for name, subject in zip(_QUEUES, ("ldif.>", "incoming.>", f"{_NAME}.main"), strict=True):
            await spy.jetstream().subscribe(
                subject, stream=f"stream:{name}", ordered_consumer=True, cb=self._recorder(name)
            )
        found: list[tuple[float, ...]] = []
        pause, warm_until, number = random.Random(1), time.monotonic() + _WARM_SECONDS, 0
        try:
            while len(found) < changes:
                number += 1
                times = await self._change(http, number)
                if time.monotonic() > warm_until:
                    found.append(times)
                    if len(found) % 50 == 0:
                        print(f"live: {len(found)} of {changes} changes", flush=True)
                await asyncio.sleep(pause.uniform(0, _PAUSE_SECONDS))
        finally:
            await spy.close()
            http.close()
        return found

    def _recorder(self, name: str) -> Any:
        async def record(message: Msg) -> None:
            number = _newest(message.data)
            if number is not None:
                self._seen[name].setdefault(number, message.metadata.timestamp.timestamp())
                self._arrived.set()

        return record

    async def _change(self, http: HttpConnection, number: int) -> tuple[float, ...]:
        assert self.editor.stdin is not None
        dn = f"uid=user{number % self.people},{PEOPLE}"
        changed = f"dn: {dn}\nchangetype: modify\nreplace: description\ndescription: change-{number}.\n\n"
        began = time.time()
        self.editor.stdin.write(changed.encode())
        self.editor.stdin.flush()
        async with asyncio.timeout(_PATIENCE_SECONDS):
            while True:
                message = await self._ask(http, "GET", "next?timeout=10")
                received = time.time()
                if message is None:
                    continue
                await self._ask(http, "PATCH", f"{message['sequence_number']}/status", b'{"status": "ok"}')
                if _newest(json.dumps(message).encode()) == number:
                    break
            while not all(number in self._seen[name] for name in _QUEUES):
                self._arrived.clear()
                await self._arrived.wait()
        return (began, *(self._seen[name][number] for name in _QUEUES), received)

    async def _subscribe(self, http: HttpConnection) -> None:
        body = {"name": _NAME, "realms_topics": [{"realm": "udm", "topic": "users/user"}], "password": _PASSWORD}
        status, answer = await http.request("POST", "/v1/subscriptions", _login("admin"), json.dumps(body).encode())
        assert status == 201, answer

    async def _ask(self, http: HttpConnection, method: str, path: str, body: bytes = b"") -> Any:
        path = f"/v1/subscriptions/{_NAME}/messages/{path}"
        status, answer = await http.request(method, path, _login(_NAME), body)
        assert status < 400, answer
        return json.loads(answer)


def _newest(data: bytes) -> int | None:
    """Return the number of the change that a message is about; it has the number before, too."""
    return max(map(int, _MARK.findall(data)), default=None)


def _login(user: str) -> Mapping[str, str]:
    token = base64.b64encode(f"{user}:{_PASSWORD}".encode()).decode()
    return {"Authorization": f"Basic {token}", "Content-Type": "application/json"}

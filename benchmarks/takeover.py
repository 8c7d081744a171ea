"""The pipeline is killed with SIGKILL: how long until the next event is delivered, with a standby and without one.

`purveyor up` runs as users run it. The event is published right after the kill; it is delivered when the long poll of a
consumer returns it. EARLIER names a checkout of an earlier commit, whose `up` is measured as well, and EARLIER_CACHE
the directory of caches in which it has made its archive of Spark's classes.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.report import Row, Section, machine_load
from purveyor.jetstream.address import Address

_HERE = Path(__file__).parent.parent / "src"
_KILLS = int(os.environ.get("KILLS", "5"))
_FIRST_EVENTS = 60
_STANDBY_SECONDS = 3.0
_LATER = slice(20, None)
_PATIENCE_SECONDS = 300.0
_PASSWORD = "a-long-password"
_PROGRAM = "from purveyor.app.cli import main; main()"
_TOPIC = {"realm": "bench", "topic": "takeover"}
_PATH = "/v1/subscriptions/takeover/messages"


@dataclass(slots=True)
class _Measured:
    """The times of one way, in seconds."""

    takeovers: list[float] = field(default_factory=list)
    ready: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)
    memory_bytes: int = 0


class _Up:
    """A running `purveyor up` with one subscription."""

    def __init__(self, source: Path, data: Path, flags: tuple[str, ...]) -> None:
        own = {f"PURVEYOR_{name}_PASSWORD": _PASSWORD for name in ("ADMIN", "EVENTS", "PREFILL")}
        own |= {"PYTHONPATH": str(source), "PURVEYOR_SPARK_MASTER": "local[2]", **_cache(source)}
        self.began = time.monotonic()
        self._steps: list[tuple[str, str, float]] = []
        self._url = ""
        self._status = data / "pipeline-status.json"
        self._count = 0
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, "--data-dir", str(data), "up", "--json", "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **own},
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            step = json.loads(line)
            self._url = step.get("url") or self._url
            self._steps.append((step["event"], step.get("part", ""), time.monotonic()))

    def wait_for(self, event: str, parts: tuple[str, ...], times: int = 1) -> float:
        """Return when a part has printed an event for the n-th time."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while time.monotonic() < deadline:
            found = [at for seen, part, at in self._steps if seen == event and part in parts]
            if len(found) >= times:
                return found[times - 1]
            time.sleep(0.01)
        raise TimeoutError(f"{event} of {parts}: {self._steps[-10:]}")

    def subscribe(self) -> None:
        self.wait_for("ready", ("API",))
        body = {"name": "takeover", "realms_topics": [_TOPIC], "request_prefill": False, "password": _PASSWORD}
        self._request("admin", "POST", "/v1/subscriptions", json=body)

    def deliver(self) -> float:
        """Publish an event; return the seconds until a consumer has it."""
        self._count += 1
        began = time.monotonic()
        event = {"publisher_name": "bench", "ts": "2026-01-01T00:00:00Z", **_TOPIC}
        self._request("events", "POST", "/v1/messages", json={**event, "body": {"old": {}, "new": {"id": self._count}}})
        while True:
            message = self._request("takeover", "GET", f"{_PATH}/next", params={"timeout": 30}).json()
            if message is not None:
                break
        seconds = time.monotonic() - began
        self._request("takeover", "PATCH", f"{_PATH}/{message['sequence_number']}/status", json={"status": "ok"})
        return seconds

    def kill(self) -> None:
        """Kill the pipeline that runs the parts."""
        os.kill(self.active(), signal.SIGKILL)

    def active(self) -> int:
        return int(json.loads(self._status.read_text())["pid"])

    def _request(self, user: str, method: str, path: str, **how: object) -> httpx.Response:
        with httpx.Client(base_url=self._url, auth=(user, _PASSWORD), timeout=_PATIENCE_SECONDS) as client:
            return client.request(method, path, **how).raise_for_status()  # type: ignore[arg-type]  # passed on


def _cache(source: Path) -> dict[str, str]:
    given = os.environ.get("EARLIER_CACHE")
    return {"XDG_CACHE_HOME": given} if given is not None and source != _HERE else {}


@contextmanager
def _up(source: Path, *flags: str) -> Iterator[_Up]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        up = _Up(source, Path(directory), flags)
        try:
            yield up
        finally:
            up.process.terminate()
            up.process.wait(_PATIENCE_SECONDS)


def _measure(source: Path, found: _Measured, *, standby: bool) -> None:
    pipelines = ("pipeline", "standby")
    with _up(source, *(("--standby",) if standby else ())) as up:
        up.subscribe()
        found.ready.append(up.wait_for("ready", pipelines) - up.began)
        found.first.append(up.deliver())
        later = [up.deliver() for _ in range(_FIRST_EVENTS)][_LATER]
        found.later.append(statistics.median(later))
        for number in range(1, _KILLS + 1):
            if standby:
                up.wait_for("standby", pipelines, number)
                found.memory_bytes = max(found.memory_bytes, _standby_memory(up))
            killed = up.active()
            up.kill()
            found.takeovers.append(up.deliver())
            while up.active() == killed:
                time.sleep(0.05)
            up.wait_for("ready", pipelines, number + 1)


def _standby_memory(up: _Up) -> int:
    """Return the proportional set size of the standby with its JVM and workers."""
    parents: dict[int, int] = {}
    for each in Path("/proc").iterdir():
        if each.name.isdigit():
            try:
                parents[int(each.name)] = int((each / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue

    def below(pid: int) -> list[int]:
        return [pid, *(deep for child, parent in parents.items() if parent == pid for deep in below(child))]

    active = up.active()
    standby = [
        pid
        for pid in below(up.process.pid)
        if pid != active and b"pipeline" in _read_bytes(pid, "cmdline") and b"serve" in _read_bytes(pid, "cmdline")
    ]
    pages = [line for pid in standby for each in below(pid) for line in _read_bytes(each, "smaps_rollup").splitlines()]
    return sum(int(line.split()[1]) << 10 for line in pages if line.startswith(b"Pss:"))


def _read_bytes(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def run(_address: Address) -> list[Section]:
    """Measure with a standby, without, and an earlier commit, in this order."""
    earlier = os.environ.get("EARLIER")
    with_standby, without, before = _Measured(), _Measured(), _Measured()
    _measure(_HERE, with_standby, standby=True)
    _measure(_HERE, without, standby=False)
    if earlier is not None:
        _measure(Path(earlier) / "src", before, standby=False)
    rows = [
        Row("with a standby, p50 / without", _p50(with_standby), _p50(without), "s", note=_each(with_standby)),
        Row("with a standby, the worst / 3 s", max(with_standby.takeovers), _STANDBY_SECONDS, "s", at_most=1.0),
        Row("memory of the standby / the active pipeline's 2 GB heap", with_standby.memory_bytes / 1e6, 2048, "MB"),
        Row("first event after ready / later p50", without.first[0] * 1e3, without.later[0] * 1e3, "ms", at_most=3.0),
    ]
    if earlier is not None:
        first, later = before.first[0] * 1e3, before.later[0] * 1e3
        rows += [
            Row("without a standby, p50 / earlier", _p50(without), _p50(before), "s", at_most=0.6, note=_each(without)),
            Row("earlier: first event after ready / later p50", first, later, "ms"),
            Row("start of `up` until ready / earlier", without.ready[0], before.ready[0], "s"),
        ]
    words = (
        f"kill -9 of the pipeline of `purveyor up`, {_KILLS} times: the time until an event that is published right "
        f"after the kill is delivered. The machine was {machine_load()}."
    )
    return [Section("Pipeline: take-over", words, rows)]


def _p50(found: _Measured) -> float:
    return statistics.median(found.takeovers)


def _each(found: _Measured) -> str:
    return "each: " + ", ".join(f"{seconds:.1f}" for seconds in sorted(found.takeovers))

"""The refresh of a live directory beside that of python-ldap.

The directory is a real slapd. python-ldap is the peer only; the benchmark finds it in this Python, or builds it in an
environment of its own with pip. Without it, the rows that compare with it are left out, and the section says so.
"""

import asyncio
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.api import memory_mb, nats_url
from benchmarks.report import Row, Section, best_of, machine_load
from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk.net.pool import request_api
from purveyor.sources.ldap import ldap_client
from purveyor.sources.ldap.directory import DirectoryAddress
from purveyor.sources.ldap.sync_consumer import EntryReported, RefreshEnded
from scripts.slapd import find_slapd
from tests.support.slapd import READER_DN, READER_PASSWORD, SUFFIX, Slapd, SlapdOptions

ENTRIES: Final = 100_000
_ROUNDS: Final = 3
PEOPLE: Final = f"ou=people,{SUFFIX}"
_BASE_ENTRIES: Final = 3
_MARKS: Final = (0.2, 0.5, 1.0)
_POLL_SECONDS: Final = 0.05
_PATIENCE_SECONDS: Final = 900.0
_PROGRAM: Final = (sys.executable, "-c", "from purveyor.app.cli import main; main()")


def run(address: Address, *, entries: int = ENTRIES, rounds: int = _ROUNDS) -> list[Section]:
    """Measure a refresh."""
    return [_refresh(address, entries, rounds)]


def _refresh(address: Address, entries: int, rounds: int) -> Section:
    with (
        tempfile.TemporaryDirectory() as directory,
        running_directory(Path(directory) / "slapd", entries) as slapd,
        _python_with_peer(Path(directory) / "peer") as python,
    ):
        bench = _Refresh(address, slapd, entries + _BASE_ENTRIES, Path(directory))
        ways = {"purveyor": bench.ours, "client": bench.client}
        if python is not None:
            ways["python-ldap"] = partial(bench.peer, python)
        rates = best_of(rounds, ways)
    ours, client, peer = rates["purveyor"], rates["client"], rates.get("python-ldap", 0.0)
    if peer:
        rows = [
            Row(f"refresh of {entries:,} entries into the queue / python-ldap", ours, peer, "entries/s", at_least=0.5),
            Row("our client alone, entries thrown away / python-ldap", client, peer, "entries/s"),
            Row("processor time of a refresh / python-ldap", bench.processor, bench.peer_processor, "s"),
        ]
    else:
        rows = [Row("refresh into the queue / our client alone", ours, client, "entries/s")]
    first, half, whole = (bench.memory[mark] for mark in _MARKS)
    rows += [
        Row("memory at 50 % of the refresh / at 20 %", half, first, "MB"),
        Row("memory at the end of the refresh / at 20 %", whole, first, "MB", at_most=1.1),
    ]
    words = (
        f"A slapd with {entries:,} people of ten attributes and ten operational ones, loaded by slapadd. "
        "`purveyor serve ldap` reads it as a whole, until every record is acknowledged in `stream:ldif`; the peer is "
        "the syncrepl consumer of python-ldap, which throws entries away. Both begin with the first entry. Best of "
        f"{rounds} rounds in which all take turns; memory is the resident set, the largest of the rounds. The machine "
        f"was {machine_load()}; processor time is that of the client's process, without slapd."
    )
    words += "" if peer else " python-ldap could not be had here: its rows are left out."
    return Section("LDAP: refresh", words, rows)


@contextlib.contextmanager
def running_directory(home: Path, entries: int) -> Iterator[Slapd]:
    """Run a slapd with people."""
    if find_slapd() is None:
        sys.exit("no slapd on this machine: python -m scripts.slapd installs it where that is allowed")
    slapd = Slapd(home, SlapdOptions(max_size_mb=4096))
    slapd.prepare()
    file = home / "start.ldif"
    with file.open("wb") as ldif:
        ldif.write(_start())
        ldif.writelines(_person(number) for number in range(entries))
    program = Path(str(find_slapd())).with_name("slapadd")
    load = [str(program), "-q", "-f", str(home / "slapd.conf"), "-b", SUFFIX, "-l", str(file)]
    subprocess.run(load, check=True, capture_output=True)
    slapd.start()
    try:
        yield slapd
    finally:
        slapd.kill()


def _start() -> bytes:
    return (
        f"dn: {SUFFIX}\nobjectClass: organization\nobjectClass: dcObject\no: Example\ndc: example\n\n"
        f"dn: {READER_DN}\nobjectClass: organizationalRole\nobjectClass: simpleSecurityObject\ncn: reader\n"
        f"userPassword: {READER_PASSWORD}\n\n"
        f"dn: {PEOPLE}\nobjectClass: organizationalUnit\nou: people\n\n"
    ).encode()


def _person(number: int) -> bytes:
    return (
        f"dn: uid=user{number},{PEOPLE}\nobjectClass: top\nobjectClass: person\nobjectClass: organizationalPerson\n"
        f"objectClass: inetOrgPerson\nuid: user{number}\ncn: User Number {number}\nsn: Number {number}\n"
        f"givenName: User\nmail: user{number}@example.com\ntelephoneNumber: +49 30 {number}\ntitle:: w4TDpMO8\n"
        f"description: person {number} of the directory\nemployeeNumber: {number}\n\n"
    ).encode()


@contextlib.contextmanager
def _python_with_peer(home: Path) -> Iterator[str | None]:
    """Yield a Python that has python-ldap: this one, or one of an environment where pip builds it; None if it fails."""
    if importlib.util.find_spec("ldap") is not None:
        yield sys.executable
        return
    python = home / "bin" / "python"
    steps = ([sys.executable, "-m", "venv", str(home)], [str(python), "-m", "pip", "install", "-q", "python-ldap"])
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            print(f"no python-ldap here ({done.stderr.strip().splitlines()[-1:]}): its rows are left out", flush=True)
            yield None
            return
    yield str(python)


@dataclass
class _Refresh:
    """Refreshes of one directory."""

    address: Address
    slapd: Slapd
    expected: int
    home: Path
    memory: dict[float, float] = field(default_factory=lambda: dict.fromkeys(_MARKS, 0.0))
    processor: float = float("inf")
    peer_processor: float = float("inf")
    _turn: int = 0

    def ours(self) -> float:
        """Return the rate of `purveyor serve ldap` until the queue has every record."""
        self._turn += 1
        source = f"turn{self._turn}"
        self._purge()
        options = ("--uri", self.slapd.uri, "--base", SUFFIX, "--bind-dn", READER_DN, "--source", source)
        arguments, password = ("serve", "ldap", "--json", *options), {"PURVEYOR_LDAP_PASSWORD": READER_PASSWORD}
        with serving(self.home / "data", arguments, nats_url(self.address), **password) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if json.loads(line)["event"] == "refreshing":
                    break
            began, began_processor = time.perf_counter(), processor_seconds(process.pid)
            marks = list(_MARKS)
            while marks:
                stored = self._stored()
                while marks and stored >= marks[0] * (self.expected + 2):
                    mark = marks.pop(0)
                    self.memory[mark] = max(self.memory[mark], memory_mb(process.pid))
                if time.perf_counter() - began > _PATIENCE_SECONDS or process.poll() is not None:
                    raise AssertionError(f"the refresh ended at {stored:,} records")
                if marks:
                    time.sleep(_POLL_SECONDS)
            self.processor = min(self.processor, processor_seconds(process.pid) - began_processor)
            return self.expected / (time.perf_counter() - began)

    def client(self) -> float:
        """Return the rate of our client without the queue."""
        return asyncio.run(self._client())

    async def _client(self) -> float:
        address = DirectoryAddress(self.slapd.uri, bind_dn=READER_DN, password=READER_PASSWORD)
        entries, began = 0, 0.0
        async with ldap_client.connect(address) as client:
            async for changes in client.follow_batches(SUFFIX):
                began = began or time.perf_counter()
                entries += sum(isinstance(change, EntryReported) for change in changes)
                if isinstance(changes[-1], RefreshEnded):
                    break
        assert entries == self.expected
        return entries / (time.perf_counter() - began)

    def peer(self, python: str) -> float:
        """Return the rate of python-ldap."""
        command = [python, "-I", str(Path(__file__).with_name("ldap_peer.py")), self.slapd.uri, SUFFIX, READER_DN]
        environment = os.environ | {"LDAP_PASSWORD": READER_PASSWORD}
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        found = json.loads(done.stdout)
        assert found["entries"] == self.expected
        self.peer_processor = min(self.peer_processor, float(found["processor"]))
        return float(found["entries"] / found["seconds"])

    def _stored(self) -> int:
        found = request_api(self.address, "STREAM.INFO.stream:ldif", {})
        return int(found["state"]["messages"])

    def _purge(self) -> None:
        with contextlib.suppress(Exception):  # the first turn has no stream yet
            request_api(self.address, "STREAM.PURGE.stream:ldif", {})


def processor_seconds(pid: int) -> float:
    """Return the processor time that a process has taken, in user and kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def serving(data: Path, arguments: Sequence[str], url: str, **more: str) -> Iterator["subprocess.Popen[str]"]:
    """Run a command of Purveyor on a NATS server; `more` are settings."""
    environment = {"PURVEYOR_NATS_URL": url, **more}
    command = [*_PROGRAM, "--data-dir", str(data), *arguments]
    process = subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=120)

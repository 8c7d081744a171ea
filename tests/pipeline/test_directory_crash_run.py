"""A live directory under kill -9: what a subscriber has built from its messages equals the directory.

slapd changes at random. Two `purveyor serve ldap` of one source and the pipeline follow it. All of them, nats-server
and slapd are killed; the process that follows is suspended until the other one has taken over; the stored cookie is
deleted. Each message must say what the subscriber has for its object (`old`), and in the end the subscriber must have
what slapd has.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import pytest

from purveyor.jetstream.server import EmbeddedServer, RestartPolicy, ServerOptions
from purveyor.model.event import Event
from purveyor.queues.permissions import component_users
from tests.support.broker import Broker
from tests.support.command_line import invoke
from tests.support.directory_changes import IN_FILTER, DirectoryChanges, Found, read_entries
from tests.support.nats_servers import OwnServer
from tests.support.pipeline_program import Pipeline
from tests.support.processes import kill, python_workers
from tests.support.scale import chance, pick
from tests.support.serve_ldap import ServeLdap
from tests.support.slapd import READER_DN, READER_PASSWORD, SUFFIX, Slapd, SlapdOptions, require_slapd
from tests.support.waiting import wait_until

require_slapd_once = pytest.fixture(scope="module", autouse=True)(require_slapd)

CHANGES = pick(150, 5000)
MOST_ENTRIES = pick(40, 200)
SHORT = ("slapd", "source", "cookie", "paused", "pipeline", "slapd")
LONG = ("slapd", "source", "cookie", "slapd", "paused", "worker", "slapd", "source", "pipeline", "server", "slapd")
"""The cookie is not the last one: a full refresh would hide what was lost before it."""
ROUNDS = pick(SHORT, LONG * 4)
PATIENCE_SECONDS = 900.0
"""Not a promise: a busy machine takes its time."""
SAFE = ServerOptions(
    sync="always", restart=RestartPolicy(max_deaths=1000, max_pause_seconds=0.2), users=component_users()
)
SOURCE, MIRROR = "people", "mirror"
ROOT = f"ou=all,{SUFFIX}"


@dataclass
class Subscriber:
    """What a subscriber has built from its messages: the object of each key."""

    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    untrue: list[str] = field(default_factory=list)
    versions: dict[str, int] = field(default_factory=dict)
    """The newest description of each object: descriptions are numbers that grow."""
    last: int = 0

    def read(self, broker: Broker) -> None:
        """Apply all messages."""
        for row in broker.rows(f"stream:{MIRROR}"):
            if row["subject"] == f"{MIRROR}.main" and row["sequence"] > self.last:
                self.last = row["sequence"]
                self.apply(Event.decode(row["data"]))

    def apply(self, event: Event) -> None:
        key = str(event.object_key)
        had = self.objects.get(key, {})
        if dict(event.old) != had:
            self.untrue.append(f"{self.last} {key}: old is {json.dumps(dict(event.old))}, known was {json.dumps(had)}")
        if not event.new:
            self.objects.pop(key, None)
            return
        self.objects[key] = dict(event.new)
        for text in _texts(self.objects[key]["properties"].get("description")):
            if text.isdigit():
                if int(text) < self.versions.get(key, 0):
                    self.untrue.append(f"{self.last} {key}: {text} after {self.versions[key]}")
                self.versions[key] = int(text)


def _texts(value: Any) -> list[str]:
    return list(value) if isinstance(value, list) else [] if value is None else [str(value)]


def reported(objects: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what is compared of the objects, by uuid."""
    found = {}
    for uuid, given in objects.items():
        properties = given["properties"]
        found[uuid] = {
            "dn": given["dn"],
            "uuid": given["uuid"],
            "position": given["position"],
            "description": _texts(properties.get("description")),
            "sn": _texts(properties.get("lastname")),
            "employeeType": _texts(properties.get("employeeType")),
            "is person": given["objectType"] == "users/user",
        }
    return found


def expected(found: Found) -> dict[str, Any]:
    """Return the same of an entry of slapd."""
    return {
        "dn": found.dn,
        "uuid": found.uuid,
        "position": found.dn.partition(",")[2],
        "description": found.values("description"),
        "sn": found.values("sn"),
        "employeeType": found.values("employeeType"),
        "is person": "inetOrgPerson" in found.values("objectClass"),
    }


class Installation:
    """A directory with its sources, the pipeline and one subscription."""

    def __init__(self, server: EmbeddedServer, data: Path, slapd: Slapd, dice: Random, mode: str) -> None:
        self.server, self.data, self.slapd, self.dice, self.mode = server, data, slapd, dice, mode
        self.filter = IN_FILTER if mode == "syncrepl" else "(objectClass=*)"
        self.broker = Broker(server.address)
        slapd.add(ROOT, objectClass="organizationalUnit", ou="all")
        self.changes = DirectoryChanges(slapd, ROOT, dice, most_entries=MOST_ENTRIES)
        self.killed = 0
        self.pipelines: list[Pipeline] = [Pipeline(data)]
        self.sources: list[ServeLdap] = []
        self.run("subscription", "add", MIRROR, "--topic", "udm:.*")
        self.following = [self.follow(), self.follow()]

    @property
    def pipeline(self) -> Pipeline:
        return self.pipelines[-1]

    def run(self, *arguments: str) -> None:
        """Run a command; the server may be away for longer than a command waits."""

        def done() -> bool:
            outcome = invoke("--data-dir", str(self.data), "--timeout", "30s", *arguments)
            assert outcome.code in (0, 1), outcome
            return outcome.code == 0

        wait_until(done, seconds=PATIENCE_SECONDS)

    def follow(self) -> ServeLdap:
        environment = {
            "PURVEYOR_LDAP_URI": self.slapd.uri,
            "PURVEYOR_LDAP_BASE": ROOT,
            "PURVEYOR_LDAP_BIND_DN": READER_DN,
            "PURVEYOR_LDAP_PASSWORD": READER_PASSWORD,
            "PURVEYOR_LDAP_SOURCE": SOURCE,
            "PURVEYOR_LDAP_FILTER": self.filter,
            "PURVEYOR_LDAP_MODE": self.mode,
        }
        self.sources.append(ServeLdap(self.data, environment=environment))
        return self.sources[-1]

    def at_work(self) -> int:
        """Return which of the two processes follows the directory: the one that said so last."""

        def found() -> list[int]:
            names = [[each["event"] for each in process.events] for process in self.following]
            activities = [[each for each in given if each in ("standby", "refreshing", "following")] for given in names]
            return [at for at, given in enumerate(activities) if given and given[-1] != "standby"]

        return wait_until(found, what="a process that follows")[0]

    def round(self, what: str, count: int) -> None:
        """Change the directory, and do something to a process in the midst of it."""
        before = self.changes.applied
        changing = Failing(lambda: self.changes.apply(count))
        changing.start()
        self.changes.wait_for(before + self.dice.randrange(count))
        time.sleep(self.dice.uniform(0, 0.05))  # wherever it is then
        self.do(what)
        changing.finish()

    def do(self, what: str) -> None:
        match what:
            case "slapd":
                self.slapd.kill()
                self.slapd.start()
            case "source":
                at = self.at_work()
                self.following[at].stop(signal.SIGKILL)
                self.following[at] = self.follow()
            case "paused":
                self.pause()
            case "worker":
                workers = python_workers(self.pipeline.process.pid)
                self.killed += bool(workers) and kill(self.dice.choice(workers))
                return
            case "server":
                pid = self.server.pid
                self.killed += pid is not None and kill(pid)
                return
            case "pipeline":
                self.pipeline.wait_for("ready")
                self.pipeline.kill()
                self.pipelines.append(Pipeline(self.data))
            case _:
                self.run("source", "refresh", SOURCE, "--yes")
        self.killed += 1

    def pause(self) -> None:
        """Suspend the process that follows until the other one has taken over, then let it continue."""
        at = self.at_work()
        other = self.following[1 - at]
        before = sum(each["event"] == "following" for each in other.events)
        os.kill(self.following[at].process.pid, signal.SIGSTOP)
        try:
            other.wait_for("following", times=before + 1)
            self.changes.wait_for(1)
        finally:
            os.kill(self.following[at].process.pid, signal.SIGCONT)

    def until_equal(self, subscriber: Subscriber) -> None:
        """Wait until the subscriber has what slapd has, and no message is on its way."""
        wanted = {each.uuid: expected(each) for each in read_entries(self.slapd, ROOT, self.filter)}

        def is_equal() -> bool:
            assert self.pipeline.process.poll() is None, (self.pipeline.lines, self.pipeline.err)
            is_drained = self.is_drained()
            subscriber.read(self.broker)
            return is_drained and reported(subscriber.objects) == wanted

        try:
            wait_until(is_equal, seconds=pick(180, 300))
        except AssertionError:
            print(*self.report(), sep="\n")
            assert not subscriber.untrue
            assert reported(subscriber.objects) == wanted
            raise

    def is_drained(self) -> bool:
        """Return whether every record has been transformed, and every event dispatched."""
        parts = self.pipeline.status()
        ends = {"transform": "ldif", "dispatch": "incoming"}
        return all(
            int(parts.get(part, {}).get("position") or 0) >= int(self.broker.state(f"stream:{queue}")["last_seq"])
            for part, queue in ends.items()
        )

    def report(self) -> Iterator[str]:
        for process in self.sources:
            yield f"source {process.process.pid}: {[each.get('detail') for each in process.events[-12:]]}"
        yield str(self.pipeline.status())
        yield f"ldif: {self.broker.state('stream:ldif')['messages']}"

    def close(self) -> None:
        for source in self.sources:
            source.close()
        for pipeline in self.pipelines:
            pipeline.close()


class Failing(threading.Thread):
    """A thread whose error is raised by `finish`."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self._work = work
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - raised in the other thread
            self._error = error

    def finish(self) -> None:
        self.join()
        if self._error is not None:
            raise self._error


@pytest.fixture
def install(
    own_server: OwnServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Installation]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PURVEYOR_NATS_URL", raising=False)
    made: list[Installation] = []
    slapds: list[Slapd] = []

    def make(dice: Random, mode: str, options: SlapdOptions) -> Installation:
        data = tmp_path / "data"
        data.mkdir()
        slapds.append(Slapd(tmp_path / "slapd", options).__enter__())
        slapds[-1].add_base()
        made.append(Installation(own_server(SAFE, directory=data / "nats"), data, slapds[-1], dice, mode))
        return made[-1]

    yield make
    for each in made:
        each.close()
    for slapd in slapds:
        slapd.kill()


@pytest.mark.chaos
@pytest.mark.timeout(7200)
@pytest.mark.first
@pytest.mark.parametrize("mode", ["syncrepl", "accesslog"])
def test_a_subscriber_has_what_the_directory_has_whatever_is_killed(
    install: Callable[..., Installation], mode: str
) -> None:
    dice = chance(f"kill -9 around a directory, {mode}")
    options = SlapdOptions(session_log=20, server_id=1, accesslog=mode == "accesslog")
    here = install(dice, mode, options)
    here.pipeline.wait_for("ready")
    here.following[here.at_work()].wait_for("following")
    subscriber = Subscriber()
    for number, what in enumerate(ROUNDS):
        print(f"{datetime.now(UTC):%H:%M:%S} round {number} of {len(ROUNDS)}: {what}", flush=True)
        here.round(what, CHANGES // (len(ROUNDS) + 1))
        if dice.random() < 0.3:
            here.until_equal(subscriber)
    here.changes.apply(CHANGES - here.changes.applied)
    assert here.killed >= pick(4, 30)
    here.until_equal(subscriber)
    refreshes = sum(each["event"] == "following" for source in here.sources for each in source.events)
    print(
        f"{subscriber.last} messages, {len(subscriber.objects)} objects, {here.changes.refused} groups refused,"
        f" {here.killed} kills, {refreshes} refreshes"
    )
    assert subscriber.untrue == []
    assert int(here.broker.state("stream:dead-letters")["messages"]) == 0

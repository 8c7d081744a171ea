"""Each kind of change in each scenario of a live directory: what a subscriber knows equals a real slapd.

The source writes its records into a real queue, the rules of the transform make events of them, and a subscriber builds
its objects. Every `old` must be the object that the subscriber has.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from purveyor.model import json_fields
from purveyor.model.event import Event
from purveyor.model.ldif_changes import RefreshBegin, RefreshEnd
from purveyor.pipeline.transform import load_mapping
from purveyor.pipeline.transform.live_directory import LiveDirectory
from purveyor.pipeline.transform.record_transform import Message, TransformRules, transform
from purveyor.queues.client import Queues
from purveyor.sources.ldap.directory import DEFAULT_FILTER, Mode
from purveyor.sources.ldap.source_status import SourceActivity
from purveyor.sources.ldap.source_store import SourceStore
from purveyor.sources.ldif.live_records import LiveEntry, encode_live_record
from tests.pipeline.transform.memory import MemoryPages, MemoryStore
from tests.support.followed import reader
from tests.support.slapd import SUFFIX, Slapd, SlapdOptions, require_slapd
from tests.support.source_harness import SourceHarness
from tests.support.waiting import until

require_slapd_once = pytest.fixture(scope="module", autouse=True)(require_slapd)
SESSION_LOG = 4
PEOPLE, UNIT, MOVED = f"ou=people,{SUFFIX}", f"ou=unit,{SUFFIX}", f"ou=moved,ou=people,{SUFFIX}"
LARGE = bytes(range(256)) * (5 << 12)  # 5 MB
NOT_UTF_8 = b"\xff\xfe\x00\x80"
FILTER = "(!(employeeType=out))"
OBJECTS = ("modified", "deleted", "renamed", "leaves", "enters", "large", "binary", "options")


def person(name: str, below: str = PEOPLE) -> str:
    return f"uid={name},{below}"


def attributes(name: str, **more: object) -> dict[str, object]:
    return {"objectClass": "inetOrgPerson", "uid": name, "cn": name, "sn": name, "employeeType": "in", **more}


def options(text: str) -> dict[str, object]:
    return {f"description__lang-{number}": f"{text} {number} ä" for number in range(20)}


def fill(slapd: Slapd) -> None:
    """Create what the changes are about."""
    for dn in (PEOPLE, UNIT, f"ou=inner,{UNIT}"):
        slapd.add(dn, objectClass="organizationalUnit", ou=dn[3:].partition(",")[0])
    for name in OBJECTS:
        slapd.add(person(name), **attributes(name))
    slapd.replace(person("enters"), employeeType="out")
    slapd.add(person("below", f"ou=inner,{UNIT}"), **attributes("below"))
    slapd.replace(person("modified"), sn="before")  # the entry of the last change stays


def change_each_way(slapd: Slapd) -> None:
    """Make each kind of change; the large value comes, an entry with it changes, and another one stays as it came."""
    slapd.add(person("added"), **attributes("added"))
    slapd.replace(person("modified"), sn="after")
    slapd.delete(person("deleted"))
    slapd.rename(person("renamed"), "uid=renamed again")
    slapd.rename(UNIT, "ou=moved", new_superior=PEOPLE)
    slapd.replace(person("leaves"), employeeType="out")
    slapd.replace(person("enters"), employeeType="in")
    slapd.add(
        f"cn=referral,{PEOPLE}", objectClass=["referral", "extensibleObject"], ref="ldap://other.example/dc=other"
    )
    slapd.replace(person("large"), jpegPhoto=LARGE)
    slapd.replace(person("large"), sn="with a large value")
    slapd.replace(person("binary"), jpegPhoto=[NOT_UTF_8, b"\x00"], audio=NOT_UTF_8)
    slapd.replace(person("options"), **options("first"))
    slapd.replace(person("options"), **options("second"))


@dataclass
class Subscriber:
    """The rules of the transform, and the objects that a subscriber builds from the events."""

    directory: LiveDirectory = field(default_factory=lambda: LiveDirectory(MemoryStore(), MemoryPages()))
    rules: TransformRules = field(default_factory=lambda: TransformRules(load_mapping("udm"), 16 << 20))
    objects: dict[str, Any] = field(default_factory=dict)
    read: int = 0

    def take(self, data: bytes) -> None:
        self.read += 1
        message = Message(self.read, datetime(2026, 11, 19, tzinfo=UTC), "ldif.people", {}, data)
        for output in transform(self.directory, self.rules, message):
            assert not output.parked, output.headers
            event = Event.decode(output.data)
            assert dict(event.old) == self.objects.get(str(event.key), {}), "old is what the subscriber has"
            self.objects[str(event.key)] = dict(event.new)
        self.objects = {key: known for key, known in self.objects.items() if known}


@dataclass
class FollowedSystem:
    """A directory, the source that follows it, and a subscriber."""

    harness: SourceHarness
    slapd: Slapd
    snapshot: Path
    subscriber: Subscriber = field(default_factory=Subscriber)

    async def objects_of_slapd(self) -> dict[str, Any]:
        fresh = Subscriber()
        async with reader(self.slapd) as client:
            found = await client.search(SUFFIX, self.harness.directory.filter)
        fresh.take(encode_live_record(RefreshBegin(full=True), 1))
        for each in found:
            values = {name: tuple(given) for name, given in each.attributes.items() if name != "userPassword"}
            fresh.take(encode_live_record(LiveEntry(each.attributes["entryUUID"][0].decode(), each.dn, values), 1))
        fresh.take(encode_live_record(RefreshEnd(remove_unseen=True), 1))
        return fresh.objects

    async def until_equal(self) -> None:
        wanted = await self.objects_of_slapd()

        async def is_equal() -> bool:
            for record in (await self.harness.records())[self.subscriber.read :]:
                self.subscriber.take(json_fields.dump(record))
            return self.subscriber.objects == wanted

        await until(is_equal, what="a subscriber that knows what slapd has")

    async def follow(self, change: Callable[[], None] = lambda: None) -> None:
        """Run the source until the subscriber knows what slapd has, also after a change."""
        async with self.harness.running(is_secret=frozenset({"userpassword"}).__contains__) as runner:
            await self.until_equal()
            await until(lambda: runner.status.activity is SourceActivity.FOLLOWING)
            change()
            await self.until_equal()


def restart(system: FollowedSystem) -> None:
    system.slapd.restart()


def crash(system: FollowedSystem) -> None:
    system.slapd.kill()
    system.slapd.start()


def overflow(system: FollowedSystem) -> None:
    for number in range(SESSION_LOG * 2):
        system.slapd.replace(person("modified"), sn=str(number))


def restore(system: FollowedSystem) -> None:
    system.slapd.stop()
    system.slapd.restore(system.snapshot)
    system.slapd.start()
    system.slapd.replace(person("renamed"), sn="changed since")


def nothing(_: FollowedSystem) -> None:
    """The source was stopped, and nothing else."""


@pytest.fixture(params=["syncrepl", "accesslog"])
def mode(request: pytest.FixtureRequest) -> Mode:
    return Mode(request.param)


@pytest.fixture
def system(queues: Queues, unique: str, tmp_path: Path, mode: Mode) -> Iterator[FollowedSystem]:
    settings = SlapdOptions(session_log=SESSION_LOG, accesslog=mode is Mode.ACCESSLOG)
    with Slapd(tmp_path / "slapd", settings) as slapd:
        slapd.add_base()
        fill(slapd)
        given = FILTER if mode is Mode.SYNCREPL else DEFAULT_FILTER
        harness = SourceHarness.of(queues, slapd, unique, mode=mode, filter=given)
        yield FollowedSystem(harness, slapd, tmp_path / "snapshot")


async def test_changes_while_the_source_follows(system: FollowedSystem) -> None:
    await system.follow(lambda: change_each_way(system.slapd))


@pytest.mark.parametrize("meanwhile", [nothing, restart, crash, overflow])
async def test_changes_while_the_source_is_stopped(
    system: FollowedSystem, meanwhile: Callable[[FollowedSystem], None]
) -> None:
    await system.follow()
    change_each_way(system.slapd)
    meanwhile(system)
    await system.follow()


async def test_a_restart_of_slapd_while_the_source_follows(system: FollowedSystem) -> None:
    def change() -> None:
        system.slapd.restart()
        change_each_way(system.slapd)

    await system.follow(change)


async def test_an_older_database(system: FollowedSystem) -> None:
    system.slapd.stop()
    system.slapd.snapshot(system.snapshot)
    system.slapd.start()
    await system.follow(lambda: change_each_way(system.slapd))
    restore(system)
    await system.follow()


async def test_a_deleted_cookie(system: FollowedSystem) -> None:
    await system.follow()
    change_each_way(system.slapd)
    store = await SourceStore.open(system.harness.queues)
    assert await store.forget(system.harness.directory.source)
    await system.follow()

"""The runner of a source on a real slapd and a real NATS server: what is in the queue is what the directory has."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from purveyor.jetstream.server.server_checks import free_port
from purveyor.queues.catalogue import DEAD_LETTERS, LDIF
from purveyor.queues.client import Queues, connect
from purveyor.queues.status_board import Notice, read_notices
from purveyor.sources.ldap.source_status import SourceActivity
from purveyor.sources.ldap.source_store import SourceStore
from tests.support.nats_servers import FAST, OwnServer
from tests.support.slapd import SUFFIX, Slapd, SlapdOptions, require_slapd
from tests.support.small_disk import small_file_system
from tests.support.source_harness import SourceHarness
from tests.support.waiting import until

require_slapd_once = pytest.fixture(scope="module", autouse=True)(require_slapd)
PEOPLE = f"ou=people,{SUFFIX}"


@pytest.fixture
def slapd(tmp_path: Path) -> Iterator[Slapd]:
    with Slapd(tmp_path / "slapd") as server:
        server.add_base()
        server.add(PEOPLE, objectClass="organizationalUnit", ou="people")
        yield server


def person(name: str) -> str:
    return f"uid={name},{PEOPLE}"


def add_person(slapd: Slapd, name: str, **more: object) -> None:
    slapd.add(person(name), objectClass="inetOrgPerson", uid=name, cn=name, sn=name, **more)


def has(*names: str) -> Callable[[object], bool]:
    wanted = {person(name) for name in names}
    return lambda copy: {dn for dn in copy.dns if dn.startswith("uid=")} == wanted  # type: ignore[attr-defined]


async def test_the_directory_first_and_then_each_change(queues: Queues, slapd: Slapd, unique: str) -> None:
    for name in ("anna", "ben", "carl"):
        add_person(slapd, name)
    harness = SourceHarness.of(queues, slapd, unique)
    async with harness.running() as runner:
        await harness.until_copy(has("anna", "ben", "carl"))
        add_person(slapd, "dora")
        slapd.replace(person("anna"), displayName="Ännchen")
        slapd.delete(person("ben"))
        slapd.rename(person("carl"), "uid=karl")
        copy = await harness.until_copy(has("anna", "dora", "karl"))
        assert copy.find(person("anna"))["displayName"] == ["Ännchen"]
        assert copy.refreshes == [True]
        status = runner.status
        assert (status.activity, status.mode, status.entries) == (SourceActivity.FOLLOWING, "syncrepl", 7)
        assert status.lag_seconds is not None
        assert status.last_change is not None
    assert harness.event_names() == ["refreshing", "following"]


async def test_changes_made_while_it_was_stopped_arrive(queues: Queues, slapd: Slapd, unique: str) -> None:
    for name in ("anna", "ben", "carl"):
        add_person(slapd, name)
    harness = SourceHarness.of(queues, slapd, unique)
    async with harness.running():
        await harness.until_copy(has("anna", "ben", "carl"))
    slapd.rename(person("anna"), "uid=anne")
    slapd.delete(person("ben"))
    add_person(slapd, "dora")
    async with harness.running() as runner:
        copy = await harness.until_copy(has("anne", "carl", "dora"))
        assert copy.refreshes == [True, False]
        await until(lambda: runner.status.activity is SourceActivity.FOLLOWING)
        add_person(slapd, "emil")
        await harness.until_copy(has("anne", "carl", "dora", "emil"))


async def test_a_restarted_slapd_is_followed_again(queues: Queues, slapd: Slapd, unique: str) -> None:
    for name in ("anna", "ben"):
        add_person(slapd, name)
    harness = SourceHarness.of(queues, slapd, unique)
    async with harness.running() as runner:
        await harness.until_copy(has("anna", "ben"))
        slapd.stop()
        await until(lambda: runner.status.error)
        slapd.start()
        slapd.delete(person("anna"))
        add_person(slapd, "carl")
        copy = await harness.until_copy(has("ben", "carl"))
        assert copy.refreshes[0] is True
        assert not any(copy.refreshes[1:])
        await until(lambda: runner.status.fix is None and runner.status.activity is SourceActivity.FOLLOWING)
        assert runner.status.error
    assert "problem" in harness.event_names()


async def test_a_full_refresh_follows_when_an_operator_deletes_the_cookie(
    queues: Queues, slapd: Slapd, unique: str
) -> None:
    add_person(slapd, "anna")
    harness = SourceHarness.of(queues, slapd, unique)
    store = await SourceStore.open(queues)
    async with harness.running():
        await harness.until_copy(has("anna"))
        await until(lambda: store.state(unique))
        assert await store.forget(unique)
        await harness.until_copy(lambda copy: copy.refreshes == [True, True])
        add_person(slapd, "ben")
        await harness.until_copy(has("anna", "ben"))
        await until(lambda: store.state(unique))
    await store.forget(unique)
    async with harness.running():
        await harness.until_copy(lambda copy: copy.refreshes == [True, True, True])


async def test_another_base_or_filter_begins_with_a_full_refresh(queues: Queues, slapd: Slapd, unique: str) -> None:
    slapd.add(f"ou=other,{SUFFIX}", objectClass="organizationalUnit", ou="other")
    add_person(slapd, "anna")
    async with SourceHarness.of(queues, slapd, unique).running():
        await SourceHarness.of(queues, slapd, unique).until_copy(has("anna"))
    narrower = SourceHarness.of(queues, slapd, unique, base=PEOPLE)
    async with narrower.running():
        copy = await narrower.until_copy(lambda copy: len(copy.refreshes) == 2 and len(copy.entries) == 2)
        assert copy.refreshes == [True, True]
        assert copy.dns == {PEOPLE, person("anna")}
    assert "refresh" in narrower.event_names()
    filtered = SourceHarness.of(queues, slapd, unique, base=PEOPLE, filter="(uid=*)")
    async with filtered.running():
        copy = await filtered.until_copy(lambda copy: len(copy.refreshes) == 3 and len(copy.entries) == 1)


async def test_the_cookie_is_gone_before_a_full_refresh_begins(queues: Queues, slapd: Slapd, unique: str) -> None:
    """A crash in the refresh must not continue from a cookie before it."""
    add_person(slapd, "anna")
    harness = SourceHarness.of(queues, slapd, unique)
    store = await SourceStore.open(queues)
    async with harness.running():
        await until(lambda: store.state(unique))
    async with SourceHarness.of(queues, slapd, unique, base=f"ou=none,{SUFFIX}").running() as runner:
        await until(lambda: runner.status.error)  # the refresh fails
    stored = await store.state(unique)
    assert stored is not None
    assert stored.cookie is None
    async with harness.running():
        copy = await harness.until_copy(lambda copy: len(copy.refreshes) == 2)
        assert copy.refreshes == [True, True]


async def test_an_older_database_of_the_directory_begins_with_a_full_refresh(
    queues: Queues, slapd: Slapd, unique: str, tmp_path: Path
) -> None:
    add_person(slapd, "anna")
    slapd.stop()
    slapd.snapshot(tmp_path / "backup")
    slapd.start()
    add_person(slapd, "ben")
    harness = SourceHarness.of(queues, slapd, unique)
    async with harness.running():
        await harness.until_copy(has("anna", "ben"))
    slapd.stop()
    slapd.restore(tmp_path / "backup")
    slapd.start()
    async with harness.running():
        copy = await harness.until_copy(has("anna"))
        assert copy.refreshes == [True, True]


async def test_a_second_process_stands_by_and_takes_over_at_once(queues: Queues, slapd: Slapd, unique: str) -> None:
    add_person(slapd, "anna")
    first, second = SourceHarness.of(queues, slapd, unique), SourceHarness.of(queues, slapd, unique)
    async with first.running():
        await first.until_copy(has("anna"))
        stop = asyncio.Event()
        standby = second.runner()
        task = asyncio.create_task(standby.run(stop))
        await until(lambda: standby.status.activity is SourceActivity.STANDBY)
    add_person(slapd, "ben")
    copy = await second.until_copy(has("anna", "ben"))
    assert copy.refreshes == [True, False]
    assert {record["epoch"] for record in await second.records()} == {copy.epoch - 1, copy.epoch}
    stop.set()
    await task


async def test_a_process_that_was_suspended_writes_nothing_more(queues: Queues, slapd: Slapd, unique: str) -> None:
    add_person(slapd, "anna")
    first, second = SourceHarness.of(queues, slapd, unique), SourceHarness.of(queues, slapd, unique)
    async with first.running() as suspended:
        await first.until_copy(has("anna"))
        # Another process takes the lease over, as after a long suspension of the first one.
        taker = await SourceStore.open(queues, lease_seconds=0.0)
        await taker.take(unique)
        taken = await taker.take(unique)
        assert taken is not None
        add_person(slapd, "ben")
        await until(lambda: suspended.status.activity is SourceActivity.STANDBY)
        epochs = {record["epoch"] for record in await first.records()}
        assert max(epochs) < taken.epoch
        await taken.release()
        await second.until_copy(has("anna", "ben"))


async def test_secrets_are_never_in_the_queue(queues: Queues, slapd: Slapd, unique: str) -> None:
    add_person(slapd, "anna", userPassword="very secret", description="public")
    harness = SourceHarness.of(queues, slapd, unique)
    async with harness.running(is_secret=frozenset({"userpassword"}).__contains__):
        await harness.until_copy(has("anna"))
        slapd.replace(person("anna"), userPassword="also secret", description="changed")
        copy = await harness.until_copy(lambda copy: copy.find(person("anna"))["description"] == ["changed"])
        assert "userPassword" not in copy.find(person("anna"))
    text = str(await harness.records())
    assert "secret" not in text
    assert "userPassword" not in text


async def test_an_entry_that_is_too_large_is_a_dead_letter_and_stays_present(
    queues: Queues, slapd: Slapd, unique: str
) -> None:
    add_person(slapd, "anna")
    add_person(slapd, "large", jpegPhoto=bytes(queues.connection.max_payload))
    harness = SourceHarness.of(queues, slapd, unique)
    async with harness.running() as runner:
        await harness.until_copy(has("anna"))
        await until(lambda: runner.status.parked == 1)
        slapd.replace(person("large"), jpegPhoto=b"small")
        await harness.until_copy(has("anna", "large"))
        slapd.replace(person("large"), jpegPhoto=bytes(queues.connection.max_payload))
        await until(lambda: runner.status.parked == 2)
        add_person(slapd, "ben")
        await harness.until_copy(has("anna", "large", "ben"))
    letter = await queues.streams.get_last(DEAD_LETTERS.stream, "dead-letters.intake")
    assert letter.headers["Purveyor-Subject"] == (f"ldif.{unique}",)


async def test_a_wrong_password_is_reported_with_what_to_do(queues: Queues, slapd: Slapd, unique: str) -> None:
    harness = SourceHarness.of(queues, slapd, unique, password="not-this-one")
    async with harness.running() as runner:
        await until(lambda: runner.status.error)
        assert runner.status.activity is SourceActivity.FAILED
        assert runner.status.fix == "check the bind DN and the password"
        # The error stays on the status board while the source waits for its next attempt.
        key = runner.status.key
        first = await until(lambda: read_notice(queues, key))
        later = await until(lambda: read_notice(queues, key, after=first.at))
        assert (later.value["state"], later.value["fix"]) == ("failed", runner.status.fix)
    assert "not-this-one" not in str(harness.events)
    assert await harness.records() == []


async def read_notice(queues: Queues, key: str, after: datetime | None = None) -> Notice | None:
    """Return the notice of a failed source, if it was written after a time."""
    for each in await read_notices(queues, "source"):
        if each.key == key and each.at is not None and each.value["state"] == "failed":
            return each if after is None or each.at > after else None
    return None


async def test_a_server_without_syncprov_is_reported_by_the_name_of_the_overlay(
    queues: Queues, unique: str, tmp_path: Path
) -> None:
    with Slapd(tmp_path / "plain", SlapdOptions(syncprov=False)) as slapd:
        slapd.add_base()
        harness = SourceHarness.of(queues, slapd, unique)
        async with harness.running() as runner:
            await until(lambda: runner.status.error)
            assert "syncprov" in str(runner.status.fix)


async def test_a_state_of_a_newer_version_stops_this_source_and_is_not_changed(
    queues: Queues, slapd: Slapd, unique: str
) -> None:
    bucket = await queues.bucket("sources")
    revision = await bucket.put(unique, b'{"version":7}')
    harness = SourceHarness.of(queues, slapd, unique)
    async with harness.running() as runner:
        await until(lambda: runner.status.error)
        assert "version 7" in str(runner.status.error)
    assert (await bucket.get(unique)).revision == revision
    assert await harness.records() == []


async def test_changes_during_an_outage_of_the_nats_server_arrive_after_it(
    own_server: OwnServer, slapd: Slapd, unique: str, tmp_path: Path
) -> None:
    server = own_server(directory=tmp_path / "store")
    async with connect(server.address) as queues:
        harness = SourceHarness.of(queues, slapd, unique)
        async with harness.running() as runner:
            await harness.until_copy(has())
            server.stop()
            for number in range(20):
                add_person(slapd, f"p{number}")
            await asyncio.sleep(10)  # the outage
            server = own_server(directory=tmp_path / "store")
            harness.address = server.address
            await harness.until_copy(has(*(f"p{number}" for number in range(20))))
            await until(lambda: runner.status.activity is SourceActivity.FOLLOWING)


async def test_a_full_disk_of_the_nats_server_is_named_and_changes_arrive_when_there_is_room(
    own_server: OwnServer, slapd: Slapd, unique: str, tmp_path: Path
) -> None:
    with small_file_system(tmp_path / "disk", "100m") as disk:
        server = own_server(directory=disk.path / "store")
        async with connect(server.address) as queues:
            harness = SourceHarness.of(queues, slapd, unique)
            async with harness.running() as runner:
                add_person(slapd, "before")
                await harness.until_copy(has("before"))
                disk.fill()
                for number in range(20):
                    add_person(slapd, f"p{number}", description="x" * 100_000)
                await until(lambda: runner.status.error)
                disk.clear()
                await harness.until_copy(has("before", *(f"p{number}" for number in range(20))))
                await until(lambda: runner.status.activity is SourceActivity.FOLLOWING)
        server.stop()


async def test_records_whose_outcome_stays_unknown_come_in_a_refresh_of_another_epoch(
    own_server: OwnServer, slapd: Slapd, unique: str, tmp_path: Path
) -> None:
    server = own_server(directory=tmp_path / "store")
    async with connect(server.address) as queues:
        harness = SourceHarness.of(queues, slapd, unique)
        await queues.ensure(LDIF)
        await queues.streams.update(LDIF.stream, {"duplicate_window": timedelta(seconds=1)})
        async with harness.running() as runner:
            await until(lambda: runner.status.activity is SourceActivity.FOLLOWING)
            before = runner.status.epoch or 0
            server.stop()
            add_person(slapd, "anna")
            await until(lambda: any("has not confirmed records" in text for _, text in harness.events))
            server = own_server(directory=tmp_path / "store")
            harness.address = server.address
            copy = await harness.until_copy(has("anna"))
        assert copy.epoch > before
        assert len(copy.refreshes) > 1


async def test_a_nats_server_that_is_back_at_another_port_is_found(
    own_server: OwnServer, slapd: Slapd, unique: str, tmp_path: Path
) -> None:
    server = own_server(directory=tmp_path / "store")
    async with connect(server.address) as queues:
        harness = SourceHarness.of(queues, slapd, unique)
        async with harness.running():
            await harness.until_copy(has())
            server.stop()
            moved = own_server(replace(FAST, port=free_port("127.0.0.1")), directory=tmp_path / "store")
            assert moved.address != server.address
            harness.address = moved.address
            async with connect(moved.address) as other:
                again = SourceHarness.of(other, slapd, unique)
                add_person(slapd, "anna")
                await again.until_copy(has("anna"))

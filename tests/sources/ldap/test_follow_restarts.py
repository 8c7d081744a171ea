"""A copy equals a real slapd after restarts, a full session log, a restored database and a lost cookie."""

from pathlib import Path

import pytest

from purveyor.sources.ldap.ldap_client import FollowOptions
from purveyor.sources.ldap.sync_consumer import (
    EntriesDeleted,
    EntriesPresent,
    EntryReported,
    RefreshBegan,
    RefreshEnded,
    RefreshRequired,
    SyncChange,
)
from tests.support.followed import Follower
from tests.support.slapd import SUFFIX, Slapd, SlapdOptions

SESSION_LOG = 8
PEOPLE = f"ou=people,{SUFFIX}"
UNCHECKED = FollowOptions(check_cookie=False)
UNREPEATED = FollowOptions(repeat_last=False)


@pytest.fixture(scope="module")
def slapd_options() -> SlapdOptions:
    return SlapdOptions(session_log=SESSION_LOG)


@pytest.fixture
def directory(slapd: Slapd) -> Slapd:
    """Empty the directory, and fill it with six people."""
    slapd.kill()
    slapd.wipe()
    slapd.start()
    slapd.add_base()
    slapd.add(PEOPLE, objectClass="organizationalUnit", ou="people")
    slapd.add_many((person(name), attributes(name)) for name in "abcdef")
    return slapd


def person(name: str) -> str:
    return f"uid={name},{PEOPLE}"


def attributes(name: str) -> dict[str, object]:
    return {"objectClass": "inetOrgPerson", "uid": name, "cn": name, "sn": name}


def change_each_way(slapd: Slapd) -> None:
    """Make each kind of change; the last one is of an entry that stays."""
    slapd.delete(person("a"))
    slapd.replace(person("b"), sn="changed")
    slapd.rename(person("c"), "uid=renamed")
    slapd.rename(person("d"), "uid=d", new_superior=SUFFIX)
    slapd.add(person("new"), **attributes("new"))


def count(changes: list[SyncChange], kind: type[SyncChange]) -> int:
    return sum(isinstance(each, kind) for each in changes)


def last_refresh(changes: list[SyncChange]) -> RefreshEnded:
    ended = [each for each in changes if isinstance(each, RefreshEnded)]
    return ended[-1]


async def test_changes_while_no_one_follows_arrive_with_the_session_log(directory: Slapd) -> None:
    follower = Follower(directory)
    await follower.refresh()
    change_each_way(directory)
    changes = await follower.refresh()
    assert count(changes, EntryReported) == 5, "four changes, and the last one before them once more"
    assert count(changes, EntriesDeleted) == 1
    assert not last_refresh(changes).remove_unseen
    changes = await follower.refresh()
    assert count(changes, EntryReported) == 1, "the last change comes again, and no other"


@pytest.mark.parametrize("crash", [False, True])
async def test_changes_before_a_restart_arrive_with_a_present_phase(directory: Slapd, crash: bool) -> None:
    follower = Follower(directory)
    await follower.refresh()
    change_each_way(directory)
    if crash:
        directory.kill()
        directory.start()
    else:
        directory.restart()
    changes = await follower.refresh()
    assert count(changes, EntriesPresent)
    assert last_refresh(changes).remove_unseen


@pytest.mark.parametrize("changed_since", [False, True])
async def test_a_deletion_that_a_killed_slapd_has_no_trace_of(directory: Slapd, changed_since: bool) -> None:
    """After the crash slapd takes the newest CSN of the entries that are left for its last one: that of the cookie."""
    directory.restart()  # stores its last CSN
    follower = Follower(directory)
    await follower.refresh()
    directory.delete(person("a"))
    directory.kill()
    directory.start()
    if changed_since:
        directory.replace(person("b"), sn="changed since")
    await follower.refresh()
    assert person("a") not in {each.dn for each in follower.copy.entries.values()}


async def test_slapd_itself_does_not_notice_a_deletion_before_it_was_killed(directory: Slapd) -> None:
    """The reason of `repeat_last`. If this fails, slapd has become better and the repetition can go."""
    directory.restart()
    follower = Follower(directory, options=UNREPEATED)
    await follower.refresh()
    directory.delete(person("a"))
    directory.kill()
    directory.start()
    directory.replace(person("b"), sn="changed since")
    async with follower.follow():
        assert person("a") in {each.dn for each in follower.copy.entries.values()}


async def test_a_session_log_that_overflows_is_made_up_by_a_present_phase(directory: Slapd) -> None:
    follower = Follower(directory)
    await follower.refresh()
    directory.delete(person("a"))
    for number in range(SESSION_LOG * 2):
        directory.replace(person("b"), sn=str(number))
    changes = await follower.refresh()
    assert count(changes, EntriesPresent)
    assert last_refresh(changes).remove_unseen


async def test_a_lost_cookie_costs_a_full_refresh(directory: Slapd) -> None:
    follower = Follower(directory)
    await follower.refresh()
    change_each_way(directory)
    follower.copy.cookie = None
    changes = await follower.refresh()
    assert RefreshBegan(full=True) in changes
    assert last_refresh(changes).remove_unseen


async def test_an_older_cookie_repeats_changes_and_misses_none(directory: Slapd) -> None:
    follower = Follower(directory)
    await follower.refresh()
    older = follower.copy.cookie
    change_each_way(directory)
    await follower.refresh()
    follower.copy.cookie = older
    await follower.refresh()


@pytest.mark.parametrize("changed_since", [False, True])
async def test_an_older_database_that_was_restored(directory: Slapd, tmp_path: Path, changed_since: bool) -> None:
    follower = Follower(directory)
    await follower.refresh()
    directory.stop()
    directory.snapshot(tmp_path / "snapshot")
    directory.start()
    change_each_way(directory)
    await follower.refresh()
    directory.stop()
    directory.restore(tmp_path / "snapshot")
    directory.start()
    if changed_since:  # the server's CSN is newer than the cookie now, and slapd accepts the cookie
        directory.replace(person("f"), sn="changed since")
    changes = await follower.refresh()
    assert count(changes, RefreshRequired) == 1
    assert last_refresh(changes).remove_unseen
    assert person("a") in {each.dn for each in follower.copy.entries.values()}


async def test_slapd_itself_does_not_notice_a_restored_database_that_has_changed(
    directory: Slapd, tmp_path: Path
) -> None:
    """The reason of `check_cookie`. If this fails, slapd has become better and the check can go."""
    follower = Follower(directory, options=UNCHECKED)
    await follower.refresh()
    directory.stop()
    directory.snapshot(tmp_path / "snapshot")
    directory.start()
    directory.add(person("lost"), **attributes("lost"))
    await follower.refresh()
    directory.stop()
    directory.restore(tmp_path / "snapshot")
    directory.start()
    directory.replace(person("f"), sn="changed since")
    async with follower.follow():
        assert not follower.of(RefreshRequired)
        assert not follower.of(EntriesDeleted)
        assert person("lost") in {each.dn for each in follower.copy.entries.values()}


async def test_a_change_without_proof_costs_a_full_refresh(directory: Slapd) -> None:
    """The entry of the cookie's change was deleted, so the server has no trace of the change."""
    follower = Follower(directory)
    await follower.refresh()
    directory.replace(person("a"), sn="last seen")
    await follower.refresh()
    directory.delete(person("a"))
    changes = await follower.refresh()
    assert count(changes, RefreshRequired) == 1


async def test_a_directory_that_was_emptied_and_filled_anew(directory: Slapd) -> None:
    follower = Follower(directory)
    await follower.refresh()
    directory.kill()
    directory.wipe()
    directory.start()
    directory.add_base()
    await follower.refresh()
    assert len(follower.copy.entries) == 3

"""The consumer of RFC 4533: each rule by itself, and a copy that equals a model of a directory after anything."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purveyor.sources.ldap.ber import BerError, encode_octets
from purveyor.sources.ldap.ldap_errors import (
    DirectoryRefused,
    DirectoryUnavailable,
    LimitExceeded,
    NotUnderstood,
    ReferralRefused,
    ResultCode,
    SyncNotSupported,
)
from purveyor.sources.ldap.ldap_messages import (
    BindResponse,
    Control,
    IntermediateResponse,
    LdapMessage,
    LdapResult,
    SearchResultEntry,
    SearchResultReference,
)
from purveyor.sources.ldap.sync_consumer import (
    CookieAdvanced,
    EntriesDeleted,
    EntriesPresent,
    EntryReported,
    RefreshBegan,
    RefreshEnded,
    RefreshRequired,
    SyncChange,
    SyncConsumer,
    SyncStage,
)
from purveyor.sources.ldap.sync_controls import SYNC_STATE, EntryState, SyncMode
from tests.support.directory_model import Copy, DirectoryModel
from tests.support.scale import pick
from tests.support.sync_messages import (
    SEARCH_ID,
    entry,
    id_set,
    make_csn,
    make_uuid,
    new_cookie,
    phase_end,
    search_done,
)

OLD, NEW, NEWER = (f"rid=000,csn={make_csn(number)}" for number in (1, 2, 3))
ONE, TWO = make_uuid(1), make_uuid(2)


def feed(consumer: SyncConsumer, *messages: LdapMessage) -> list[SyncChange]:
    return [change for message in messages for change in consumer.receive(message)]


def test_a_first_refresh_reports_all_and_the_unseen_are_gone() -> None:
    consumer = SyncConsumer()
    content = entry(1, EntryState.ADD, dn="cn=a", attributes={"cn": [b"a"]})
    # slapd ends the refresh of an empty client with a delete phase; the client may know entries all the same.
    assert feed(consumer, content, phase_end(present=False, cookie=NEW)) == [
        RefreshBegan(full=True),
        EntryReported(ONE, "cn=a", {"cn": [b"a"]}, EntryState.ADD),
        RefreshEnded(remove_unseen=True, cookie=NEW),
    ]
    assert consumer.stage is SyncStage.PERSIST
    assert consumer.cookie == NEW


def test_a_delete_phase_names_what_is_gone() -> None:
    assert feed(
        SyncConsumer(OLD), id_set([1], deleted=True), entry(2, EntryState.ADD), phase_end(present=False, cookie=NEW)
    ) == [
        RefreshBegan(full=False),
        EntriesDeleted((ONE,)),
        EntryReported(TWO, "cn=2", {}, EntryState.ADD),
        RefreshEnded(remove_unseen=False, cookie=NEW),
    ]


def test_a_present_phase_names_what_exists() -> None:
    assert feed(
        SyncConsumer(OLD), id_set([1], deleted=False), entry(2, EntryState.PRESENT), phase_end(present=True)
    ) == [
        RefreshBegan(full=False),
        EntriesPresent((ONE,)),
        EntriesPresent((TWO,)),
        RefreshEnded(remove_unseen=True, cookie=OLD),
    ]


def test_a_present_phase_before_a_delete_phase_still_removes_the_unseen_at_the_end() -> None:
    changes = feed(
        SyncConsumer(OLD),
        entry(1, EntryState.PRESENT),
        phase_end(present=True, done=False, cookie=NEW),
        id_set([2], deleted=True),
        phase_end(present=False, cookie=NEWER),
    )
    assert changes[-1] == RefreshEnded(remove_unseen=True, cookie=NEWER)
    assert sum(isinstance(each, RefreshEnded) for each in changes) == 1


@pytest.mark.parametrize(
    ("cookie", "phases", "refresh_deletes", "remove_unseen"),
    [
        (None, [], True, True),
        ("rid=000", [], True, True),
        (OLD, [], True, False),
        (OLD, [], False, True),
        (OLD, [phase_end(present=True, done=False)], True, True),
        (OLD, [phase_end(present=False, done=False)], True, False),
    ],
)
def test_the_end_of_a_refresh_only_search(
    cookie: str | None, phases: list[LdapMessage], refresh_deletes: bool, remove_unseen: bool
) -> None:
    consumer = SyncConsumer(cookie, mode=SyncMode.REFRESH_ONLY)
    done = search_done(cookie=NEW, refresh_deletes=refresh_deletes)
    changes = feed(consumer, *phases, done)
    assert isinstance(changes[0], RefreshBegan)
    assert changes[-1] == RefreshEnded(remove_unseen, NEW)
    assert consumer.stage is SyncStage.ENDED


def test_cookies_inside_a_refresh_are_not_given_out() -> None:
    consumer = SyncConsumer(OLD)
    changes = feed(
        consumer, entry(1, EntryState.ADD, cookie=NEWER), id_set([2], deleted=True, cookie=NEWER), new_cookie(NEWER)
    )
    assert not any(isinstance(each, CookieAdvanced) for each in changes)
    assert consumer.cookie == OLD


def test_the_persist_stage_gives_a_cookie_behind_each_change() -> None:
    consumer = SyncConsumer(OLD)
    feed(consumer, phase_end(present=False))
    assert feed(
        consumer,
        entry(1, EntryState.MODIFY, cookie=NEW, dn="cn=new name"),
        entry(1, EntryState.DELETE, cookie=NEWER),
        id_set([2], deleted=True),
        new_cookie(NEWER),
        phase_end(present=False),
    ) == [
        EntryReported(ONE, "cn=new name", {}, EntryState.MODIFY),
        CookieAdvanced(NEW),
        EntriesDeleted((ONE,)),
        CookieAdvanced(NEWER),
        EntriesDeleted((TWO,)),
    ]


def test_a_present_phase_in_the_persist_stage_removes_nothing() -> None:
    consumer = SyncConsumer(OLD)
    feed(consumer, phase_end(present=False))
    with pytest.raises(DirectoryUnavailable, match="outside of a refresh"):
        consumer.receive(phase_end(present=True))


def test_a_cookie_that_is_too_old_asks_for_a_refresh() -> None:
    for stage in (SyncConsumer(OLD), SyncConsumer(OLD)):
        feed(stage, entry(1, EntryState.ADD))
        changes = feed(stage, search_done(ResultCode.SYNC_REFRESH_REQUIRED, text="sync cookie is stale"))
        assert changes == [RefreshRequired("sync cookie is stale")]
        assert stage.stage is SyncStage.ENDED


def test_a_cookie_newer_than_a_restored_database_asks_for_a_refresh() -> None:
    changes = feed(SyncConsumer(OLD), search_done(53, text="consumer state is newer than provider!"))
    assert changes == [RefreshRequired("consumer state is newer than provider!")]
    with pytest.raises(DirectoryRefused):
        SyncConsumer().receive(search_done(53))


def test_an_end_without_success_proves_nothing_about_unseen_entries() -> None:
    consumer = SyncConsumer()
    assert feed(consumer, entry(1, EntryState.ADD))
    with pytest.raises(LimitExceeded, match="limits"):
        consumer.receive(search_done(ResultCode.SIZE_LIMIT_EXCEEDED))
    with pytest.raises(NotUnderstood, match="after the last one"):
        consumer.receive(entry(1, EntryState.ADD))


@pytest.mark.parametrize("code", [ResultCode.BUSY, ResultCode.UNAVAILABLE])
def test_a_busy_server_is_asked_again(code: ResultCode) -> None:
    with pytest.raises(DirectoryUnavailable) as caught:
        SyncConsumer().receive(search_done(code))
    assert caught.value.retryable
    assert caught.value.code == code


def test_a_server_that_ignores_the_control_is_named() -> None:
    plain = LdapMessage(SEARCH_ID, SearchResultEntry("cn=a", {}))
    for message in (plain, search_done(sync=False), search_done(ResultCode.UNAVAILABLE_CRITICAL_EXTENSION)):
        with pytest.raises(SyncNotSupported, match="syncprov"):
            SyncConsumer().receive(message)


def test_referrals_and_foreign_responses_are_refused() -> None:
    with pytest.raises(ReferralRefused, match="ldap://b/dc=x"):
        SyncConsumer().receive(LdapMessage(SEARCH_ID, SearchResultReference(("ldap://b/dc=x",))))
    with pytest.raises(NotUnderstood, match="BindResponse"):
        SyncConsumer().receive(LdapMessage(SEARCH_ID, BindResponse(LdapResult(0))))
    other = LdapMessage(SEARCH_ID, IntermediateResponse("1.2.3", b""))
    assert SyncConsumer().receive(other) == ()


def test_an_entry_without_a_uuid_is_named() -> None:
    value = b"\x30\x05\x0a\x01\x01" + encode_octets(b"")
    nameless = LdapMessage(SEARCH_ID, SearchResultEntry("cn=log", {}), (Control(SYNC_STATE, value=value),))
    with pytest.raises(DirectoryRefused, match="cn=log has no entryUUID"):
        SyncConsumer().receive(nameless)
    broken = LdapMessage(SEARCH_ID, SearchResultEntry("cn=log", {}), (Control(SYNC_STATE, value=b"\x30"),))
    with pytest.raises(BerError):
        SyncConsumer().receive(broken)


def test_the_end_of_the_persist_stage_keeps_its_cookie() -> None:
    consumer = SyncConsumer(OLD)
    feed(consumer, phase_end(present=False))
    assert feed(consumer, search_done(cookie=NEW)) == [CookieAdvanced(NEW)]
    assert consumer.stage is SyncStage.ENDED


@given(st.integers(0, 2**32), st.integers(1, pick(30, 100)))
def test_a_copy_equals_the_directory_after_any_interleaving(seed: int, sessions: int) -> None:
    """Changes, lost connections, lost and old cookies, and all forms of a refresh, against a model."""
    chance = random.Random(seed)
    directory, copy = DirectoryModel(chance), Copy()
    for _ in range(sessions):
        for _ in range(chance.randrange(12)):
            directory.change()
        if chance.random() < 0.15:
            directory.forget()
        if chance.random() < 0.15:
            copy.cookie = None
        follow(directory, copy, breaks=True)
    while not follow(directory, copy, breaks=False):
        pass


def expect_equal(directory: DirectoryModel, copy: Copy) -> None:
    names = {uuid: each.dn for uuid, each in copy.entries.items()}
    assert names == {make_uuid(number): dn for number, dn in directory.content().items()}


def follow(directory: DirectoryModel, copy: Copy, *, breaks: bool) -> bool:
    """Run one synchronisation, which a lost connection may end; return whether it ran to its end.

    Then the copy must equal the directory.
    """
    chance = directory.chance
    persist = chance.random() < 0.7
    mode = SyncMode.REFRESH_AND_PERSIST if persist else SyncMode.REFRESH_ONLY
    consumer = SyncConsumer(copy.cookie, mode=mode)
    for message in directory.refresh(copy.cookie, persist=persist):
        if breaks and chance.random() < 0.05:
            return False
        for change in consumer.receive(message):
            copy.apply(change, store_cookie=not breaks or chance.random() < 0.9)
            if isinstance(change, RefreshRequired):
                return False
    assert consumer.stage is (SyncStage.PERSIST if persist else SyncStage.ENDED)
    for _ in range(chance.randrange(8) if persist else 0):
        for message in directory.change():
            if breaks and chance.random() < 0.1:
                return False
            for change in consumer.receive(message):
                copy.apply(change, store_cookie=not breaks or chance.random() < 0.9)
    expect_equal(directory, copy)
    return True

"""Following a real slapd: every kind of change as it happens, TLS, and what the server refuses."""

import asyncio
import ssl
from functools import partial
from pathlib import Path

import pytest
import uvloop

from purveyor.sources.ldap.directory import DirectoryAddress
from purveyor.sources.ldap.ldap_client import FollowOptions, connect
from purveyor.sources.ldap.ldap_errors import (
    CertificateRefused,
    CredentialsRefused,
    DirectoryRefused,
    DirectoryUnavailable,
    EncryptionRequired,
    LimitExceeded,
    NoSuchBase,
    ReferralRefused,
    SyncNotSupported,
)
from purveyor.sources.ldap.ldap_messages import Scope
from purveyor.sources.ldap.sync_consumer import (
    CookieAdvanced,
    EntriesDeleted,
    EntryReported,
    RefreshBegan,
    RefreshEnded,
    SyncChange,
)
from purveyor.sources.ldap.sync_controls import EntryState, SyncMode
from tests.support.certificates import Authority
from tests.support.followed import Follower, reader
from tests.support.slapd import (
    LIMITED_DN,
    LIMITED_PASSWORD,
    READER_DN,
    READER_PASSWORD,
    SUFFIX,
    Slapd,
    SlapdOptions,
    require_slapd,
)
from tests.support.waiting import until

SIZE_LIMIT = 30
UNCHECKED = FollowOptions(check_cookie=False)
"""For what slapd answers to a cookie that it would not have to prove."""


@pytest.fixture(scope="module")
def slapd_options() -> SlapdOptions:
    return SlapdOptions(
        tls=True,
        server_id=1,
        size_limit=SIZE_LIMIT,
        global_lines=("referral ldap://elsewhere.example/",),
    )


@pytest.fixture
def unit(slapd: Slapd, unique: str) -> str:
    """Add an organizational unit for one test; return its DN."""
    dn = f"ou={unique},{SUFFIX}"
    slapd.add(dn, objectClass="organizationalUnit", ou=unique)
    return dn


def add_person(slapd: Slapd, unit: str, uid: str, **more: object) -> str:
    dn = f"uid={uid},{unit}"
    slapd.add(dn, objectClass=["inetOrgPerson", "extensibleObject"], uid=uid, cn=uid, sn="Meier", **more)
    return dn


def reported(follower: Follower) -> list[EntryReported]:
    return [each for each in follower.changes if isinstance(each, EntryReported)]


async def follow_once(address: DirectoryAddress, base: str = SUFFIX) -> list[SyncChange]:
    options = FollowOptions(mode=SyncMode.REFRESH_ONLY)
    async with connect(address) as client:
        return [change async for change in client.follow(base, options=options)]


async def test_each_kind_of_change_arrives_as_it_happens(slapd: Slapd, unit: str) -> None:
    follower = Follower(slapd, base=unit)
    async with follower.follow():
        dn = add_person(slapd, unit, "a")
        slapd.replace(dn, sn="Müller", title=["x", "y"])
        slapd.rename(dn, "uid=b")
        slapd.delete(f"uid=b,{unit}")
        await until(lambda: follower.of(EntriesDeleted), what="the deletion")
        names = [(each.state, each.dn, each.attributes["sn"][0].decode()) for each in reported(follower)[1:]]
        assert names == [
            (EntryState.ADD, f"uid=a,{unit}", "Meier"),
            (EntryState.MODIFY, f"uid=a,{unit}", "Müller"),
            (EntryState.MODIFY, f"uid=b,{unit}", "Müller"),
        ]
        uuids = {each.uuid for each in reported(follower)[1:]}
        assert follower.of(EntriesDeleted) == [EntriesDeleted((uuids.pop(),))]
        assert not uuids, "a rename kept its entryUUID"
        await until(lambda: isinstance(follower.changes[-1], CookieAdvanced), what="a cookie behind the last change")
        await follower.until_equal()
    assert follower.copy.cookie is not None
    assert "sid" not in follower.copy.cookie


async def test_a_stored_cookie_is_not_taken_for_that_of_the_server_itself(slapd: Slapd, unit: str) -> None:
    """A client that sends the id of the server back gets no more changes from it."""
    follower = Follower(slapd, base=unit)
    await follower.refresh()
    async with follower.follow():
        add_person(slapd, unit, "a")
        await until(lambda: reported(follower), what="a change after a refresh with a cookie")


async def test_a_subtree_that_moves_takes_its_entries_along(slapd: Slapd, unit: str) -> None:
    """slapd reports the root alone, live and in a refresh: those below follow from the rules of `sync_consumer`."""
    for name in ("one", "two", "three"):
        slapd.add(f"ou={name},{unit}", objectClass="organizationalUnit", ou=name)
        slapd.add(f"ou=team,ou={name},{unit}", objectClass="organizationalUnit", ou="team")
        add_person(slapd, f"ou=team,ou={name},{unit}", name)
    follower = Follower(slapd, base=unit, options=UNCHECKED)
    async with follower.follow():
        slapd.rename(f"ou=team,ou=one,{unit}", "ou=moved", new_superior=f"ou=three,{unit}")
        moved = f"ou=moved,ou=three,{unit}"
        await until(lambda: any(each.dn == moved for each in reported(follower)), what="the moved root")
        await follower.until_equal()
        assert not any(each.dn == f"uid=one,{moved}" for each in reported(follower))
        assert f"uid=one,{moved}" in {each.dn for each in follower.copy.entries.values()}
    # While no one follows, two subtrees change places, and a new entry is where the other one was.
    slapd.rename(f"ou=two,{unit}", "ou=aside")
    slapd.rename(f"ou=three,{unit}", "ou=two")
    slapd.rename(f"ou=aside,{unit}", "ou=three")
    add_person(slapd, f"ou=team,ou=three,{unit}", "four")
    changes = await follower.refresh()
    assert RefreshBegan(full=False) in changes
    assert f"uid=one,ou=moved,ou=two,{unit}" in {each.dn for each in follower.copy.entries.values()}


async def test_an_entry_that_enters_and_leaves_the_filter(slapd: Slapd, unit: str) -> None:
    dn = add_person(slapd, unit, "a", employeeType="guest")
    follower = Follower(slapd, base=unit, filter_text="(employeeType=staff)", options=UNCHECKED)
    async with follower.follow():
        slapd.replace(dn, employeeType="staff")
        await until(lambda: reported(follower), what="an entry that enters the filter")
        slapd.replace(dn, employeeType="guest")
        await until(lambda: follower.of(EntriesDeleted), what="an entry that leaves the filter")
    slapd.replace(dn, employeeType="staff")
    await follower.refresh()
    slapd.replace(dn, employeeType="guest")
    changes = await follower.refresh()
    assert EntriesDeleted((reported_uuid(changes),)) in changes
    assert not follower.copy.entries


def reported_uuid(changes: list[SyncChange]) -> str:
    return next(uuid for each in changes if isinstance(each, EntriesDeleted) for uuid in each.uuids)


async def test_an_entry_that_leaves_and_enters_the_scope(slapd: Slapd, unit: str) -> None:
    slapd.add(f"ou=inside,{unit}", objectClass="organizationalUnit", ou="inside")
    dn = add_person(slapd, unit, "a")
    follower = Follower(slapd, base=f"ou=inside,{unit}")
    async with follower.follow():
        slapd.rename(dn, "uid=a", new_superior=f"ou=inside,{unit}")
        await until(lambda: len(reported(follower)) == 2, what="an entry that enters the scope")
        slapd.rename(f"uid=a,ou=inside,{unit}", "uid=a", new_superior=unit)
        await until(lambda: follower.of(EntriesDeleted), what="an entry that leaves the scope")
        await follower.until_equal()


async def test_values_arrive_byte_by_byte(slapd: Slapd, unit: str) -> None:
    photo, binary = bytes(range(256)) * (5 << 12), bytes([255, 254, 0, 10, 13])
    certificate = ssl.PEM_cert_to_DER_cert(slapd.tls_ca.read_text())
    options = {f"description__lang-{number}": f"{number} ä" for number in range(20)}
    follower = Follower(slapd, base=unit)
    async with follower.follow():
        dn = add_person(slapd, unit, "a", jpegPhoto=[photo, binary], userCertificate__binary=certificate, **options)
        await until(lambda: len(reported(follower)) == 2, what="the entry")
        attributes = reported(follower)[1].attributes
        assert reported(follower)[1].dn == dn
        assert sorted(attributes["jpegPhoto"]) == sorted([photo, binary])
        assert attributes["userCertificate;binary"] == [certificate]
        for number in range(20):
            assert attributes[f"description;lang-{number}"] == [f"{number} ä".encode()]
        assert {"entryUUID", "entryCSN", "creatorsName", "modifyTimestamp"} <= attributes.keys()
        await follower.until_equal()


async def test_a_refresh_alone_ends_by_itself(slapd: Slapd, unit: str) -> None:
    add_person(slapd, unit, "a")
    address = DirectoryAddress(slapd.uri, bind_dn=READER_DN, password=READER_PASSWORD)
    changes = await follow_once(address, unit)
    assert changes[0] == RefreshBegan(full=True)
    assert isinstance(changes[-1], RefreshEnded)
    assert changes[-1].remove_unseen
    assert len(changes) == 4


async def test_the_root_dse_and_each_scope_of_a_search(slapd: Slapd, unit: str) -> None:
    add_person(slapd, unit, "a")
    async with reader(slapd) as client:
        root = await client.read_root_dse()
        assert root.supports_sync
        assert SUFFIX in root.naming_contexts
        for scope, count in ((Scope.BASE, 1), (Scope.ONE, 1), (Scope.SUB, 2)):
            assert len(await client.search(unit, scope=scope, attributes=("uid",))) == count
        (found,) = await client.search(unit, "(uid=A)", attributes=("uid",))
        assert found.attributes == {"uid": [b"a"]}


async def test_referral_objects_are_entries_and_other_servers_are_named(slapd: Slapd, unit: str) -> None:
    slapd.add(
        f"ou=away,{unit}",
        objectClass=["referral", "extensibleObject"],
        ou="away",
        ref="ldap://other.example/ou=away",
    )
    follower = Follower(slapd, base=unit)
    await follower.refresh()
    assert f"ou=away,{unit}" in {each.dn for each in reported(follower)}
    address = DirectoryAddress(slapd.uri, bind_dn=READER_DN, password=READER_PASSWORD)
    for base, place in (
        (f"ou=away,{unit}", "ldap://other.example/ou=away"),
        (f"ou=x,ou=away,{unit}", "ldap://other.example/"),
        ("dc=nowhere", "ldap://elsewhere.example/dc=nowhere"),
    ):
        with pytest.raises(ReferralRefused, match="does not follow referrals") as caught:
            await follow_once(address, base)
        assert caught.value.uris[0].startswith(place)
        assert not caught.value.retryable


async def test_an_account_with_a_size_limit_is_cut_off_with_a_reason(slapd: Slapd, unit: str) -> None:
    slapd.add_many(
        (f"uid={number},{unit}", {"objectClass": "account", "uid": str(number)}) for number in range(SIZE_LIMIT + 1)
    )
    address = DirectoryAddress(slapd.uri, bind_dn=LIMITED_DN, password=LIMITED_PASSWORD)
    with pytest.raises(LimitExceeded, match=r"sizeLimitExceeded.*limits") as caught:
        await follow_once(address, unit)
    assert not caught.value.retryable
    async with connect(address) as client:
        with pytest.raises(LimitExceeded):
            await client.search(unit)
    await Follower(slapd, base=unit).refresh()


@pytest.mark.parametrize(
    ("account", "base", "kind"),
    [
        ((READER_DN, "wrong"), SUFFIX, CredentialsRefused),
        ((f"cn=nobody,{SUFFIX}", "wrong"), SUFFIX, CredentialsRefused),
        ((READER_DN, READER_PASSWORD), f"ou=missing,{SUFFIX}", NoSuchBase),
        ((READER_DN, READER_PASSWORD), "no dn", DirectoryRefused),
        (("no dn", "x"), SUFFIX, DirectoryRefused),
        (("", ""), SUFFIX, DirectoryRefused),
    ],
)
async def test_what_a_person_must_correct_is_permanent(
    slapd: Slapd, account: tuple[str, str], base: str, kind: type[DirectoryRefused]
) -> None:
    with pytest.raises(kind) as caught:
        await follow_once(DirectoryAddress(slapd.uri, bind_dn=account[0], password=account[1]), base)
    assert not caught.value.retryable
    assert caught.value.fix


@pytest.mark.parametrize("start_tls", [True, False])
async def test_tls_with_the_authority_of_the_server(slapd: Slapd, start_tls: bool, tmp_path: Path) -> None:
    def address(ca: Path | None, host: str = "127.0.0.1") -> DirectoryAddress:
        uri = f"ldap://{host}:{slapd.port}" if start_tls else f"ldaps://{host}:{slapd.tls_port}"
        return DirectoryAddress(uri, bind_dn=READER_DN, password=READER_PASSWORD, tls_ca=ca, start_tls=start_tls)

    assert len(await follow_once(address(slapd.tls_ca))) > 3
    Authority(tmp_path)
    for ca in (tmp_path / "ca.pem", None):
        with pytest.raises(CertificateRefused, match="certificate") as caught:
            await follow_once(address(ca))
        assert not caught.value.retryable
    with pytest.raises(CertificateRefused, match="localhost"):
        await follow_once(address(slapd.tls_ca, "localhost"))


def test_each_connection_works_on_uvloop(slapd: Slapd) -> None:
    """The loop of the API and of `serve` programs."""
    bound = partial(DirectoryAddress, bind_dn=READER_DN, password=READER_PASSWORD, tls_ca=slapd.tls_ca)
    for address in (bound(slapd.uri), bound(slapd.uri, start_tls=True), bound(slapd.tls_uri)):
        changes = uvloop.run(follow_once(address))
        assert isinstance(changes[-1], RefreshEnded)


async def test_a_large_value_passes_tls(slapd: Slapd, unit: str) -> None:
    photo = bytes(range(256)) * (5 << 12)
    add_person(slapd, unit, "a", jpegPhoto=photo)
    address = DirectoryAddress(slapd.tls_uri, bind_dn=READER_DN, password=READER_PASSWORD, tls_ca=slapd.tls_ca)
    changes = await follow_once(address, unit)
    found = [each.attributes.get("jpegPhoto") for each in changes if isinstance(each, EntryReported)]
    assert found == [None, [photo]]


async def test_a_server_without_syncprov_is_named(tmp_path: Path) -> None:
    require_slapd()
    options = SlapdOptions(syncprov=False, tls=True, global_lines=("security simple_bind=64",))
    with Slapd(tmp_path / "slapd", options) as bare:
        address = DirectoryAddress(bare.uri, bind_dn=READER_DN, password=READER_PASSWORD)
        with pytest.raises(EncryptionRequired, match="StartTLS"):
            await follow_once(address)
        bare.stop()
        bare.options = SlapdOptions(syncprov=False)
        bare.prepare()
        bare.start()
        bare.add_base()
        with pytest.raises(SyncNotSupported, match="syncprov"):
            await follow_once(address)


@pytest.mark.parametrize("crash", [False, True])
async def test_a_server_that_stops_is_retryable(slapd: Slapd, crash: bool) -> None:
    follower = Follower(slapd)
    async with follower.follow():
        await asyncio.to_thread(slapd.kill if crash else slapd.stop)
        await until(lambda: follower.error, what="the end of the connection")
    assert isinstance(follower.error, DirectoryUnavailable), follower.error
    with pytest.raises(DirectoryUnavailable):
        await follow_once(DirectoryAddress(slapd.uri))
    slapd.start()
    await follower.refresh()

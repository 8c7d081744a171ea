"""The access log of a real slapd: every operation, in order, with intermediate versions."""

import pytest

from purveyor.model.ldif_changes import Change, Step
from purveyor.sources.ldap.accesslog import WRITES_FILTER, AttributeChange, Operation, read_operation
from purveyor.sources.ldap.ldap_client import FollowOptions
from purveyor.sources.ldap.sync_consumer import EntriesDeleted, EntriesPresent, EntryReported, RefreshEnded
from tests.support.followed import Follower, reader
from tests.support.slapd import LOG_SUFFIX, SUFFIX, Slapd, SlapdOptions
from tests.support.waiting import until

PHOTO = bytes(range(256))
_OF_THE_SERVER = {"entryCSN", "modifiersName", "modifyTimestamp"}

ONCE = FollowOptions(repeat_last=False)


@pytest.fixture(scope="module")
def slapd_options() -> SlapdOptions:
    return SlapdOptions(accesslog=True, session_log_source=True)


@pytest.fixture
def unit(slapd: Slapd, unique: str) -> str:
    dn = f"ou={unique},{SUFFIX}"
    slapd.add(dn, objectClass="organizationalUnit", ou=unique)
    return dn


def operations(follower: Follower, unit: str) -> list[Operation]:
    entries = [each for each in follower.changes if isinstance(each, EntryReported)]
    found = [read_operation(each.dn, each.attributes) for each in entries]
    return [each for each in found if each is not None and unit in each.dn]


def changes_of(operation: Operation) -> list[AttributeChange]:
    return [each for each in operation.changes if each.attribute not in _OF_THE_SERVER]


async def test_every_operation_is_recorded_in_order(slapd: Slapd, unit: str) -> None:
    dn = f"uid=a,{unit}"
    follower = Follower(slapd, base=LOG_SUFFIX, filter_text=WRITES_FILTER, options=ONCE)
    async with follower.follow():
        slapd.add(dn, objectClass="inetOrgPerson", uid="a", cn=["a", "ä"], sn="a", jpegPhoto=PHOTO)
        slapd.apply(
            f"dn: {dn}\nchangetype: modify\nadd: mail\nmail: 1\n-\nadd: mail\nmail: 2\n-\ndelete: jpegPhoto\n-\n"
            "add: cn;lang-de\ncn;lang-de: x\ncn;lang-de: y\n-\ndelete: cn\ncn: a\n-\nreplace: title\n-\nreplace: sn\n"
            "sn: b\nsn: c\n-\n"
        )
        slapd.replace(dn, sn="d")
        slapd.rename(dn, "uid=b", delete_old_rdn=False)
        slapd.add(f"ou=to,{unit}", objectClass="organizationalUnit", ou="to")
        slapd.rename(f"uid=b,{unit}", "uid=b", new_superior=f"ou=to,{unit}")
        with pytest.raises(AssertionError, match="No such object"):
            slapd.delete(dn)
        slapd.delete(f"uid=b,ou=to,{unit}")
        await until(lambda: len(operations(follower, unit)) == 8, what="eight operations")
    _, add, modify, replace, rename, _, move, delete = operations(follower, unit)
    assert len({each.uuid for each in (add, modify, replace, rename, move, delete)}) == 1
    csns = [each.csn for each in operations(follower, unit)]
    assert csns == sorted(set(csns))

    assert add.change is Change.ADD
    assert add.dn == dn
    assert add.attributes["cn"] == (b"a", "ä".encode())
    assert add.attributes["jpegPhoto"] == (PHOTO,)
    assert add.attributes["entryUUID"] == (str(add.uuid).encode(),)

    assert changes_of(modify) == [
        AttributeChange(Step.ADD, "mail", (b"1",)),
        AttributeChange(Step.ADD, "mail", (b"2",)),
        AttributeChange(Step.DELETE, "jpegPhoto"),
        AttributeChange(Step.ADD, "cn;lang-de", (b"x", b"y")),
        AttributeChange(Step.DELETE, "cn", (b"a",)),
        AttributeChange(Step.REPLACE, "title"),
        AttributeChange(Step.REPLACE, "sn", (b"b", b"c")),
    ]
    assert modify.old["jpegPhoto"] == (PHOTO,)
    assert changes_of(replace) == [AttributeChange(Step.REPLACE, "sn", (b"d",))]
    assert (rename.new_rdn, rename.delete_old_rdn, rename.new_superior) == ("uid=b", False, None)
    assert (move.dn, move.new_rdn, move.new_superior) == (f"uid=b,{unit}", "uid=b", f"ou=to,{unit}")
    assert move.new_dn == f"uid=b,ou=to,{unit}"
    assert delete.change is Change.DELETE
    assert set(delete.old["uid"]) == {b"a", b"b"}
    assert delete.old["sn"] == (b"d",)


async def test_operations_while_no_one_reads_the_log_are_not_merged(slapd: Slapd, unit: str) -> None:
    follower = Follower(slapd, base=LOG_SUFFIX, filter_text=WRITES_FILTER, options=ONCE)
    async with follower.follow():
        pass
    for number in range(5):
        slapd.replace(unit, description=str(number))
    slapd.restart()
    async with follower.follow():
        values = [changes_of(each)[0].values for each in operations(follower, unit)]
    assert values == [(str(number).encode(),) for number in range(5)]


async def test_the_log_proves_each_change_of_a_cookie(slapd: Slapd, unit: str) -> None:
    follower = Follower(slapd, base=LOG_SUFFIX, filter_text=WRITES_FILTER, options=ONCE)
    async with follower.follow():
        pass
    slapd.replace(unit, description="1")
    async with follower.follow():
        pass
    slapd.replace(unit, description="2")
    assert follower.copy.cookie is not None
    async with reader(slapd) as client:
        assert await client.find_lost_change(LOG_SUFFIX, follower.copy.cookie) is None
        assert await client.find_lost_change(SUFFIX, follower.copy.cookie) is not None


async def test_a_session_log_in_the_access_log_survives_a_restart(slapd: Slapd, unit: str) -> None:
    """With `syncprov-sessionlog-source` deletions are named after a restart, too."""
    for name in ("a", "b"):
        slapd.add(f"ou={name},{unit}", objectClass="organizationalUnit", ou=name)
    follower = Follower(slapd, options=FollowOptions(check_cookie=False))
    await follower.refresh()
    slapd.delete(f"ou=a,{unit}")
    slapd.restart()
    changes = await follower.refresh()
    ended = [each for each in changes if isinstance(each, RefreshEnded)]
    assert not any(isinstance(each, EntriesPresent) for each in changes)
    assert any(isinstance(each, EntriesDeleted) for each in changes)
    assert not ended[-1].remove_unseen

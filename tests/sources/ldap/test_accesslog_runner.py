"""A source that follows the accesslog of a real slapd: every operation in order, on top of a full refresh."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from purveyor.queues.client import Queues
from purveyor.sources.ldap.directory import Mode
from purveyor.sources.ldap.source_status import SourceActivity
from tests.support.slapd import LOG_SUFFIX, SUFFIX, Slapd, SlapdOptions, require_slapd
from tests.support.source_harness import SourceHarness
from tests.support.waiting import until

require_slapd_once = pytest.fixture(scope="module", autouse=True)(require_slapd)
PEOPLE, OTHERS = f"ou=people,{SUFFIX}", f"ou=others,{SUFFIX}"
Record = dict[str, Any]


@pytest.fixture
def slapd(tmp_path: Path) -> Iterator[Slapd]:
    with Slapd(tmp_path / "slapd", SlapdOptions(accesslog=True)) as server:
        server.add_base()
        for dn in (PEOPLE, OTHERS):
            server.add(dn, objectClass="organizationalUnit", ou=dn.partition(",")[0].removeprefix("ou="))
        yield server


def add_person(slapd: Slapd, name: str, below: str = PEOPLE, **more: object) -> str:
    dn = f"uid={name},{below}"
    slapd.add(dn, objectClass="inetOrgPerson", uid=name, cn=name, sn=name, **more)
    return dn


async def operations(harness: SourceHarness) -> list[Record]:
    """Return the records after the last refresh."""
    records = await harness.records()
    ends = [number for number, record in enumerate(records) if record["change"] == "refresh-end"]
    return records[ends[-1] + 1 :] if ends else []


async def until_operations(harness: SourceHarness, condition: Callable[[list[Record]], object]) -> list[Record]:
    async def found() -> list[Record] | None:
        seen = await operations(harness)
        return seen if condition(seen) else None

    return await until(found)


def kinds(records: list[Record]) -> list[str]:
    return [record["change"] for record in records if not record.get("catch_up")]


async def test_every_version_arrives_in_order_without_secrets(queues: Queues, slapd: Slapd, unique: str) -> None:
    anna = add_person(slapd, "anna")
    harness = SourceHarness.of(queues, slapd, unique)
    async with harness.running(is_secret=frozenset({"userpassword"}).__contains__) as runner:
        await until(lambda: runner.status.activity is SourceActivity.FOLLOWING)
        assert runner.status.mode == "accesslog"
        await harness.until_copy(lambda copy: anna in copy.dns)
        for number in range(3):
            slapd.replace(anna, description=str(number), userPassword=f"very secret {number}")
        slapd.rename(anna, "uid=anne")
        slapd.delete(f"uid=anne,{PEOPLE}")
        add_person(slapd, "ben", userPassword="very secret")
        found = await until_operations(harness, lambda seen: len(kinds(seen)) == 6)
        assert kinds(found) == ["modify", "modify", "modify", "modrdn", "delete", "add"]
        live = [record for record in found if not record.get("catch_up")]
        values = [
            step["values"]
            for record in live[:3]
            for step in record["modifications"]
            if step["attribute"] == "description"
        ]
        assert values == [["0"], ["1"], ["2"]]
        assert [record["csn"] for record in live] == sorted(record["csn"] for record in live)
        assert len({record["uuid"] for record in live[:5]}) == 1
        assert runner.status.entries == 6
    assert "secret" not in str(await harness.records())


async def test_operations_while_it_was_stopped_arrive_one_by_one(queues: Queues, slapd: Slapd, unique: str) -> None:
    anna = add_person(slapd, "anna")
    harness = SourceHarness.of(queues, slapd, unique, mode=Mode.ACCESSLOG)
    async with harness.running() as runner:
        await until(lambda: runner.status.activity is SourceActivity.FOLLOWING)
    for number in range(3):
        slapd.replace(anna, description=str(number))
    slapd.delete(anna)
    async with harness.running():
        copy = await harness.until_copy(lambda copy: len(copy.refreshes) == 2 and anna not in copy.dns)
    records = [each["change"] for each in await harness.records()]
    second = len(records) - records[::-1].index("refresh-begin") - 1
    assert records[second - 4 : second] == ["modify", "modify", "modify", "delete"]
    assert copy.refreshes == [True, False], "the second one finds what slapd has not logged"


async def test_an_operation_that_a_killed_slapd_did_not_log_is_found(queues: Queues, slapd: Slapd, unique: str) -> None:
    """slapd writes an operation first into the directory, and then into its log."""
    anna, ben = add_person(slapd, "anna"), add_person(slapd, "ben")
    harness = SourceHarness.of(queues, slapd, unique, mode=Mode.ACCESSLOG)
    async with harness.running() as runner:
        await until(lambda: runner.status.activity is SourceActivity.FOLLOWING)
    slapd.delete(ben)
    carl = add_person(slapd, "carl")
    for kind, dn in (("delete", ben), ("add", carl)):
        logged = slapd.run("ldapsearch", "-LLL", "-b", LOG_SUFFIX, f"(&(reqType={kind})(reqDN={dn}))", "dn").split(
            "\n\n"
        )
        slapd.run("ldapdelete", logged[-2].removeprefix("dn: ").strip())
    slapd.kill()
    slapd.start()
    slapd.replace(carl, description="of an entry whose addition is not in the log")
    async with harness.running():
        copy = await harness.until_copy(lambda copy: len(copy.refreshes) == 2 and carl in copy.dns)
        assert copy.dns >= {anna, carl}
        assert ben not in copy.dns
        assert copy.refreshes == [True, False]


async def test_moves_over_the_border_of_the_base(queues: Queues, slapd: Slapd, unique: str) -> None:
    inside, outside = add_person(slapd, "inside"), f"ou=team,{OTHERS}"
    slapd.add(outside, objectClass="organizationalUnit", ou="team")
    add_person(slapd, "member", outside)
    harness = SourceHarness.of(queues, slapd, unique, base=PEOPLE)
    async with harness.running() as runner:
        await until(lambda: runner.status.activity is SourceActivity.FOLLOWING)
        slapd.replace(outside, description="ignored")
        slapd.rename(outside, "ou=team", new_superior=PEOPLE)
        copy = await harness.until_copy(lambda copy: len(copy.entries) == 4)
        assert copy.dns == {PEOPLE, inside, f"ou=team,{PEOPLE}", f"uid=member,ou=team,{PEOPLE}"}
        slapd.rename(f"ou=team,{PEOPLE}", "ou=team", new_superior=OTHERS)
        await harness.until_copy(lambda copy: copy.dns == {PEOPLE, inside})
    assert "ignored" not in str([each for each in await operations(harness) if each["change"] == "modify"])


async def test_a_move_out_of_the_base_while_it_was_stopped_leaves_nothing_behind(
    queues: Queues, slapd: Slapd, unique: str
) -> None:
    team = f"ou=team,{PEOPLE}"
    slapd.add(team, objectClass="organizationalUnit", ou="team")
    add_person(slapd, "member", team)
    harness = SourceHarness.of(queues, slapd, unique, base=PEOPLE)
    async with harness.running() as runner:
        await until(lambda: runner.status.activity is SourceActivity.FOLLOWING)
    slapd.rename(team, "ou=team", new_superior=OTHERS)
    slapd.delete(f"uid=member,ou=team,{OTHERS}")
    async with harness.running():
        await harness.until_copy(lambda copy: copy.dns == {PEOPLE})


async def test_a_log_that_was_purged_begins_with_a_full_refresh(queues: Queues, slapd: Slapd, unique: str) -> None:
    anna = add_person(slapd, "anna")
    harness = SourceHarness.of(queues, slapd, unique)
    async with harness.running() as runner:
        await until(lambda: runner.status.activity is SourceActivity.FOLLOWING)
    slapd.delete(anna)
    ben = add_person(slapd, "ben")
    entries = slapd.run("ldapsearch", "-LLL", "-b", LOG_SUFFIX, "(reqType=*)", "dn").split("\n\n")
    for entry in entries:
        if entry.startswith("dn: "):
            slapd.run("ldapdelete", entry.removeprefix("dn: ").strip())
    async with harness.running():
        copy = await harness.until_copy(lambda copy: len(copy.refreshes) == 2 and ben in copy.dns)
        assert anna not in copy.dns


async def test_a_filter_excludes_the_accesslog(queues: Queues, slapd: Slapd, unique: str) -> None:
    harness = SourceHarness.of(queues, slapd, unique, filter="(uid=*)")
    async with harness.running() as runner:
        await until(lambda: runner.status.activity is SourceActivity.FOLLOWING)
        assert runner.status.mode == "syncrepl"
    wrong = SourceHarness.of(queues, slapd, unique, filter="(uid=*)", mode=Mode.ACCESSLOG)
    async with wrong.running() as runner:
        await until(lambda: runner.status.error)
        assert "leave the filter out" in str(runner.status.fix)


@pytest.mark.parametrize(
    "base",
    [
        rf"OU = Sales\, North, {SUFFIX}",
        rf"ou=Sales\2c North,{SUFFIX}",
        rf"organizationalUnitName=Sales\, North,{SUFFIX}",
    ],
)
async def test_a_base_may_be_spelled_in_another_way_than_by_the_server(
    queues: Queues, slapd: Slapd, unique: str, base: str
) -> None:
    north = rf"ou=Sales\, North,{SUFFIX}"
    slapd.add(north, objectClass="organizationalUnit", ou="Sales, North")
    harness = SourceHarness.of(queues, slapd, unique, base=base)
    async with harness.running() as runner:
        await until(lambda: runner.status.activity is SourceActivity.FOLLOWING)
        add_person(slapd, "anna", north)
        found = await until_operations(harness, lambda seen: "add" in kinds(seen))
        assert found[-1]["dn"].startswith("uid=anna,")

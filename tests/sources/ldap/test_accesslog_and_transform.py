"""The operations of a real slapd, applied by the transform: the entries must be those of slapd, value by value."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from purveyor.model import json_fields
from purveyor.pipeline.transform.live_directory import LiveDirectory
from purveyor.pipeline.transform.live_records import LiveRecord, parse_message
from purveyor.pipeline.transform.live_rules import apply_live_record
from purveyor.queues.client import Queues
from purveyor.sources.ldap.source_status import SourceActivity
from tests.pipeline.transform.memory import MemoryPages, MemoryStore
from tests.support.directory_changes import read_entries
from tests.support.slapd import SUFFIX, Slapd, SlapdOptions, require_slapd
from tests.support.source_harness import SourceHarness
from tests.support.waiting import until

require_slapd_once = pytest.fixture(scope="module", autouse=True)(require_slapd)
PEOPLE = f"ou=people,{SUFFIX}"
COMPARED = (
    "cn", "description", "displayName", "mail", "member", "mobile", "sn", "telephoneNumber", "title", "uid",
    "uniqueMember",
)  # fmt: skip
ADA, GROUP, CLUB = f"uid=ada,{PEOPLE}", f"cn=group,{PEOPLE}", f"cn=club,{PEOPLE}"
MODIFIES = {
    "a telephone number without its spaces and hyphens": (ADA, "delete: telephoneNumber", "telephoneNumber: +49301234"),
    "a mail address in another case": (ADA, "delete: mail", "mail: ADA@EXAMPLE"),
    "a text with other spaces": (ADA, "delete: description", "description: two spaces"),
    "an attribute by its other name": (ADA, "replace: surname", "surname: Byron"),
    "an attribute by its number": (ADA, "add: 2.5.4.12", "2.5.4.12: Countess"),
    "a member spelled differently": (GROUP, "delete: member", f"member: UID=Ada, OU=People, {SUFFIX.upper()}"),
    "a member with an escaped comma": (GROUP, "delete: member", f"member: cn=weird\\2c name,{PEOPLE}"),
    "a unique member": (CLUB, "delete: uniqueMember", f"uniqueMember: UID=Ada, OU=People,{SUFFIX}"),
}
RENAMES = {
    "in case only": ("case", "uid=CASE", True, None),
    "in case only, the old value stays": ("stays", "uid=STAYS", False, None),
    "to a value that is there in another case": ("two", "uid=X TWO", True, None),
    "to the same name below another parent": ("moved", "uid=moved", True, SUFFIX),
    "to several values": ("more", "uid=MORE+cn=several", True, None),
}


@pytest.fixture
def slapd(tmp_path: Path) -> Iterator[Slapd]:
    with Slapd(tmp_path / "slapd", SlapdOptions(accesslog=True)) as server:
        server.add_base()
        server.add(PEOPLE, objectClass="organizationalUnit", ou="people")
        yield server


def add_person(slapd: Slapd, name: str, **more: object) -> None:
    given = {"uid": [name, f"x {name}"], "cn": name.upper(), "sn": name, **more}
    slapd.add(f"uid={name},{PEOPLE}", objectClass="inetOrgPerson", **given)


async def test_values_that_slapd_takes_for_equal_are_equal_to_the_transform(
    queues: Queues, slapd: Slapd, unique: str
) -> None:
    harness = SourceHarness.of(queues, slapd, unique)
    async with harness.running() as runner:
        await until(lambda: runner.status.activity is SourceActivity.FOLLOWING)
        phones = ["+49 30 12-34", "77"]
        add_person(slapd, "ada", telephoneNumber=phones, mail=["Ada@example", "b@x"], description=["Two  Spaces", "x"])
        slapd.add(GROUP, objectClass="groupOfNames", cn="group", member=[ADA, f"CN=Weird\\, Name,{PEOPLE}", SUFFIX])
        slapd.add(CLUB, objectClass="groupOfUniqueNames", cn="club", uniqueMember=[ADA, SUFFIX])
        for dn, *lines in MODIFIES.values():
            slapd.apply("\n".join((f"dn: {dn}", "changetype: modify", *lines, "-\n")))
        for name, rdn, delete_old_rdn, superior in RENAMES.values():
            add_person(slapd, name)
            slapd.rename(f"uid={name},{PEOPLE}", rdn, delete_old_rdn=delete_old_rdn, new_superior=superior)
        add_person(slapd, "last")
        await until(lambda: _has_last(harness))
    assert runner.status.mode == "accesslog"
    directory = LiveDirectory(store := MemoryStore(), MemoryPages())
    for record in await harness.records():
        live = parse_message(json_fields.dump(record))
        assert isinstance(live, LiveRecord)
        directory.begin()
        apply_live_record(directory, live)
    known = {
        entry.dn: {name: entry.attributes.get(name.lower(), []) for name in COMPARED}
        for entry in store.entries.values()
    }
    there = {each.dn: {name: each.values(name) for name in COMPARED} for each in read_entries(slapd, SUFFIX)}
    assert known == there


async def _has_last(harness: SourceHarness) -> bool:
    return any(record.get("dn", "").startswith("uid=last,") for record in await harness.records())

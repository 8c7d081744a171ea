"""What the members of a group are in the mapping `udm`: by their entries where these are known, else by their names."""

from typing import Any

import pytest

from purveyor.model.event import Event
from tests.pipeline.transform.memory import body, modify
from tests.pipeline.transform.transformer import Transformer

ALL = "cn=all,cn=groups,dc=e"
ADA = "cn=Ada,cn=groups,dc=e"
TEAM = "cn=team,ou=teams,dc=e"
PC = "cn=pc1,ou=machines,dc=e"
ENTRIES = {
    ADA: {"objectClass": ["inetOrgPerson"], "cn": ["Ada"], "sn": ["Lovelace"]},
    TEAM: {"objectClass": ["groupOfNames"], "cn": ["team"]},
    PC: {"univentionObjectType": ["computers/linux"], "objectClass": ["univentionHost"], "cn": ["pc1"]},
}
BY_TYPE = {"users": [ADA], "nestedGroup": [TEAM], "hosts": [PC]}
BY_NAME = {"users": [TEAM, PC], "nestedGroup": [ADA], "hosts": []}


def group(**attributes: Any) -> dict[str, Any]:
    return {"objectClass": ["groupOfNames"], "cn": ["all"], **attributes}


def members(given: Any) -> dict[str, list[str]]:
    return {kind: given["properties"][kind] for kind in BY_TYPE}


@pytest.fixture
def transformer() -> Transformer:
    return Transformer(mapping="udm")


def add(transformer: Transformer, dn: str) -> Event:
    (event,) = transformer.events(body(dn, "content", attributes=ENTRIES[dn]))
    return event


@pytest.mark.parametrize("attribute", ["uniqueMember", "member"])
def test_the_type_of_a_member_decides_where_it_is_known(transformer: Transformer, attribute: str) -> None:
    for dn in ENTRIES:
        add(transformer, dn)
    spelled = [ADA.upper().replace(",", ", "), TEAM, PC]
    (created,) = transformer.events(body(ALL, "content", attributes=group(**{attribute: spelled})))
    assert members(created.new) == {**BY_TYPE, "users": [spelled[0]]}


def test_a_member_that_becomes_known_later_moves_with_the_next_change_of_the_group(transformer: Transformer) -> None:
    content = body(ALL, "content", attributes=group(member=list(ENTRIES)))
    (created,) = transformer.events(content)
    assert members(created.new) == BY_NAME
    for dn in ENTRIES:
        add(transformer, dn)
    (changed,) = transformer.events(modify(ALL, ("replace", "description", ["everyone"])))
    assert (changed.old, members(changed.new)) == (created.new, BY_TYPE)
    assert (
        transformer.events(body(ALL, "content", attributes=group(member=list(ENTRIES), description=["everyone"]))) == []
    )


def test_a_member_that_is_gone_stays_what_it_was(transformer: Transformer) -> None:
    for dn in ENTRIES:
        add(transformer, dn)
    (created,) = transformer.events(body(ALL, "content", attributes=group(member=list(ENTRIES))))
    for dn in ENTRIES:
        transformer.events(body(dn, "delete"))
    (renamed,) = transformer.events(body(ALL, "modrdn", new_rdn="cn=each", delete_old_rdn=True))
    assert (renamed.old, members(renamed.new)) == (created.new, BY_TYPE)
    (fewer,) = transformer.events(modify(f"cn=each,{ALL.partition(',')[2]}", ("delete", "member", [TEAM])))
    assert (fewer.old, members(fewer.new)) == (renamed.new, {**BY_TYPE, "nestedGroup": []})
    (gone,) = transformer.events(body(f"cn=each,{ALL.partition(',')[2]}", "delete"))
    assert gone.old == fewer.new


def test_what_is_neither_a_user_nor_a_group_nor_a_host_is_judged_by_its_name(transformer: Transformer) -> None:
    transformer.outputs(body(TEAM, "content", attributes={"objectClass": ["organizationalRole"], "cn": ["team"]}))
    (created,) = transformer.events(body(ALL, "content", attributes=group(member=[TEAM])))
    assert members(created.new) == {"users": [TEAM], "nestedGroup": [], "hosts": []}

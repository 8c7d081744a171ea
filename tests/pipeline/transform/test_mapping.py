"""A mapping gives the object of an entry; an invalid one is an error with the key and the fix."""

from pathlib import Path
from typing import Any

import pytest

from purveyor.model.errors import InvalidConfig
from purveyor.pipeline.transform import Mapping, load_mapping, parse_mapping
from purveyor.pipeline.transform.directory_records import parse_record
from purveyor.pipeline.transform.directory_rules import Entry
from purveyor.pipeline.transform.mapping import MappedObject, Unmatched
from tests.pipeline.transform.memory import body


def entry(**attributes: Any) -> Entry:
    spelled = {name.replace("__", ";"): values for name, values in attributes.items()}
    record = parse_record(body("cn=x,dc=e", "content", attributes=spelled))
    return Entry("cn=x,dc=e", "id-1", record.attributes)


def mapped(mapping: Mapping, **attributes: Any) -> MappedObject:
    found = mapping.map(entry(**attributes))
    assert isinstance(found, MappedObject)
    assert found.object["dn"] == "cn=x,dc=e"
    assert found.object["uuid"] == "id-1"
    return found


def seen(mapping: Mapping, **attributes: Any) -> dict[str, Any]:
    found = mapped(mapping, **attributes).object
    return {name: value for name, value in found.items() if name not in ("dn", "uuid")}


@pytest.mark.parametrize(
    ("classes", "topic"),
    [
        (["top", "inetOrgPerson"], "users/user"),
        (["POSIXACCOUNT"], "users/user"),
        (["groupOfNames"], "groups/group"),
        (["posixGroup"], "groups/group"),
        (["organizationalUnit"], "container/ou"),
        (["dcObject", "organization"], "container/organization"),
        (["domain"], "container/dc"),
        (["device"], "computers/device"),
    ],
)
def test_the_plain_mapping_covers_the_common_classes(classes: list[str], topic: str) -> None:
    found = mapped(load_mapping("plain"), objectClass=classes)
    assert (found.realm, found.topic) == ("ldap", topic)


def test_the_plain_mapping_gives_types_and_keeps_secrets_away() -> None:
    assert seen(
        load_mapping("plain"),
        objectClass=["inetOrgPerson", "posixAccount"],
        UID=["ada", "second"],
        uidNumber=["1001"],
        mail=["a@e"],
        jpegPhoto=[{"base64": "/9j/"}],
        userCertificate__binary=[{"base64": "MII="}],
        userPassword=["{SSHA}x"],
        sambaNTPassword=["A1"],
        krb5Key=[{"base64": "AA=="}],
        createTimestamp=["20260131120000Z"],
        modifiersName=["cn=admin"],
    ) == {
        "uid": "ada",
        "uidNumber": 1001,
        "mail": ["a@e"],
        "jpegPhoto": "/9j/",
        "userCertificate": ["MII="],
        "createTimestamp": "2026-01-31T12:00:00+00:00",
    }


RULES = """
realm = "shop"
secrets = ["pin"]
unmatched = "ignore"

[unmatched_classes]
Strict = "dead-letter"
Loose = "ignore"

[[rule]]
all = ["person", "vip"]
realm = "gold"
topic = "people/vip"
others = "keep"
secrets = "keep"

[[rule]]
any = ["person"]
all = ["adult"]
topic = "people/adult"
others = "keep"
[rule.properties]
cn = { name = "fullName" }
"cn;lang-de" = { name = "fullNameGerman", multi = true }
age = "int"
active = { type = "bool" }
born = { type = "time", multi = true }
pin = "string"
blob = "binary"
"""


def test_the_first_rule_that_matches_wins() -> None:
    mapping = parse_mapping(RULES)
    assert mapped(mapping, objectClass=["person", "adult", "vip"]).topic == "people/vip"
    assert mapped(mapping, objectClass=["person", "adult"]).realm == "shop"
    assert mapping.map(entry(objectClass=["person"])) is Unmatched.IGNORE


def test_properties_are_renamed_typed_and_chosen_by_option() -> None:
    assert seen(
        parse_mapping(RULES),
        objectClass=["person", "adult"],
        CN=["Ada", "Augusta"],
        cn__lang__x=["never mind"],
        cn__LANG_DE=["x"],
        age=["36"],
        active=["TRUE"],
        born=["18151210000000Z", "181512100130+0130", "18151210000000.5Z"],
        pin=["1234"],
        blob=["text"],
        Hat=["top", {"base64": "/w=="}],
    ) == {
        "fullName": "Ada",
        "age": 36,
        "active": True,
        "born": ["1815-12-10T00:00:00+00:00", "1815-12-10T00:00:00+00:00", "1815-12-10T00:00:00.500000+00:00"],
        "blob": "dGV4dA==",
        "hat": ["top", {"base64": "/w=="}],
        "objectclass": ["person", "adult"],
        "cn;lang;x": ["never mind"],
        "cn;lang_de": ["x"],
    }
    german = {"objectClass": ["person", "adult"], "cn;lang-DE": ["Ada", "Auguste"]}
    record = parse_record(body("cn=x", "content", attributes=german))
    found = parse_mapping(RULES).map(Entry("cn=x", "id", record.attributes))
    assert isinstance(found, MappedObject)
    assert found.object["fullNameGerman"] == ["Ada", "Auguste"]


def test_a_property_can_come_from_several_attributes_and_an_attribute_give_several_properties() -> None:
    mapping = parse_mapping("""
    [[rule]]
    any = ["group"]
    topic = "groups/group"
    [rule.properties]
    c = { name = "country", also = ["st", "l"] }
    sid = { name = "number", type = "rid" }
    uniqueMember = [
      { name = "people", also = ["member"], multi = true, members = "users" },
      { name = "groups", also = ["member"], multi = true, members = "groups" },
      { name = "all", also = ["member"], multi = true },
    ]
    """)
    ada, admins = "uid=ada,dc=e", "cn=admins,cn=groups,dc=e"
    found = seen(mapping, objectClass=["group"], l=["Bonn"], st=["NRW"], uniqueMember=[ada, admins], member=[ada])
    assert found == {"country": "NRW", "people": [ada], "groups": [admins], "all": [ada, admins]}
    assert seen(mapping, objectClass=["group"], sid=["S-1-5-21-7-512"]) == {"number": 512}


def test_a_mapping_can_have_the_shape_of_udm() -> None:
    mapping = parse_mapping("""
    realm = "school"
    shape = "udm"
    publisher = "school"
    topic_attribute = "kind"
    ignored = ["objectClass", "kind"]
    [[rule]]
    any = ["*"]
    topic = "other"
    others = "keep"
    [rule.properties]
    cn = { name = "name" }
    mail = { multi = true }
    age = "int"
    [rule.options]
    adult = "Adult"
    """)
    found = mapping.map(entry(objectClass=["person", "adult"], kind=["people/person"], cn=["x"], Hat=["top"]))
    assert isinstance(found, MappedObject)
    assert (found.realm, found.topic, mapping.publisher) == ("school", "people/person", "school")
    assert found.object == {
        "dn": "cn=x,dc=e",
        "objectType": "people/person",
        "id": "x",
        "uuid": "id-1",
        "position": "dc=e",
        "properties": {"name": "x", "mail": [], "age": None, "hat": ["top"]},
        "options": {"adult": True},
        "policies": {},
    }


def test_secrets_are_hidden_with_any_option_and_by_pattern() -> None:
    text = 'secrets = ["pin", "*key"]\n[[rule]]\nany = ["a"]\ntopic = "t"\nothers = "keep"\nproperties.c.also = ["pin"]'
    found = seen(parse_mapping(text), objectClass=["a"], pin=["1"], pin__x_old=["2"], apiKey=["3"], keys=["4"])
    assert found == {"objectclass": ["a"], "keys": ["4"]}


def test_secrets_are_kept_only_by_a_rule() -> None:
    mapping = parse_mapping(RULES)
    assert seen(mapping, objectClass=["person", "vip"], PIN=["1"])["pin"] == ["1"]
    assert "pin" not in seen(mapping, objectClass=["person", "adult"], PIN=["1"])


def test_a_value_that_does_not_fit_is_left_out_and_reported() -> None:
    values = {"age": ["old"], "active": ["perhaps"], "born": ["20261301000000Z"], "cn": [{"base64": "/w=="}, "Ada"]}
    found = mapped(parse_mapping(RULES), objectClass=["person", "adult"], **values)
    assert set(found.object) == {"dn", "uuid", "objectclass", "fullName"}
    assert found.object["fullName"] == "Ada"
    assert len(found.problems) == 4
    assert "a value of age is no int" in found.problems


def test_what_no_rule_matches_is_decided_by_class_then_globally() -> None:
    mapping = parse_mapping(RULES)
    assert mapping.map(entry(objectClass=["other"])) is Unmatched.IGNORE
    assert mapping.map(entry(objectClass=["STRICT", "loose"])) is Unmatched.DEAD_LETTER
    assert load_mapping("plain").map(entry(objectClass=["sudoRole"])) is Unmatched.DEAD_LETTER


RULE = "[[rule]]\nany = ['a']\ntopic = 'a'"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = [", "not TOML"),
        ("", "rule: there is none (add [[rule]]"),
        ("[[rule]]\ntopic = 'a'", "rule 1: it names no object class"),
        ("[[rule]]\nany = ['a']", "rule 1, topic: it is missing"),
        ("[[rule]]\nany = 'a'\ntopic = 'a'", "rule 1, any: it is no list of strings"),
        ("[[rule]]\nany = ['a']\ntopic = ''", "rule 1, topic: the topic is empty"),
        ("[[rule]]\nany = ['a']\ntopic = 7", "rule 1, topic: 7 is no string"),
        ("[[rule]]\nany = ['a']\ntopik = 'a'", "rule 1: unknown key 'topik' (did you mean 'topic'? known are any, all"),
        ("[[rule]]\nany = ['a']\ntopic = 'a'\nothers = 'x'", "rule 1, others: 'x' (one of keep, drop)"),
        (
            "[[rule]]\nany = ['a']\ntopic = 'a'\nproperties.cn = 'text'",
            "properties.cn.type: 'text' (one of string, int",
        ),
        ("[[rule]]\nany = ['a']\ntopic = 'a'\nproperties.cn = 7", "properties.cn: it is neither a type nor a table"),
        ("[[rule]]\nany = ['a']\ntopic = 'a'\nproperties.cn.multi = 7", "properties.cn.multi: 7 (true or false)"),
        ("[[rule]]\nany = ['a']\ntopic = 'a'\nproperties.cn.name = 'dn'", "'dn' is taken"),
        ("[[rule]]\nany = ['a']\ntopic = 'a'\n[rule.properties]\ncn = 'string'\nCN = 'int'", "there twice"),
        ("[[rule]]\nany = ['a']\ntopic = 'a'\n[rule.properties]\na.name = 'x'\nb.name = 'x'", "x is there twice"),
        ("unmatched = 'drop'\n[[rule]]\nany = ['a']\ntopic = 'a'", "unmatched: 'drop' (one of dead-letter, ignore)"),
        (
            "[[rule]]\nany = ['a']\ntopic = 'a'\n[[rule]]\nany = ['b']\ntopic = 'a'\nproperties.x = 'text'",
            "line 7: rule 2",
        ),
        ("[[rule]]\nany = ['a']\ntopic = 'a'\n[rule.properties.cn]\nmulti = true\ntype = 'text'", "line 6: rule 1"),
        ("realm = 'a'\npublisher = 7\n[[rule]]\nany = ['a']\ntopic = 'a'", "line 2: publisher: 7 is no string"),
        ("shape = 'x'\n[[rule]]\nany = ['a']\ntopic = 'a'", "line 1: shape: 'x' (one of flat, udm"),
        ("publisher = ''\n[[rule]]\nany = ['a']\ntopic = 'a'", "line 1: publisher: publisher is empty"),
        (
            "[[rule]]\nany = ['a']\ntopic = 'a'\nproperties.cn.also = 'sn'",
            "line 4: rule 1, properties.cn.also: it is no",
        ),
        ("[[rule]]\nany = ['a']\ntopic = 'a'\nproperties.cn.members = 'x'", "'x' (one of users, groups, hosts"),
        (
            "[[rule]]\nany = ['a']\ntopic = 'a'\noptions.a = 'b'",
            "line 4: rule 1, options: flat objects have no options",
        ),
        (
            "shape = 'udm'\n[[rule]]\nany = ['a']\ntopic = 'a'\noptions.a = 7",
            "line 5: rule 1, options.a: 7 is no object class",
        ),
        ("unmatched_classes = 1\n[[rule]]\nany = ['a']\ntopic = 'a'", "unmatched_classes: it is no table"),
    ],
)
def test_a_wrong_mapping_names_the_file_the_key_and_the_fix(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "my.toml"
    path.write_text(text)
    with pytest.raises(InvalidConfig) as caught:
        load_mapping(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert caught.value.fix


def test_an_unreadable_mapping_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="No such file"):
        load_mapping(tmp_path / "none.toml")
    with pytest.raises(InvalidConfig, match="did you mean plain"):
        load_mapping("plane")
    (tmp_path / "binary.toml").write_bytes(b"\xff")
    with pytest.raises(InvalidConfig, match="not UTF-8"):
        load_mapping(tmp_path / "binary.toml")

"""The mapping `udm` gives the objects that consumers of the older system know."""

import base64
import json
from typing import Any

import pytest

from purveyor.pipeline.transform import load_mapping
from purveyor.pipeline.transform.directory_records import parse_record
from purveyor.pipeline.transform.directory_rules import Entry
from purveyor.pipeline.transform.mapping import MappedObject
from tests.pipeline.transform.memory import body

UDM = load_mapping()
PHOTO = base64.b64encode(b"\xff\xd8\xff\xe0photo").decode()
NO_TEXT = {"base64": base64.b64encode(b"M\xfcller").decode()}
USER_PROPERTIES: dict[str, Any] = {
    "username": None,
    "firstname": None,
    "lastname": None,
    "displayName": None,
    "title": None,
    "initials": None,
    "description": None,
    "e-mail": [],
    "mailPrimaryAddress": None,
    "mailAlternativeAddress": [],
    "phone": [],
    "mobileTelephoneNumber": [],
    "homeTelephoneNumber": [],
    "street": None,
    "postcode": None,
    "city": None,
    "country": None,
    "organisation": None,
    "departmentNumber": [],
    "employeeNumber": None,
    "employeeType": None,
    "roomNumber": [],
    "birthday": None,
    "uidNumber": None,
    "gidNumber": None,
    "unixhome": None,
    "shell": None,
    "gecos": None,
    "jpegPhoto": None,
    "univentionObjectIdentifier": None,
    "groups": [],
}


def view(dn: str, **attributes: Any) -> MappedObject:
    record = parse_record(body(dn, "content", attributes=attributes))
    found = UDM.map(Entry(dn, "5a1f7f4e", record.attributes))
    assert isinstance(found, MappedObject)
    assert found.object["objectType"] == found.topic
    return found


def test_a_user() -> None:
    found = view(
        "uid=ada,cn=users,dc=example,dc=com",
        objectClass=["top", "inetOrgPerson", "posixAccount", "univentionMail", "pkiUser"],
        univentionObjectType=["users/user"],
        univentionObjectIdentifier=["0b2c"],
        entryUUID=["5a1f7f4e"],
        uid=["ada"],
        givenName=["Ada"],
        sn=["Lovelace"],
        displayName=["Ada Lovelace"],
        title=["Countess"],
        initials=["AL"],
        description=["Writes programs"],
        mail=["ada@example.com", "countess@example.com"],
        mailPrimaryAddress=["ada@mail.example.com"],
        mailAlternativeAddress=["al@mail.example.com"],
        telephoneNumber=["1"],
        mobile=["2"],
        homePhone=["3"],
        street=["St James's Square"],
        postalCode=["SW1Y"],
        l=["London"],
        c=["GB"],
        st=["England"],
        o=["Analytical"],
        departmentNumber=["7"],
        employeeNumber=["1815"],
        employeeType=["author"],
        roomNumber=["12"],
        univentionBirthday=["1815-12-10"],
        uidNumber=["2005"],
        gidNumber=["5001"],
        homeDirectory=["/home/ada"],
        loginShell=["/bin/bash"],
        gecos=["Ada Lovelace"],
        jpegPhoto=[{"base64": PHOTO}],
        memberOf=["cn=authors,cn=groups,dc=example,dc=com"],
        univentionPolicyReference=["cn=default,cn=pwhistory,cn=users,cn=policies,dc=example,dc=com"],
        userPassword=["{SSHA}x"],
        sambaNTPassword=["A1"],
        krb5Key=[{"base64": "AA=="}],
        pwhistory=["$6$x"],
        shadowLastChange=["20000"],
    )
    assert (found.realm, found.topic, found.problems) == ("udm", "users/user", ())
    assert found.object == {
        "dn": "uid=ada,cn=users,dc=example,dc=com",
        "objectType": "users/user",
        "id": "0b2c",
        "uuid": "5a1f7f4e",
        "position": "cn=users,dc=example,dc=com",
        "properties": {
            "username": "ada",
            "firstname": "Ada",
            "lastname": "Lovelace",
            "displayName": "Ada Lovelace",
            "title": "Countess",
            "initials": "AL",
            "description": "Writes programs",
            "e-mail": ["ada@example.com", "countess@example.com"],
            "mailPrimaryAddress": "ada@mail.example.com",
            "mailAlternativeAddress": ["al@mail.example.com"],
            "phone": ["1"],
            "mobileTelephoneNumber": ["2"],
            "homeTelephoneNumber": ["3"],
            "street": "St James's Square",
            "postcode": "SW1Y",
            "city": "London",
            "country": "GB",
            "organisation": "Analytical",
            "departmentNumber": ["7"],
            "employeeNumber": "1815",
            "employeeType": "author",
            "roomNumber": ["12"],
            "birthday": "1815-12-10",
            "uidNumber": 2005,
            "gidNumber": 5001,
            "unixhome": "/home/ada",
            "shell": "/bin/bash",
            "gecos": "Ada Lovelace",
            "jpegPhoto": PHOTO,
            "univentionObjectIdentifier": "0b2c",
            "groups": ["cn=authors,cn=groups,dc=example,dc=com"],
        },
        "options": {"pki": True},
        "policies": {"policies/policy": ["cn=default,cn=pwhistory,cn=users,cn=policies,dc=example,dc=com"]},
    }


def test_a_property_without_a_value_is_null_or_an_empty_list() -> None:
    found = view("uid=ada,dc=e", objectClass=["person"], st=["England"])
    assert found.object == {
        "dn": "uid=ada,dc=e",
        "objectType": "users/user",
        "id": "ada",
        "uuid": "5a1f7f4e",
        "position": "dc=e",
        "properties": {**USER_PROPERTIES, "country": "England"},
        "options": {"pki": False},
        "policies": {},
    }


def test_a_group() -> None:
    found = view(
        "cn=staff,cn=groups,dc=e",
        objectClass=["posixGroup", "univentionGroup", "sambaGroupMapping"],
        cn=["staff"],
        description=["All of us"],
        gidNumber=["5001"],
        uniqueMember=["uid=ada,cn=users,dc=e", "cn=admins,cn=groups,dc=e", "cn=pc1,cn=memberserver,cn=computers,dc=e"],
        memberUid=["ada", "pc1$"],
        mailPrimaryAddress=["staff@e"],
        sambaSID=["S-1-5-21-1-2-3-11001"],
        sambaGroupType=["2"],
        memberOf=["cn=all,cn=groups,dc=e"],
    )
    assert found.object["properties"] == {
        "name": "staff",
        "description": "All of us",
        "gidNumber": 5001,
        "users": ["uid=ada,cn=users,dc=e"],
        "nestedGroup": ["cn=admins,cn=groups,dc=e"],
        "hosts": ["cn=pc1,cn=memberserver,cn=computers,dc=e"],
        "mailAddress": "staff@e",
        "sambaRID": 11001,
        "sambaGroupType": "2",
        "univentionObjectIdentifier": None,
        "memberOf": ["cn=all,cn=groups,dc=e"],
    }
    assert found.topic == "groups/group"
    assert found.object["options"] == {"posix": True, "samba": True}


@pytest.mark.parametrize(
    ("member", "place"),
    [
        ("uid=ada,cn=groups,dc=e", "users"),
        ("UID=ada,dc=e", "users"),
        ("cn=Ada+uid=ada,cn=groups,dc=e", "users"),
        ("cn=Ada,ou=people,dc=e", "users"),
        ("mail=ada@e,dc=e", "users"),
        ("no name", "users"),
        ("cn=admins,CN=Groups,dc=e", "nestedGroup"),
        ("cn=7a,cn=klassen,cn=groups,ou=school,dc=e", "nestedGroup"),
        ("cn=Administrators,cn=Builtin,dc=e", "nestedGroup"),
        ("cn=beside,ou=roles,dc=e", "nestedGroup"),
        ("cn=pc1,dc=e", "hosts"),
    ],
)
def test_a_member_is_in_exactly_one_list(member: str, place: str) -> None:
    found = view("cn=g,ou=roles,dc=e", objectClass=["groupOfNames"], member=[member], memberUid=["pc1$"])
    lists = {name: found.object["properties"][name] for name in ("users", "nestedGroup", "hosts")}
    assert lists == {"users": [], "nestedGroup": [], "hosts": [], place: [member]}


def test_a_member_named_by_both_attributes_is_there_once() -> None:
    found = view("cn=g,dc=e", objectClass=["groupOfNames"], member=["uid=a,dc=e"], uniqueMember=["uid=a,dc=e"])
    assert found.object["properties"]["users"] == ["uid=a,dc=e"]


def test_an_ou_and_a_container() -> None:
    found = view("ou=people,dc=e", objectClass=["organizationalUnit"], ou=["people"], description=["Us"])
    assert found.topic == "container/ou"
    assert found.object["properties"] == {"name": "people", "description": "Us", "univentionObjectIdentifier": None}
    found = view("cn=users,dc=e", objectClass=["organizationalRole"], cn=["users"])
    assert (found.topic, found.object["id"]) == ("container/cn", "users")
    found = view("dc=e", objectClass=["organization", "dcObject"], o=["Example"], dc=["e"])
    assert (found.topic, found.object["properties"]["name"], found.object["position"]) == ("container/dc", "e", "")


def test_the_type_that_an_entry_names_is_the_topic_also_without_a_rule() -> None:
    found = view("cn=x,dc=e", objectClass=["top"], univentionObjectType=["users/user"], uid=["x"])
    assert (found.topic, found.object["properties"]["username"]) == ("users/user", "x")
    found = view(
        "cn=pc1,dc=e", objectClass=["univentionWindows", "posixAccount"], univentionObjectType=["computers/windows"]
    )
    assert found.topic == "computers/windows"
    assert found.object["properties"]["mac"] == []
    found = view(
        "cn=x,dc=e", objectClass=["univentionX"], univentionObjectType=["settings/x"], cn=["x"], xColour=["red"]
    )
    assert found.topic == "settings/x"
    assert found.object["properties"] == {
        "name": "x",
        "description": None,
        "univentionObjectIdentifier": None,
        "xcolour": ["red"],
    }


def test_an_entry_that_no_other_rule_knows_keeps_its_attributes_without_its_secrets() -> None:
    found = view(
        "cn=vault,dc=e",
        objectClass=["vault"],
        cn=["vault"],
        door=["steel", {"base64": "/w=="}],
        userPassword=["x"],
        vaultPasswordOld=["y"],
        sharedSecret=["z"],
        **{"userPassword;x-old": ["w"]},
        entryCSN=["20260101000000.000000Z#000000#000#000000"],
        modifyTimestamp=["20260101000000Z"],
    )
    assert (found.realm, found.topic) == ("udm", "directory/entry")
    assert found.object["properties"] == {
        "name": "vault",
        "description": None,
        "univentionObjectIdentifier": None,
        "door": ["steel", {"base64": "/w=="}],
    }


def test_no_secret_is_in_any_object() -> None:
    secrets = {
        name: ["s3cret"]
        for name in (
            "userPassword",
            "authPassword",
            "sambaNTPassword",
            "sambaLMPassword",
            "sambaPasswordHistory",
            "pwhistory",
            "pwdHistory",
            "krb5Key",
            "krbPrincipalKey",
            "unicodePwd",
            "userPKCS12",
            "univentionRadiusPassword",
            "nisSecretKey",
        )
    }
    for rule in UDM.rules:
        found = view("cn=x,dc=e", objectClass=["x"], univentionObjectType=[rule.topic], cn=["x"], **secrets)
        assert found.topic == rule.topic
        assert "s3cret" not in json.dumps(found.object), rule.topic


def test_attributes_with_an_option_are_not_the_property() -> None:
    languages = {"description;lang-de": ["Mathematikerin"], "description;lang-fr": ["Mathématicienne"]}
    found = view("uid=ada,dc=e", objectClass=["person"], description=["Mathematician"], **languages)
    assert found.object["properties"] == {**USER_PROPERTIES, "description": "Mathematician"}


def test_a_value_that_is_no_text_is_left_out_and_reported() -> None:
    found = view("uid=ada,dc=e", objectClass=["person"], sn=[NO_TEXT], mail=["ada@e", NO_TEXT], uidNumber=["many"])
    assert found.object["properties"] == {**USER_PROPERTIES, "e-mail": ["ada@e"]}
    assert found.problems == (
        "a value of lastname is no string",
        "a value of e-mail is no string",
        "a value of uidNumber is no int",
    )
    found = view("cn=g,dc=e", objectClass=["groupOfNames"], member=[NO_TEXT])
    assert found.problems == ("a value of users is no string",)


def test_a_name_that_is_no_text_is_still_an_id() -> None:
    assert view("cn=M\\fcller,dc=e", objectClass=["person"]).object["id"] == "M\ufffdller"
    assert view("cn=Ada\\2c L.+uid=ada,dc=e", objectClass=["person"]).object["id"] == "Ada, L.+ada"

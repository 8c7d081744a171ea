"""Names that mean the same entry are the same."""

import pytest

from purveyor.pipeline.transform.directory_records import InvalidRecord, attribute_key, parse_dn, rdn_values, renamed_dn


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("uid=ada,dc=example", "UID=Ada,DC=EXAMPLE"),
        ("uid=ada,dc=example", " uid = ada , dc=example "),
        ("cn=Ada  King,dc=e", "cn=ada king,dc=e"),
        ("cn=a\\,b,dc=e", "cn=a\\2Cb,dc=e"),
        ("cn=L\\C3\\B6we,dc=e", "cn=löwe,dc=e"),
        ("cn=a+uid=b,dc=e", "uid=B+cn=A,dc=e"),
        ("cn=\\ a,dc=e", "cn=a,dc=e"),
    ],
)
def test_case_space_and_escapes_do_not_count(one: str, other: str) -> None:
    assert parse_dn(one).key == parse_dn(other).key


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("cn=a\\,dc=e", "cn=a,dc=e"),
        ("cn=a\\+b=c", "cn=a+b=c"),
        ("cn=a b", "cn=ab"),
        ("cn=a\\5c2b", "cn=a\\2b"),
        ("cn=#0402,dc=e", "cn=#0403,dc=e"),
    ],
)
def test_different_names_differ(one: str, other: str) -> None:
    assert parse_dn(one).key != parse_dn(other).key


@pytest.mark.parametrize("text", ["", "  ", "ada", "uid=ada,,dc=e", "=a", "1x=a", "uid=ada,dc"])
def test_what_is_no_name_is_unfit(text: str) -> None:
    with pytest.raises(InvalidRecord):
        parse_dn(text)


def test_an_entry_is_followed_by_its_descendants_in_sorted_order() -> None:
    texts = ["dc=e", "ou=a,dc=e", "uid=x,ou=a,dc=e", "ou=a b,dc=e", "ou=a-b,dc=e", "dc=e2", "ou=A!,dc=e"]
    keys = sorted(parse_dn(text).key for text in texts)
    below = [key for key in keys if key.startswith(parse_dn("ou=a,dc=e").key + "\0")]
    assert below == [parse_dn("uid=x,ou=a,dc=e").key]
    at = keys.index(parse_dn("ou=a,dc=e").key)
    assert keys[at + 1] == below[0]
    assert parse_dn("uid=x,ou=a,dc=e").below(parse_dn("OU=A,dc=e"))
    assert not parse_dn("ou=a b,dc=e").below(parse_dn("ou=a,dc=e"))


def test_a_rename_keeps_the_spelling_of_what_stays() -> None:
    assert renamed_dn(parse_dn("uid=ada,OU=People,dc=e"), "uid=Countess", None).text == "uid=Countess,OU=People,dc=e"
    assert renamed_dn(parse_dn("uid=ada,ou=a,dc=e"), "uid=ada", parse_dn("ou=B,dc=e")).text == "uid=ada,ou=B,dc=e"
    with pytest.raises(InvalidRecord, match="not one rdn"):
        renamed_dn(parse_dn("uid=ada,dc=e"), "uid=a,ou=b", None)


def test_the_values_of_an_rdn_are_unescaped() -> None:
    assert rdn_values(parse_dn("cn=a\\,b\\20+UID=x,dc=e")) == (("cn", "a,b "), ("uid", "x"))


def test_binary_is_a_way_of_transfer_and_other_options_are_not() -> None:
    assert attribute_key("userCertificate;BINARY") == attribute_key("usercertificate")
    assert attribute_key("cn;x-b;lang-de") == attribute_key("CN;lang-DE;x-b") != attribute_key("cn")

"""Search filters: the examples of RFC 4515, and mistakes that are reported with their place."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purveyor.sources.ldap.ber import BerReader
from purveyor.sources.ldap.search_filter import FilterError, encode_filter, escape_filter_value


def show(reader: BerReader) -> str:
    """Print an encoded filter in a form of its own."""
    tag = reader.next_tag()
    assert tag is not None
    if tag in {0xA0, 0xA1, 0xA2}:
        inner, parts = reader.enter(tag), []
        while not inner.at_end:
            parts.append(show(inner))
        return f"{'&|!'[tag - 0xA0]}[{','.join(parts)}]"
    if tag == 0x87:
        return f"{reader.read_text(tag)} present"
    inner = reader.enter(tag)
    if tag == 0xA4:
        name, pieces = inner.read_text(), inner.enter()
        found = []
        while not pieces.at_end:
            kind, value = pieces.read_element()
            found.append(f"{('initial', 'any', 'final')[kind - 0x80]}:{value!r}")
        return f"{name} {' '.join(found)}"
    if tag == 0xA9:
        found = []
        while not inner.at_end:
            kind, value = inner.read_element()
            found.append(f"{ {0x81: 'rule', 0x82: 'type', 0x83: 'value', 0x84: 'dn'}[kind] }:{value!r}")
        return " ".join(found)
    return f"{inner.read_text()}{ {0xA3: '=', 0xA5: '>=', 0xA6: '<=', 0xA8: '~='}[tag] }{inner.read_octets()!r}"


def read(text: str) -> str:
    reader = BerReader(encode_filter(text))
    shown = show(reader)
    reader.expect_end()
    return shown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(cn=Babs Jensen)", "cn=b'Babs Jensen'"),
        ("(!(cn=Tim Howes))", "![cn=b'Tim Howes']"),
        (
            "(&(objectClass=Person)(|(sn=Jensen)(cn=Babs J*)))",
            "&[objectClass=b'Person',|[sn=b'Jensen',cn initial:b'Babs J']]",
        ),
        ("(o=univ*of*mich*)", "o initial:b'univ' any:b'of' any:b'mich'"),
        ("(seeAlso=)", "seeAlso=b''"),
        ("(cn:caseExactMatch:=Fred)", "rule:b'caseExactMatch' type:b'cn' value:b'Fred'"),
        ("(cn:=Betty)", "type:b'cn' value:b'Betty'"),
        ("(sn:dn:2.4.6.8.10:=Barney)", "rule:b'2.4.6.8.10' type:b'sn' value:b'Barney' dn:b'\\xff'"),
        ("(o:dn:=Ace)", "type:b'o' value:b'Ace' dn:b'\\xff'"),
        ("(:1.2.3:=Wilma)", "rule:b'1.2.3' value:b'Wilma'"),
        ("(:DN:2.4.6:=Dino)", "rule:b'2.4.6' value:b'Dino' dn:b'\\xff'"),
        (r"(o=Parens R Us \28for all\29)", "o=b'Parens R Us (for all)'"),
        (r"(cn=*\2A*)", "cn any:b'*'"),
        (r"(bin=\00\00\04)", "bin=b'\\x00\\x00\\x04'"),
        (r"(sn=Lu\c4\8di\c4\87)", "sn=b'Lu\\xc4\\x8di\\xc4\\x87'"),
        ("(cn=ä)", "cn=b'\\xc3\\xa4'"),
        ("(1.3.6.1=x)", "1.3.6.1=b'x'"),
        ("(cn;lang-de=x)", "cn;lang-de=b'x'"),
        ("(objectClass=*)", "objectClass present"),
        ("(a>=1)", "a>=b'1'"),
        ("(a<=1)", "a<=b'1'"),
        ("(a~=1)", "a~=b'1'"),
        ("(&)", "&[]"),
        ("(|)", "|[]"),
        (" ( & (a=1) (b=*x) ) ", "&[a=b'1',b final:b'x']"),
    ],
)
def test_filters_of_rfc_4515(text: str, expected: str) -> None:
    assert read(text) == expected


@pytest.mark.parametrize(
    ("text", "position", "reason"),
    [
        ("", 0, r"'\(' is expected"),
        ("cn=a", 0, r"'\(' is expected"),
        ("(cn=a", 5, r"'\)' is expected"),
        ("(cn=a)x", 6, "ends before"),
        ("(=a)", 1, "name of an attribute"),
        ("(cn a)", 4, "is expected after 'cn'"),
        (r"(cn=\zz)", 4, "two hexadecimal digits"),
        (r"(cn=a\4)", 5, "two hexadecimal digits"),
        ("(cn=**)", 4, "substring is expected"),
        ("(cn>=a*b)", 6, "allowed after = only"),
        ("(!(a=1)(b=2))", 7, r"'\)' is expected"),
        ("(:=x)", 2, "matching rule"),
        ("(&(a=1)b)", 7, r"'\)' is expected"),
        ("(cn=a(b)", 5, r"'\)' is expected"),
    ],
)
def test_a_mistake_is_reported_with_its_place(text: str, position: int, reason: str) -> None:
    with pytest.raises(FilterError, match=reason) as caught:
        encode_filter(text)
    assert caught.value.position == position


def test_nesting_and_length_have_limits() -> None:
    with pytest.raises(FilterError, match="nested"):
        encode_filter("(!" * 1000 + "(a=1)" + ")" * 1000)
    with pytest.raises(FilterError, match="characters"):
        encode_filter(f"(cn={'a' * 200_000})")


@given(st.text("()&|!=*\\ab:;~<> 0é", max_size=60))
def test_any_text_is_a_filter_or_a_filter_error(text: str) -> None:
    with contextlib.suppress(FilterError):
        read(text)


@given(st.text(max_size=60))
def test_an_escaped_value_is_taken_literally(value: str) -> None:
    value = value.encode(errors="replace").decode()
    assert read(f"(cn={escape_filter_value(value)})") == f"cn={value.encode()!r}"

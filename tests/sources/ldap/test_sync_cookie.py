"""Cookies of OpenLDAP: parsed, merged by server, and stored without what would make slapd keep changes back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purveyor.sources.ldap.sync_cookie import CookieError, SyncCookie, merge_cookie, replace_cookie
from tests.support.sync_messages import make_csn

A1, A2, B1, B2 = make_csn(1, 1), make_csn(2, 1), make_csn(1, 2), make_csn(2, 2)


def test_all_parts_are_read_and_written() -> None:
    text = f"rid=007,sid=00b,csn={A1};{B2},delcsn={A2}"
    cookie = SyncCookie.parse(text)
    assert cookie == SyncCookie((A1, B2), 7, 11, A2)
    assert str(cookie) == text
    assert SyncCookie.parse("rid=000") == SyncCookie((), 0)
    assert SyncCookie.parse(f"rid=000,csn={A1},new=thing").csns == (A1,)


@pytest.mark.parametrize(
    "text", ["", "csn", "csn=x", "rid=x,csn=", "host:389#dc=x#12", f"csn={A1},csn={A1}", f"csn={A1} "]
)
def test_what_is_no_cookie_of_openldap_is_refused(text: str) -> None:
    with pytest.raises(CookieError):
        SyncCookie.parse(text)


def test_a_persist_cookie_with_one_csn_keeps_those_of_other_servers() -> None:
    """Otherwise the next refresh would begin before all changes of the other servers."""
    assert merge_cookie(f"rid=000,csn={A1};{B1}", f"rid=000,sid=001,csn={A2}".encode()) == f"rid=000,csn={A2};{B1}"
    assert merge_cookie(f"rid=000,csn={A2};{B1}", f"rid=000,csn={A1}".encode()) == f"rid=000,csn={A2};{B1}"
    assert merge_cookie(None, f"csn={B1}".encode()) == f"rid=000,csn={B1}"


def test_a_refresh_cookie_replaces_the_csns_of_servers_that_are_gone() -> None:
    """A present phase has removed what the unknown CSN covers; a cookie with it would claim the opposite."""
    assert replace_cookie(f"rid=000,csn={A1};{B1}", f"rid=000,csn={A2}".encode()) == f"rid=000,csn={A2}"
    assert replace_cookie("known", None) == "known"
    assert replace_cookie("known", b"rid=000") == "known"
    assert replace_cookie(None, None) is None


def test_the_id_of_the_server_is_never_sent_back() -> None:
    """slapd keeps changes back from a client that says the server's own id."""
    assert replace_cookie(None, f"rid=000,sid=001,csn={A1},delcsn={B1}".encode()) == f"rid=000,csn={A1}"


def test_cookies_of_other_servers_are_kept_as_they_are() -> None:
    assert replace_cookie("old", b"host#dc=x#12") == "host#dc=x#12"
    assert merge_cookie("old", b"host#dc=x#13") == "host#dc=x#13"
    with pytest.raises(CookieError, match="not UTF-8"):
        merge_cookie(None, b"\xff")


csns = st.lists(st.builds(make_csn, st.integers(0, 999_999), st.integers(0, 4)), max_size=6)


@given(csns, csns)
def test_a_merge_has_the_newest_csn_of_each_server(left: list[str], right: list[str]) -> None:
    def newest(found: list[str]) -> set[str]:
        return {max(csn for csn in found if csn[-10:] == server) for server in {csn[-10:] for csn in found}}

    first, second = (SyncCookie.parse(f"rid=000,csn={';'.join(each)}") for each in (left, right))
    merged = first.merge(second)
    assert set(merged.csns) == newest(left + right)
    assert second.merge(first) == merged
    assert merged.merge(first) == merged
    assert SyncCookie.parse(str(merged)) == merged

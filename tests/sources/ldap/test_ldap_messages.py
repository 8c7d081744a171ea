"""LDAP messages: bytes that slapd sent, requests as the RFC prints them, and input that is no message."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purveyor.sources.ldap.ber import BerError, encode_element, encode_integer, encode_octets, encode_sequence
from purveyor.sources.ldap.ldap_errors import ResultCode, explain_result, name_result
from purveyor.sources.ldap.ldap_messages import (
    NOTICE_OF_DISCONNECTION,
    START_TLS,
    BindResponse,
    Control,
    ExtendedResponse,
    IntermediateResponse,
    LdapMessage,
    LdapResult,
    OtherResponse,
    Scope,
    SearchRequest,
    SearchResultDone,
    SearchResultEntry,
    SearchResultReference,
    decode_message,
    encode_abandon,
    encode_bind,
    encode_request,
    encode_search,
    encode_start_tls,
    encode_unbind,
)
from purveyor.sources.ldap.search_filter import encode_filter
from purveyor.sources.ldap.sync_controls import (
    SYNC_DONE,
    SYNC_INFO,
    SYNC_STATE,
    EntryState,
    NewCookie,
    RefreshPhaseEnded,
    SyncDone,
    SyncIdSet,
    SyncMode,
    SyncState,
    decode_sync_done,
    decode_sync_info,
    decode_sync_state,
    encode_sync_request,
)

READER = "cn=reader,dc=example,dc=org"
UUID = "7a11833c-781e-1041-9eff-7942b15c1d4a"
RAW_UUID = bytes.fromhex(UUID.replace("-", ""))


def envelope(tag: int, *parts: bytes, controls: bytes = b"") -> bytes:
    return encode_sequence(encode_integer(2), encode_sequence(*parts, tag=tag), controls)


def result(tag: int, code: int = 0, *more: bytes) -> bytes:
    return envelope(tag, b"\x0a\x01" + bytes([code]), encode_octets("dc=x"), encode_octets("text"), *more)


names = st.text("abcdefgh;-", min_size=1, max_size=12)
contents = st.dictionaries(names, st.lists(st.binary(max_size=300), max_size=4), max_size=5)


def encode_entry(dn: str, attributes: dict[str, list[bytes]]) -> bytes:
    encoded = [
        encode_sequence(encode_octets(name), encode_sequence(*map(encode_octets, values), tag=0x31))
        for name, values in attributes.items()
    ]
    state = encode_sequence(b"\x0a\x01\x01", encode_octets(RAW_UUID))
    control = encode_sequence(encode_sequence(encode_octets(SYNC_STATE), encode_octets(state)), tag=0xA0)
    return envelope(0x64, encode_octets(dn), encode_sequence(*encoded), controls=control)


@given(st.text(max_size=40), contents)
def test_an_entry_arrives_with_all_names_options_and_values(dn: str, attributes: dict[str, list[bytes]]) -> None:
    dn = dn.encode(errors="replace").decode()
    message = decode_message(encode_entry(dn, attributes))
    assert message.response == SearchResultEntry(dn, attributes)
    control = message.control(SYNC_STATE)
    assert control is not None
    assert control.value is not None
    assert decode_sync_state(control.value) == SyncState(EntryState.ADD, UUID)
    assert message.control("1.2.3") is None


def test_an_attribute_that_comes_twice_keeps_all_its_values() -> None:
    part = encode_sequence(encode_octets("cn"), encode_sequence(encode_octets("a"), tag=0x31))
    message = decode_message(envelope(0x64, encode_octets("cn=a"), encode_sequence(part, part)))
    assert message.response == SearchResultEntry("cn=a", {"cn": [b"a", b"a"]})


def test_lengths_of_several_bytes_are_accepted_everywhere() -> None:
    """Other servers write short lengths with four bytes."""

    def long(tag: int, content: bytes) -> bytes:
        return bytes((tag, 0x84)) + len(content).to_bytes(4, "big") + content

    for outer, inner in ((long, encode_element), (encode_element, long), (long, long)):
        values = inner(0x31, inner(0x04, b"a") + inner(0x04, b""))
        attributes = outer(0x30, outer(0x30, inner(0x04, b"cn") + values))
        message = decode_message(outer(0x30, inner(0x02, b"\x02") + outer(0x64, inner(0x04, b"cn=a") + attributes)))
        assert message.response == SearchResultEntry("cn=a", {"cn": [b"a", b""]})


def test_a_value_of_many_megabytes_is_one_value() -> None:
    large = bytes(range(256)) * (5 << 12)
    message = decode_message(encode_entry("cn=a", {"photo": [large]}))
    assert message.response == SearchResultEntry("cn=a", {"photo": [large]})


@given(contents, st.data())
def test_a_damaged_entry_gives_a_message_or_a_ber_error(
    attributes: dict[str, list[bytes]], data: st.DataObject
) -> None:
    whole = bytearray(encode_entry("cn=a", attributes))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(whole)))
    for damaged in (bytes(whole), bytes(whole[:cut])):
        with contextlib.suppress(BerError):
            assert isinstance(decode_message(damaged), LdapMessage)


@given(st.binary(max_size=300))
def test_rubbish_is_no_message(data: bytes) -> None:
    for decode in (decode_message, decode_sync_state, decode_sync_done, decode_sync_info):
        with contextlib.suppress(BerError):
            decode(data)


def test_the_other_responses() -> None:
    plain = LdapResult(0, "dc=x", "text")
    assert decode_message(result(0x65)) == LdapMessage(2, SearchResultDone(plain))
    assert decode_message(result(0x61, 49)).response == BindResponse(LdapResult(49, "dc=x", "text"))
    assert decode_message(result(0x6B)).response == OtherResponse(0x6B)
    referral = encode_sequence(encode_octets("ldap://a/"), encode_octets("ldap://b/"), tag=0xA3)
    assert decode_message(result(0x65, 10, referral)).response == SearchResultDone(
        LdapResult(10, "dc=x", "text", ("ldap://a/", "ldap://b/"))
    )
    assert decode_message(envelope(0x73, encode_octets("ldap://a/"))).response == SearchResultReference(("ldap://a/",))
    oid = encode_octets(NOTICE_OF_DISCONNECTION, tag=0x8A)
    assert decode_message(result(0x78, 52, oid)).response == ExtendedResponse(
        LdapResult(52, "dc=x", "text"), NOTICE_OF_DISCONNECTION
    )
    info = envelope(0x79, encode_octets(SYNC_INFO, tag=0x80), encode_octets(b"v", tag=0x81))
    assert decode_message(info).response == IntermediateResponse(SYNC_INFO, b"v")


@pytest.mark.parametrize(
    "data",
    [
        envelope(0x63),  # a request
        envelope(0x65),
        encode_sequence(encode_integer(-1), encode_sequence(tag=0x65)),
        result(0x65) + b"\x00",
        result(0x65, 0, encode_octets("more")),
        envelope(0x64, encode_octets("cn=a")),
        envelope(0x64, encode_octets("cn=a"), encode_sequence(encode_octets("cn"))),
        envelope(0x64, encode_octets(b"\xff"), encode_sequence()),
    ],
)
def test_what_is_no_response_is_refused(data: bytes) -> None:
    with pytest.raises(BerError):
        decode_message(data)


def test_requests_have_the_bytes_that_ldapsearch_sends() -> None:
    """Captured from ldapsearch 2.5.13 with `-s base -z 5 -E '!sync=ro/rid=000' '(cn=*)' cn objectClass`."""
    assert encode_request(1, encode_bind(READER, "reader password")) == (
        b"06\x02\x01\x01`1\x02\x01\x03\x04\x1bcn=reader,dc=example,dc=org\x80\x0freader password"
    )
    search = SearchRequest(
        base=READER,
        filter=encode_filter("(cn=*)"),
        scope=Scope.BASE,
        attributes=("cn", "objectClass"),
        size_limit=5,
    )
    control = encode_sync_request(SyncMode.REFRESH_ONLY, b"rid=000")
    assert encode_request(2, encode_search(search), [control]) == (
        b"0y\x02\x01\x02cC\x04\x1bcn=reader,dc=example,dc=org\n\x01\x00\n\x01\x00\x02\x01\x05\x02\x01\x00\x01\x01\x00"
        b"\x87\x02cn0\x11\x04\x02cn\x04\x0bobjectClass\xa0/0-\x04\x181.3.6.1.4.1.4203.1.9.1.1\x01\x01\xff\x04\x0e0\x0c\n\x01\x01"
        b"\x04\x07rid=000"
    )
    assert encode_request(3, encode_unbind()) == b"0\x05\x02\x01\x03B\x00"
    assert encode_request(4, encode_abandon(2)) == b"0\x06\x02\x01\x04P\x01\x02"
    assert encode_request(5, encode_start_tls()) == b"0\x1d\x02\x01\x05w\x18\x80\x16" + START_TLS.encode()


def test_responses_of_slapd_are_understood() -> None:
    """Captured from slapd 2.5.13: the answers to the bind and the search above."""
    assert decode_message(b"0\x0c\x02\x01\x01a\x07\n\x01\x00\x04\x00\x04\x00") == LdapMessage(
        1, BindResponse(LdapResult(0))
    )
    entry = decode_message(
        b"0\x81\xa6\x02\x01\x02dj\x04\x1bcn=reader,dc=example,dc=org0K09\x04\x0bobjectClass1*\x04\x12organizationalRole"
        b"\x04\x14simpleSecurityObject0\x0e\x04\x02cn1\x08\x04\x06reader\xa0503\x04\x181.3.6.1.4.1.4203.1.9.1.2\x04\x170\x15"
        b"\n\x01\x01\x04\x10\x92\xe3\x07^x\x1f\x10A\x83\x1d\x0f6\x98\x9aK\x18"
    )
    assert entry.response == SearchResultEntry(
        READER, {"objectClass": [b"organizationalRole", b"simpleSecurityObject"], "cn": [b"reader"]}
    )
    state = entry.control(SYNC_STATE)
    assert state is not None
    assert state.value is not None
    assert decode_sync_state(state.value) == SyncState(EntryState.ADD, "92e3075e-781f-1041-831d-0f36989a4b18")
    done = decode_message(
        b"0g\x02\x01\x02e\x07\n\x01\x00\x04\x00\x04\x00\xa0Y0W\x04\x181.3.6.1.4.1.4203.1.9.1.3\x04;09\x044"
        b"rid=000,csn=20261119044356.492829Z#000000#000#000000\x01\x01\xff"
    )
    assert done.response == SearchResultDone(LdapResult(0))
    ended = done.control(SYNC_DONE)
    assert ended is not None
    assert ended.value is not None
    assert decode_sync_done(ended.value) == SyncDone(
        b"rid=000,csn=20261119044356.492829Z#000000#000#000000", refresh_deletes=True
    )


def test_the_control_of_a_synchronisation() -> None:
    control = encode_sync_request(SyncMode.REFRESH_AND_PERSIST, b"rid=000")
    assert control.critical
    assert control.value == bytes.fromhex("300c 0a0103 0407") + b"rid=000"
    assert encode_sync_request(SyncMode.REFRESH_ONLY).value == bytes.fromhex("3003 0a0101")
    sent = encode_request(1, encode_unbind(), [control, Control("1.2")])
    assert sent.endswith(b"\x30\x05\x04\x031.2")
    assert b"\x01\x01\xff" in sent


def test_each_form_of_sync_info() -> None:
    cookie = encode_octets("c")
    ids = encode_sequence(encode_octets(RAW_UUID), tag=0x31)
    false, true = b"\x01\x01\x00", b"\x01\x01\xff"
    cases = {
        encode_octets("c", tag=0x80): NewCookie(b"c"),
        encode_sequence(tag=0xA1): RefreshPhaseEnded(present=False),
        encode_sequence(cookie, false, tag=0xA1): RefreshPhaseEnded(present=False, cookie=b"c", refresh_done=False),
        encode_sequence(cookie, tag=0xA2): RefreshPhaseEnded(present=True, cookie=b"c"),
        encode_sequence(ids, tag=0xA3): SyncIdSet((UUID,)),
        encode_sequence(cookie, true, ids, tag=0xA3): SyncIdSet((UUID,), deleted=True, cookie=b"c"),
    }
    for value, expected in cases.items():
        assert decode_sync_info(value) == expected
    assert decode_sync_done(encode_sequence(cookie, true)) == SyncDone(b"c", refresh_deletes=True)
    assert decode_sync_done(encode_sequence()) == SyncDone()
    for broken in (
        b"",
        encode_sequence(tag=0xA4),
        encode_sequence(encode_sequence(encode_octets("short"), tag=0x31), tag=0xA3),
    ):
        with pytest.raises(BerError):
            decode_sync_info(broken)
    with pytest.raises(BerError, match="unknown state 9"):
        decode_sync_state(encode_sequence(b"\x0a\x01\x09", encode_octets(RAW_UUID)))


def test_every_result_code_has_a_name_and_a_text() -> None:
    for code in ResultCode:
        assert f"({code.value})" in name_result(code)
        assert explain_result(code)
    assert explain_result(12345) == "result code 12345"

"""BER: what is encoded is decoded again, and no input gives anything but a value or a BerError."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purveyor.sources.ldap.ber import (
    MAX_NESTING,
    OCTET_STRING,
    SEQUENCE,
    BerError,
    BerReader,
    encode_boolean,
    encode_element,
    encode_integer,
    encode_octets,
    encode_sequence,
    measure_element,
    read_header,
)

LIMIT = 1 << 20


@given(st.integers(-(2**63), 2**63 - 1), st.binary(max_size=70_000), st.text(max_size=300), st.booleans())
def test_what_is_encoded_is_decoded_again(number: int, octets: bytes, text: str, flag: bool) -> None:
    text = text.encode(errors="replace").decode()
    data = encode_sequence(encode_integer(number), encode_octets(octets), encode_octets(text), encode_boolean(flag))
    assert measure_element(data, 0, tag=SEQUENCE, max_bytes=LIMIT) == len(data)
    outer = BerReader(data)
    parts = outer.enter()
    outer.expect_end()
    assert (parts.read_integer(), parts.read_octets(), parts.read_text(), parts.read_boolean()) == (
        number, octets, text, flag,
    )  # fmt: skip
    assert parts.at_end
    assert parts.next_tag() is None


@given(st.binary(max_size=400))
def test_every_cut_of_an_element_is_noticed(octets: bytes) -> None:
    data = encode_sequence(encode_octets(octets))
    for end in range(len(data)):
        with pytest.raises(BerError):
            BerReader(data[:end]).enter().read_octets()
        size = measure_element(data[:end], 0, tag=SEQUENCE, max_bytes=LIMIT)
        assert size in {None, len(data)}


@given(st.binary(max_size=200))
def test_rubbish_gives_a_value_or_a_ber_error(data: bytes) -> None:
    readers = [BerReader(data)]
    while readers:
        reader = readers.pop()
        try:
            while not reader.at_end:
                tag = reader.next_tag()
                assert tag is not None
                if tag & 0x20:
                    readers.append(reader.enter(tag))
                else:
                    found, content = reader.read_element()
                    assert found == tag
                    assert len(content) <= len(data)
        except BerError:
            pass


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\x30\x80\x04\x00\x00\x00", "indefinite"),
        (b"\x30\x89" + bytes(9), "length of 9 bytes"),
        (b"\x30\x84\xff\xff\xff\xff", "only 0 are there"),
        (b"\x3f\x81\x01\x00", "several bytes"),
        (b"\x30\x83\x01", "middle of a length"),
        (b"\x30", "middle of an element"),
    ],
)
def test_what_ldap_forbids_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(BerError, match=reason):
        read_header(data, 0, len(data))


def test_an_element_above_the_limit_is_refused_before_it_is_there() -> None:
    with pytest.raises(BerError, match="at most 1000"):
        measure_element(b"\x30\x82\x10\x00", 0, tag=SEQUENCE, max_bytes=1000)
    with pytest.raises(BerError, match="indefinite"):
        measure_element(b"\x30\x80", 0, tag=SEQUENCE, max_bytes=1000)
    with pytest.raises(BerError, match="0x48 where 0x30"):
        measure_element(b"HTTP/1.1 400", 0, tag=SEQUENCE, max_bytes=1000)


def test_lengths_with_leading_zeros_are_accepted_as_slapd_sends_them() -> None:
    assert BerReader(b"\x30\x84\x00\x00\x00\x03\x02\x01\x05").enter().read_integer() == 5


def test_nesting_has_a_limit() -> None:
    data = b""
    for _ in range(MAX_NESTING + 1):
        data = encode_element(SEQUENCE, data)
    reader = BerReader(data)
    for _ in range(MAX_NESTING):
        reader = reader.enter()
    with pytest.raises(BerError, match="nested"):
        reader.enter()


@pytest.mark.parametrize(
    ("data", "read"),
    [
        (b"\x02\x00", BerReader.read_integer),
        (b"\x02\x09" + bytes(9), BerReader.read_integer),
        (b"\x01\x02\x00\x00", BerReader.read_boolean),
        (b"\x04\x01\xff", BerReader.read_text),
        (b"\x04\x00", BerReader.read_integer),
    ],
)
def test_a_value_of_the_wrong_form_is_refused(data: bytes, read: "object") -> None:
    assert callable(read)
    with pytest.raises(BerError):
        read(BerReader(data))


def test_the_end_is_enforced() -> None:
    with pytest.raises(BerError, match="unexpected"):
        BerReader(encode_octets(b"x")).expect_end()
    assert encode_octets(b"x")[0] == OCTET_STRING

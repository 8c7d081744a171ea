"""LDAP messages (RFC 4511, 4): the requests that a follower of a directory sends, and the responses that it gets.

`decode_message` reads an entry in one pass with inlined headers, because a refresh is bound by it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, TypeAlias

from purveyor.sources.ldap.ber import (
    ENUMERATED,
    OCTET_STRING,
    SEQUENCE,
    SET,
    BerError,
    BerReader,
    decode_text,
    encode_boolean,
    encode_element,
    encode_integer,
    encode_octets,
    encode_sequence,
    read_header,
)

START_TLS: Final = "1.3.6.1.4.1.1466.20037"
NOTICE_OF_DISCONNECTION: Final = "1.3.6.1.4.1.1466.20036"
MANAGE_DSA_IT: Final = "2.16.840.1.113730.3.4.2"

ALL_USER_ATTRIBUTES: Final = "*"
ALL_OPERATIONAL_ATTRIBUTES: Final = "+"
NO_ATTRIBUTES: Final = "1.1"

_BIND_REQUEST, _BIND_RESPONSE, _UNBIND_REQUEST = 0x60, 0x61, 0x42
_SEARCH_REQUEST, _SEARCH_ENTRY, _SEARCH_DONE, _SEARCH_REFERENCE = 0x63, 0x64, 0x65, 0x73
_ABANDON_REQUEST, _EXTENDED_REQUEST, _EXTENDED_RESPONSE, _INTERMEDIATE = 0x50, 0x77, 0x78, 0x79
_CONTROLS, _SIMPLE, _REFERRAL = 0xA0, 0x80, 0xA3
MAX_MESSAGE_ID: Final = 2**31 - 1
_MAX_KNOWN_NAMES: Final = 10_000

_Attributes: TypeAlias = dict[str, list[bytes]]


class Scope(IntEnum):
    """The entries below a base that a search covers."""

    BASE = 0
    ONE = 1
    SUB = 2


@dataclass(frozen=True, slots=True)
class Control:
    """A control of a request or a response."""

    oid: str
    critical: bool = False
    value: bytes | None = None


@dataclass(frozen=True, slots=True)
class LdapResult:
    """The outcome of an operation. `ResultCode` names the codes."""

    code: int
    matched_dn: str = ""
    text: str = ""
    """The diagnostic message of the server."""
    referral: tuple[str, ...] = ()
    """Where a referral points."""


@dataclass(frozen=True, slots=True)
class BindResponse:
    """The answer to a bind."""

    result: LdapResult


@dataclass(frozen=True, slots=True)
class SearchResultEntry:
    """One entry. Attribute names are as the server sends them, with their options (`cn;lang-de`)."""

    dn: str
    attributes: _Attributes


@dataclass(frozen=True, slots=True)
class SearchResultReference:
    """A part of the search that other servers have."""

    uris: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SearchResultDone:
    """The end of a search."""

    result: LdapResult


@dataclass(frozen=True, slots=True)
class ExtendedResponse:
    """The answer to an extended operation, or a notice without a request."""

    result: LdapResult
    oid: str | None = None
    value: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class IntermediateResponse:
    """A message before the end of an operation, such as Sync Info."""

    oid: str | None = None
    value: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class OtherResponse:
    """A response to an operation that this client does not use."""

    tag: int


Response: TypeAlias = (
    SearchResultEntry
    | SearchResultDone
    | SearchResultReference
    | IntermediateResponse
    | BindResponse
    | ExtendedResponse
    | OtherResponse
)


@dataclass(frozen=True, slots=True)
class LdapMessage:
    """A response with its envelope. Message id 0 is a notice without a request."""

    message_id: int
    response: Response
    controls: tuple[Control, ...] = ()

    def control(self, oid: str) -> Control | None:
        """Return the control of this type, if there is one."""
        for each in self.controls:
            if each.oid == oid:
                return each
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """What a search asks for."""

    base: str
    filter: bytes
    """The encoded filter: `search_filter.encode_filter`."""
    scope: Scope = Scope.SUB
    attributes: Sequence[str] = (ALL_USER_ATTRIBUTES, ALL_OPERATIONAL_ATTRIBUTES)
    size_limit: int = 0
    time_limit: int = 0
    types_only: bool = False


def encode_request(message_id: int, operation: bytes, controls: Sequence[Control] = ()) -> bytes:
    """Return an LDAPMessage around an encoded operation."""
    parts = [encode_integer(message_id), operation]
    if controls:
        parts.append(encode_sequence(*map(_encode_control, controls), tag=_CONTROLS))
    return encode_sequence(*parts)


def _encode_control(control: Control) -> bytes:
    parts = [encode_octets(control.oid)]
    if control.critical:
        parts.append(encode_boolean(True))
    if control.value is not None:
        parts.append(encode_octets(control.value))
    return encode_sequence(*parts)


def encode_bind(dn: str, password: str) -> bytes:
    """Return a simple bind."""
    return encode_sequence(
        encode_integer(3), encode_octets(dn), encode_octets(password, tag=_SIMPLE), tag=_BIND_REQUEST
    )


def encode_unbind() -> bytes:
    """Return the request that ends a connection; it has no answer."""
    return encode_element(_UNBIND_REQUEST, b"")


def encode_abandon(message_id: int) -> bytes:
    """Return the request that ends an operation; it has no answer."""
    return encode_integer(message_id, tag=_ABANDON_REQUEST)


def encode_start_tls() -> bytes:
    """Return the extended request StartTLS."""
    return encode_sequence(encode_octets(START_TLS, tag=0x80), tag=_EXTENDED_REQUEST)


def encode_search(request: SearchRequest) -> bytes:
    """Return a search that does not dereference aliases."""
    return encode_sequence(
        encode_octets(request.base),
        encode_integer(request.scope, tag=ENUMERATED),
        encode_integer(0, tag=ENUMERATED),
        encode_integer(request.size_limit),
        encode_integer(request.time_limit),
        encode_boolean(request.types_only),
        request.filter,
        encode_sequence(*map(encode_octets, request.attributes)),
        tag=_SEARCH_REQUEST,
    )


def decode_message(data: bytes) -> LdapMessage:
    """Decode exactly one LDAPMessage with a response; BerError if it is anything else."""
    envelope = BerReader(data)
    parts = envelope.enter(SEQUENCE)
    envelope.expect_end()
    message_id = parts.read_integer()
    if not 0 <= message_id <= MAX_MESSAGE_ID:
        raise BerError(f"message id {message_id}")
    tag, start, stop = read_header(data, parts.position, parts.end)
    parts.position = stop
    response: Response
    if tag == _SEARCH_ENTRY:
        response = _decode_entry(data, start, stop)
    else:
        response = _decode_other(tag, BerReader(data, start, stop))
    return LdapMessage(message_id, response, () if parts.at_end else _decode_controls(parts))


def _decode_entry(data: bytes, at: int, end: int) -> SearchResultEntry:
    """Decode an entry. Headers of attributes and values are read in place where their length has one byte."""
    dn, at = _decode_name(data, at, end)
    attributes: _Attributes = {}
    names = _names
    attribute_end = 0
    while at < end:
        # The usual attribute: all its lengths have one byte. Each step checks that the next bytes are inside of it.
        name_end = stop = -1
        if at + 4 <= end and data[at + 1] < 0x80 and data[at + 3] < 0x80:
            attribute_end = at + 2 + data[at + 1]
            name_end = at + 4 + data[at + 3]
            if name_end + 2 <= attribute_end <= end:
                stop = name_end + 2 + data[name_end + 1]
        if stop == attribute_end and data[at] == SEQUENCE and data[at + 2] == OCTET_STRING and data[name_end] == SET:
            raw = data[at + 4 : name_end]
            at = name_end + 2
        else:
            raw, at, stop = _decode_attribute_header(data, at, end)
        name = names.get(raw) or _remember_name(raw)
        values: list[bytes] = []
        while at < stop:
            if at + 2 <= stop and data[at] == OCTET_STRING and (length := data[at + 1]) < 0x80:
                start = at + 2
                at = start + length
                if at > stop:
                    raise BerError(f"BER element at byte {start - 2} is longer than the values of its attribute")
            else:
                tag, start, at = read_header(data, at, stop)
                if tag != OCTET_STRING:
                    raise BerError(f"BER tag 0x{tag:02x} where a value is expected")
            values.append(data[start:at])
        if name in attributes:
            attributes[name] += values
        else:
            attributes[name] = values
    return SearchResultEntry(dn, attributes)


def _decode_name(data: bytes, at: int, end: int) -> tuple[str, int]:
    """Return the DN of an entry, and where its first attribute begins."""
    tag, start, at = read_header(data, at, end)
    if tag != OCTET_STRING:
        raise BerError(f"BER tag 0x{tag:02x} where the DN of an entry is expected")
    dn = decode_text(data, start, at)
    tag, at, stop = read_header(data, at, end)
    if tag != SEQUENCE or stop != end:
        raise BerError("the attributes of an entry are not the last part of it")
    return dn, at


def _decode_attribute_header(data: bytes, at: int, end: int) -> tuple[bytes, int, int]:
    """Return the name of an attribute, and where its values begin and end."""
    tag, start, attribute_end = read_header(data, at, end)
    name_tag, name_start, name_end = read_header(data, start, attribute_end)
    values_tag, values_start, stop = read_header(data, name_end, attribute_end)
    if tag != SEQUENCE or name_tag != OCTET_STRING or values_tag != SET or stop != attribute_end:
        raise BerError(f"no attribute of an entry at byte {at}")
    return data[name_start:name_end], values_start, stop


_names: dict[bytes, str] = {}
"""The attribute names that were seen, so that equal names are one object."""


def _remember_name(raw: bytes) -> str:
    name = decode_text(raw, 0, len(raw))
    if len(_names) >= _MAX_KNOWN_NAMES:
        _names.clear()
    _names[raw] = name
    return name


def _decode_other(tag: int, parts: BerReader) -> Response:
    response: Response
    match tag:
        case 0x65:
            response = SearchResultDone(_decode_result(parts))
        case 0x79:
            response = IntermediateResponse(_optional_text(parts, 0x80), _optional_octets(parts, 0x81))
        case 0x73:
            uris = [parts.read_text()]
            while not parts.at_end:
                uris.append(parts.read_text())
            response = SearchResultReference(tuple(uris))
        case 0x61:
            response = BindResponse(_decode_result(parts))
            _optional_octets(parts, 0x87)
        case 0x78:
            result = _decode_result(parts)
            response = ExtendedResponse(result, _optional_text(parts, 0x8A), _optional_octets(parts, 0x8B))
        case 0x67 | 0x69 | 0x6B | 0x6D | 0x6F:
            return OtherResponse(tag)
        case _:
            raise BerError(f"0x{tag:02x} is no response of LDAP")
    parts.expect_end()
    return response


def _decode_result(parts: BerReader) -> LdapResult:
    code, matched, text = parts.read_integer(ENUMERATED), parts.read_text(), parts.read_text()
    uris: list[str] = []
    if parts.next_tag() == _REFERRAL:
        referral = parts.enter(_REFERRAL)
        while not referral.at_end:
            uris.append(referral.read_text())
    return LdapResult(code, matched, text, tuple(uris))


def _optional_text(parts: BerReader, tag: int) -> str | None:
    return parts.read_text(tag) if parts.next_tag() == tag else None


def _optional_octets(parts: BerReader, tag: int) -> bytes | None:
    return parts.read_octets(tag) if parts.next_tag() == tag else None


def _decode_controls(parts: BerReader) -> tuple[Control, ...]:
    found: list[Control] = []
    controls = parts.enter(_CONTROLS)
    parts.expect_end()
    while not controls.at_end:
        control = controls.enter(SEQUENCE)
        oid = control.read_text()
        critical = control.read_boolean() if control.next_tag() == 0x01 else False
        value = _optional_octets(control, OCTET_STRING)
        control.expect_end()
        found.append(Control(oid, critical, value))
    return tuple(found)

"""The controls and messages of content synchronisation (RFC 4533, 2): encode the request, decode what answers it.

UUIDs are text in the form of the attribute `entryUUID`. Cookies are the bytes that the server sent.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeAlias

from purveyor.sources.ldap.ber import (
    BOOLEAN,
    ENUMERATED,
    OCTET_STRING,
    SET,
    BerError,
    BerReader,
    encode_integer,
    encode_octets,
    encode_sequence,
)
from purveyor.sources.ldap.ldap_messages import Control

SYNC_REQUEST: Final = "1.3.6.1.4.1.4203.1.9.1.1"
SYNC_STATE: Final = "1.3.6.1.4.1.4203.1.9.1.2"
SYNC_DONE: Final = "1.3.6.1.4.1.4203.1.9.1.3"
SYNC_INFO: Final = "1.3.6.1.4.1.4203.1.9.1.4"


class SyncMode(IntEnum):
    """How long the server answers."""

    REFRESH_ONLY = 1
    """Until the content is refreshed."""
    REFRESH_AND_PERSIST = 3
    """Until the connection ends: after the refresh each change arrives alone, as it happens."""


class EntryState(IntEnum):
    """What the server says about an entry."""

    PRESENT = 0
    """It exists and has not changed; it arrives without attributes."""
    ADD = 1
    """It is new in the content. In a refresh slapd says so of each changed entry, also of one that the client knows."""
    MODIFY = 2
    DELETE = 3
    """It was deleted, or left the scope or the filter; it arrives without attributes."""


@dataclass(frozen=True, slots=True)
class SyncState:
    """The control of an entry."""

    state: EntryState
    uuid: str
    """Empty if the entry has none: slapd creates the root of an access log without one."""
    cookie: bytes | None = None


@dataclass(frozen=True, slots=True)
class SyncDone:
    """The control at the end of a search."""

    cookie: bytes | None = None
    refresh_deletes: bool = False


@dataclass(frozen=True, slots=True)
class NewCookie:
    """The content has not changed, but the cookie has."""

    cookie: bytes


@dataclass(frozen=True, slots=True)
class RefreshPhaseEnded:
    """A phase of the refresh ended: a present phase, in which all entries that exist were named, or a delete phase."""

    present: bool
    cookie: bytes | None = None
    refresh_done: bool = True


@dataclass(frozen=True, slots=True)
class SyncIdSet:
    """Entries that were deleted, or that exist unchanged."""

    uuids: tuple[str, ...]
    deleted: bool = False
    cookie: bytes | None = None


SyncInfo: TypeAlias = NewCookie | RefreshPhaseEnded | SyncIdSet


def encode_sync_request(mode: SyncMode, cookie: bytes | None = None) -> Control:
    """Return the critical control that turns a search into a synchronisation.

    It never has a reload hint: a request without a cookie asks for the whole content, too.
    """
    parts = [encode_integer(mode, tag=ENUMERATED)]
    if cookie is not None:
        parts.append(encode_octets(cookie))
    return Control(SYNC_REQUEST, critical=True, value=encode_sequence(*parts))


def decode_sync_state(value: bytes) -> SyncState:
    """Decode the value of the control Sync State."""
    parts = _enter(value)
    code, raw = parts.read_integer(ENUMERATED), parts.read_octets()
    uuid = format_uuid(raw) if raw else ""
    cookie = _optional_cookie(parts)
    parts.expect_end()
    try:
        return SyncState(EntryState(code), uuid, cookie)
    except ValueError:
        raise BerError(f"unknown state {code} of entry {uuid}") from None


def decode_sync_done(value: bytes) -> SyncDone:
    """Decode the value of the control Sync Done."""
    parts = _enter(value)
    cookie, refresh_deletes = _optional_cookie(parts), _boolean_or(parts, False)
    parts.expect_end()
    return SyncDone(cookie, refresh_deletes)


def decode_sync_info(value: bytes) -> SyncInfo:
    """Decode the value of the intermediate response Sync Info."""
    outer = BerReader(value)
    tag = outer.next_tag()
    found: SyncInfo
    if tag == 0x80:
        found = NewCookie(outer.read_octets(0x80))
        outer.expect_end()
        return found
    if tag not in {0xA1, 0xA2, 0xA3}:
        raise BerError("unknown kind of Sync Info" if tag is None else f"unknown kind 0x{tag:02x} of Sync Info")
    parts = outer.enter(tag)
    outer.expect_end()
    cookie = _optional_cookie(parts)
    if tag == 0xA3:
        deleted, uuids = _boolean_or(parts, False), []
        ids = parts.enter(SET)
        while not ids.at_end:
            uuids.append(format_uuid(ids.read_octets()))
        found = SyncIdSet(tuple(uuids), deleted, cookie)
    else:
        found = RefreshPhaseEnded(present=tag == 0xA2, cookie=cookie, refresh_done=_boolean_or(parts, True))
    parts.expect_end()
    return found


def format_uuid(value: bytes) -> str:
    """Return 16 bytes as the text of an entryUUID.

    >>> format_uuid(bytes(range(16)))
    '00010203-0405-0607-0809-0a0b0c0d0e0f'
    """
    if len(value) != 16:
        raise BerError(f"an entryUUID of {len(value)} bytes; it has 16")
    text = value.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def _enter(value: bytes) -> BerReader:
    outer = BerReader(value)
    parts = outer.enter()
    outer.expect_end()
    return parts


def _optional_cookie(parts: BerReader) -> bytes | None:
    return parts.read_octets() if parts.next_tag() == OCTET_STRING else None


def _boolean_or(parts: BerReader, default: bool) -> bool:
    return parts.read_boolean() if parts.next_tag() == BOOLEAN else default

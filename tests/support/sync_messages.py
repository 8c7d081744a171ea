"""Responses of a directory as decoded messages, for tests of the sans-IO parts."""

import uuid

from purveyor.sources.ldap.ber import (
    ENUMERATED,
    SET,
    encode_boolean,
    encode_integer,
    encode_octets,
    encode_sequence,
)
from purveyor.sources.ldap.ldap_messages import (
    Control,
    IntermediateResponse,
    LdapMessage,
    LdapResult,
    SearchResultDone,
    SearchResultEntry,
)
from purveyor.sources.ldap.sync_controls import SYNC_DONE, SYNC_INFO, SYNC_STATE, EntryState

SEARCH_ID = 7


def make_uuid(number: int) -> str:
    return str(uuid.UUID(int=number))


def make_csn(number: int, server: int = 0) -> str:
    """Return a CSN; a larger number is a later change."""
    return f"20260101{number // 10000 % 24:02d}{number // 100 % 60:02d}00.{number:06d}Z#000000#{server:03x}#000000"


def entry(
    number: int,
    state: EntryState,
    *,
    cookie: str | None = None,
    dn: str = "",
    attributes: dict[str, list[bytes]] | None = None,
) -> LdapMessage:
    """Return an entry with its Sync State."""
    parts = [encode_integer(state, tag=ENUMERATED), encode_octets(uuid.UUID(int=number).bytes)]
    value = encode_sequence(*parts, *_optional(cookie))
    response = SearchResultEntry(dn or f"cn={number}", attributes if attributes is not None else {})
    return LdapMessage(SEARCH_ID, response, (Control(SYNC_STATE, value=value),))


def id_set(numbers: list[int], *, deleted: bool, cookie: str | None = None) -> LdapMessage:
    """Return a Sync Info with a set of UUIDs."""
    ids = encode_sequence(*(encode_octets(uuid.UUID(int=number).bytes) for number in numbers), tag=SET)
    flag = [encode_boolean(True)] if deleted else []
    return _info(encode_sequence(*_optional(cookie), *flag, ids, tag=0xA3))


def phase_end(*, present: bool, done: bool = True, cookie: str | None = None) -> LdapMessage:
    """Return the end of a present or a delete phase."""
    flag = [] if done else [encode_boolean(False)]
    return _info(encode_sequence(*_optional(cookie), *flag, tag=0xA2 if present else 0xA1))


def new_cookie(cookie: str) -> LdapMessage:
    return _info(encode_octets(cookie, tag=0x80))


def search_done(
    code: int = 0, *, cookie: str | None = None, refresh_deletes: bool = False, text: str = "", sync: bool = True
) -> LdapMessage:
    """Return the end of a search, with Sync Done if it is a success."""
    flag = [encode_boolean(True)] if refresh_deletes else []
    controls = (Control(SYNC_DONE, value=encode_sequence(*_optional(cookie), *flag)),) if sync and code == 0 else ()
    return LdapMessage(SEARCH_ID, SearchResultDone(LdapResult(code, text=text)), controls)


def _info(value: bytes) -> LdapMessage:
    return LdapMessage(SEARCH_ID, IntermediateResponse(SYNC_INFO, value))


def _optional(cookie: str | None) -> list[bytes]:
    return [] if cookie is None else [encode_octets(cookie)]

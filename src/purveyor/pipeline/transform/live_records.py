"""A message of the queue `ldif` from a source that follows a directory, as a record. Pure.

`purveyor.sources.ldif.live_records` describes the format. A message with an `epoch` is one of these, any other is LDIF.
An entry is identified by its entryUUID, in lower case.
"""

import re
from dataclasses import dataclass
from typing import Final, TypeAlias

from purveyor.model import json_fields
from purveyor.model.errors import InvalidInput
from purveyor.model.ldif_changes import Change, Gone, LiveChange, Present, RefreshBegin, RefreshEnd
from purveyor.pipeline.transform.directory_records import (
    Attributes,
    DistinguishedName,
    InvalidRecord,
    Record,
    parse_dn,
    read_attributes,
    read_record,
)

_WHAT: Final = "message"
_EPOCH: Final = "epoch"
_UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_CSN: Final = re.compile(r"\d{14}\.\d{6}Z#[0-9a-f]{6}#([0-9a-f]{3})#[0-9a-f]{6}")
_OPERATIONS: Final = frozenset(each.value for each in (Change.ADD, Change.MODIFY, Change.DELETE, Change.MODRDN))


@dataclass(frozen=True, slots=True)
class EntryNow:
    """A whole entry as it is now."""

    uuid: str
    name: DistinguishedName
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of the accesslog."""

    record: Record
    uuid: str
    csn: str
    catch_up: bool


Body: TypeAlias = RefreshBegin | EntryNow | Gone | Present | RefreshEnd | Operation


@dataclass(frozen=True, slots=True)
class LiveRecord:
    """A record with the epoch of its writer."""

    epoch: int
    body: Body


class InvalidEntry(InvalidRecord):
    """An entry that cannot be applied, but is in the directory."""

    def __init__(self, reason: str, epoch: int, uuid: str) -> None:
        super().__init__(reason)
        self.epoch = epoch
        self.uuid = uuid


def parse_message(data: bytes) -> Record | LiveRecord:
    """Parse the record of a message; raise InvalidRecord if there is none."""
    try:
        fields = json_fields.parse(data, _WHAT)
        return _read_live(fields) if _EPOCH in fields else read_record(fields)
    except InvalidInput as error:
        raise InvalidRecord(error.message) from None


def read_uuid(text: object) -> str | None:
    """Return an entryUUID in lower case; None if it is none.

    >>> read_uuid("0F8FAD5B-d9cb-469f-a165-70867728950e"), read_uuid("7")
    ('0f8fad5b-d9cb-469f-a165-70867728950e', None)
    """
    found = text.lower() if isinstance(text, str) else ""
    return found if _UUID.fullmatch(found) else None


def server_id(csn: str) -> str:
    """Return the server id of a CSN; raise InvalidRecord if it is none.

    >>> server_id("20261119041844.123456Z#000000#001#000000")
    '001'
    """
    found = _CSN.fullmatch(csn)
    if found is None:
        raise InvalidRecord(f"{csn!r} is no CSN")
    return found[1]


def _read_live(fields: json_fields.Json) -> LiveRecord:
    epoch = json_fields.whole(fields, _EPOCH, _WHAT)
    if fields.get("change") in _OPERATIONS:
        return LiveRecord(epoch, _operation(fields))
    match json_fields.member(LiveChange, fields, "change", _WHAT):
        case LiveChange.REFRESH_BEGIN:
            return LiveRecord(epoch, RefreshBegin(_flag(fields, "full")))
        case LiveChange.ENTRY:
            return LiveRecord(epoch, _entry(fields, epoch))
        case LiveChange.GONE:
            return LiveRecord(epoch, Gone(_uuids(fields)))
        case LiveChange.PRESENT:
            return LiveRecord(epoch, Present(_uuids(fields)))
        case LiveChange.REFRESH_END:
            return LiveRecord(epoch, RefreshEnd(_flag(fields, "remove_unseen"), _csns(fields)))


def _entry(fields: json_fields.Json, epoch: int) -> EntryNow:
    uuid = _required_uuid(fields)
    try:
        name = parse_dn(json_fields.text(fields, "dn", _WHAT))
        return EntryNow(uuid, name, read_attributes(fields.get("attributes")))
    except InvalidInput as error:
        raise InvalidEntry(error.message, epoch, uuid) from None
    except InvalidRecord as error:
        raise InvalidEntry(str(error), epoch, uuid) from None


def _operation(fields: json_fields.Json) -> Operation:
    csn = json_fields.text(fields, "csn", _WHAT)
    server_id(csn)
    catch_up = json_fields.flag(fields, "catch_up", _WHAT)
    return Operation(read_record(fields), _required_uuid(fields), csn, catch_up)


def _flag(fields: json_fields.Json, name: str) -> bool:
    if name not in fields:
        raise InvalidRecord(f"the {_WHAT} has no {name!r}")
    return json_fields.flag(fields, name, _WHAT)


def _required_uuid(fields: json_fields.Json) -> str:
    return _uuid(json_fields.text(fields, "uuid", _WHAT))


def _uuid(given: object) -> str:
    found = read_uuid(given)
    if found is None:
        raise InvalidRecord(f"{given!r} is no entryUUID")
    return found


def _uuids(fields: json_fields.Json) -> tuple[str, ...]:
    given = fields.get("uuids")
    if not isinstance(given, list):
        raise InvalidRecord(f"the uuids are {json_fields.describe_type(given)}, not a list")
    return tuple(map(_uuid, given))


def _csns(fields: json_fields.Json) -> tuple[str, ...]:
    given = fields.get("csns")
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise InvalidRecord("the csns are no list of strings")
    for each in given:
        server_id(each)
    return tuple(given)

"""A message of the queue `ldif` as a record: parsed and checked once, where it enters the transform. Pure.

The import guide describes the format. A message in another format raises InvalidRecord, with the field that is wrong.
"""

import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from purveyor.model import json_fields
from purveyor.model.errors import InvalidInput
from purveyor.model.ldif_changes import Change, Step
from purveyor.pipeline.transform.dn import DistinguishedName, InvalidRecord, attribute_key, parse_dn

Value: TypeAlias = str | dict[str, str]
"""Text, or `{"base64": ...}`: the same in the message, in the state, and in the values of an unmapped attribute."""

Attributes: TypeAlias = Mapping[str, list[Value]]
"""By `attribute_key`; every attribute has a value."""


@dataclass(frozen=True, slots=True)
class Modification:
    """One step of a modify, on an attribute by its key."""

    step: Step
    attribute: str
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """One record; `change` decides which of the later fields have a meaning."""

    name: DistinguishedName
    change: Change
    attributes: Attributes = field(default_factory=dict)
    modifications: tuple[Modification, ...] = ()
    new_rdn: str = ""
    delete_old_rdn: bool = True
    new_superior: str | None = None


def parse_record(data: bytes) -> Record:
    """Parse the record of a message; raise InvalidRecord if there is none."""
    try:
        fields = json_fields.parse(data, "message")
        change = json_fields.member(Change, fields, "change", "message")
        entry = parse_dn(json_fields.text(fields, "dn", "message"))
        match change:
            case Change.CONTENT | Change.ADD:
                return Record(entry, change, _attributes(fields.get("attributes")))
            case Change.MODIFY:
                return Record(entry, change, modifications=_modifications(fields.get("modifications")))
            case Change.MODRDN:
                superior = fields.get("new_superior")
                if superior is not None and not isinstance(superior, str):
                    raise InvalidRecord("new_superior is no string")
                return Record(
                    entry,
                    change,
                    new_rdn=json_fields.text(fields, "new_rdn", "message"),
                    delete_old_rdn=json_fields.flag(fields, "delete_old_rdn", "message"),
                    new_superior=superior,
                )
            case Change.DELETE:
                return Record(entry, change)
    except InvalidInput as error:
        raise InvalidRecord(error.message) from None


def _attributes(given: object) -> dict[str, list[Value]]:
    if not isinstance(given, dict):
        raise InvalidRecord(f"the attributes are {json_fields.describe_type(given)}, not an object")
    found: dict[str, list[Value]] = {}
    for spelled, values in given.items():
        checked = _values(values, spelled)
        if checked:
            found.setdefault(attribute_key(spelled), []).extend(checked)
    return found


def _modifications(given: object) -> tuple[Modification, ...]:
    if not isinstance(given, list):
        raise InvalidRecord(f"the modifications are {json_fields.describe_type(given)}, not a list")
    found = []
    for each in given:
        fields = json_fields.mapping(each, "modification")
        spelled = json_fields.text(fields, "attribute", "modification")
        step = json_fields.member(Step, fields, "op", "modification")
        found.append(Modification(step, attribute_key(spelled), tuple(_values(fields.get("values", []), spelled))))
    return tuple(found)


def _values(given: object, spelled: str) -> list[Value]:
    if not isinstance(given, list):
        raise InvalidRecord(f"the values of {spelled!r} are {json_fields.describe_type(given)}, not a list")
    for value in given:
        if not isinstance(value, str):
            _check_binary(value, spelled)
    return given


def _check_binary(value: Any, spelled: str) -> None:
    if not isinstance(value, dict) or list(value) != ["base64"] or not isinstance(value["base64"], str):
        raise InvalidRecord(f"a value of {spelled!r} is neither a string nor base64")
    try:
        binascii.a2b_base64(value["base64"], strict_mode=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRecord(f"bad base64 in a value of {spelled!r}: {error}") from None

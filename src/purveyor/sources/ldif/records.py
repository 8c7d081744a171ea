"""LDIF records, and their messages in the queue `ldif`, which the transform reads.

A record is a whole entry, or one change to an entry. Values are bytes, as in LDAP.

The subject of a message is `ldif.<source>`, its body one JSON object in UTF-8. It always has `dn`, `change` and `line`,
the other fields depend on the change:

| field | changes | content |
|---|---|---|
| `dn` | all | the name of the entry |
| `change` | all | `content`, `add`, `modify`, `delete` or `modrdn` (also for `moddn`) |
| `line` | all | the line of its file on which the record begins |
| `attributes` | content, add | `{name: [values]}`, names as first spelled, with their options (`cn;lang-de`) |
| `modifications` | modify | `[{"op", "attribute", "values"}]` in order; op: `add`, `delete`, `replace`, `increment` |
| `new_rdn`, `delete_old_rdn`, `new_superior` | modrdn | strings, a boolean; without `new_superior` the parent stays |
| `controls` | changes | `[{"oid", "critical", "value"}]` |

A value is a string, or `{"base64": "..."}` when it is not UTF-8 or its attribute has the option `;binary`.

`live_records` has the records of a source that follows a directory.
"""

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from purveyor.model.errors import InvalidName
from purveyor.model.ldif_changes import Change, Step
from purveyor.queues.dead_letters.letter import subject_token

Attributes: TypeAlias = Mapping[str, tuple[bytes, ...]]
"""Each attribute, as first spelled and with its options (`cn;lang-de`), and its values in order."""


@dataclass(frozen=True, slots=True)
class Modification:
    """One step of a modify."""

    step: Step
    attribute: str
    values: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Control:
    """An LDAP control that goes with a change."""

    oid: str
    critical: bool = False
    value: bytes | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """One record. `change` decides which of the other fields are set."""

    line: int
    """The line of the file on which the record begins."""
    dn: str
    change: Change
    attributes: Attributes = field(default_factory=dict)
    modifications: tuple[Modification, ...] = ()
    new_rdn: str | None = None
    delete_old_rdn: bool | None = None
    new_superior: str | None = None
    controls: tuple[Control, ...] = ()
    raw: bytes = field(default=b"", compare=False, repr=False)
    """The lines of the record, from its dn on."""


@dataclass(frozen=True, slots=True)
class BrokenRecord:
    """Lines that are not a valid record, and the reason."""

    line: int
    reason: str
    raw: bytes
    """The lines as read; of a record above the size limit only the beginning."""
    size: int
    """The size of all the lines in bytes."""


_encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def source_subject(source: str) -> str:
    """Return the subject of a source; InvalidName unless its name is 1 to 64 letters, digits, `-` and `_`."""
    if subject_token(source) != source:
        raise InvalidName(f"invalid source name {source!r}", fix="use 1 to 64 letters, digits, '-' or '_'")
    return f"ldif.{source}"


def default_source_name(name: str) -> str:
    """Return the name of the source of a file.

    >>> default_source_name("people (2026).ldif"), default_source_name("-"), default_source_name("Ärzte.ldif")
    ('people-2026', 'stdin', 'rzte')
    """
    if name == "-":
        return "stdin"
    return subject_token(name.removesuffix(".ldif"))


def encode_record(record: Record) -> bytes:
    r"""Return the body of a record's message.

    >>> encode_record(Record(1, "cn=a", Change.CONTENT, {"cn": (b"a",), "photo": (b"\xff",)}))
    b'{"dn":"cn=a","change":"content","attributes":{"cn":["a"],"photo":[{"base64":"/w=="}]},"line":1}'
    """
    return encode_fields(record_fields(record) | {"line": record.line})


def encode_fields(fields: Mapping[str, Any]) -> bytes:
    """Return the body of a message with these fields."""
    return _encode_json(fields).encode()


def record_fields(record: Record) -> dict[str, Any]:
    """Return the fields of a record's message, without the line."""
    fields: dict[str, Any] = {"dn": record.dn, "change": record.change.value}
    if record.attributes:
        fields["attributes"] = attribute_fields(record.attributes)
    if record.change is Change.MODIFY:
        fields["modifications"] = [
            {"op": each.step.value, "attribute": each.attribute, "values": _values(each.attribute, each.values)}
            for each in record.modifications
        ]
    if record.change is Change.MODRDN:
        fields["new_rdn"] = record.new_rdn
        fields["delete_old_rdn"] = record.delete_old_rdn
        if record.new_superior is not None:
            fields["new_superior"] = record.new_superior
    if record.controls:
        fields["controls"] = [
            {"oid": control.oid, "critical": control.critical}
            | ({} if control.value is None else {"value": _value(control.value)})
            for control in record.controls
        ]
    return fields


def attribute_fields(attributes: Attributes) -> dict[str, list[object]]:
    """Return the attributes of an entry as they are in a message."""
    return {name: _values(name, values) for name, values in attributes.items()}


def _values(name: str, values: tuple[bytes, ...]) -> list[object]:
    if ";" in name and "binary" in name.lower().split(";")[1:]:
        return [_base64(value) for value in values]
    try:
        return [value.decode() for value in values]
    except UnicodeDecodeError:
        return [_value(value) for value in values]


def _value(value: bytes) -> object:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return _base64(value)


def _base64(value: bytes) -> dict[str, str]:
    return {"base64": base64.b64encode(value).decode()}

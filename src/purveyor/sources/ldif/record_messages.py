"""A record as the message that goes to the queue `ldif`: what the transform reads.

The subject is `ldif.<source>`, the body one JSON object in UTF-8. `dn`, `change` and `line` are always there, the rest
where it has a meaning:

| field | of | is |
|---|---|---|
| `dn` | all | the name of the entry |
| `change` | all | `content`, `add`, `modify`, `delete` or `modrdn` (also for `moddn`) |
| `line` | all | the line of its file on which the record begins |
| `attributes` | content, add | `{name: [values]}`, names as first spelled, with their options (`cn;lang-de`) |
| `modifications` | modify | `[{"op", "attribute", "values"}]` in order; op: `add`, `delete`, `replace`, `increment` |
| `new_rdn`, `delete_old_rdn`, `new_superior` | modrdn | strings, a boolean; without `new_superior` it stays there |
| `controls` | changes | `[{"oid", "critical", "value"}]` |

A value is a string, or `{"base64": "..."}` when it is not UTF-8 or its attribute has the option `;binary`.
"""

import base64
import json
from typing import Any

from purveyor.model.errors import InvalidName
from purveyor.model.ldif_changes import Change
from purveyor.queues.dead_letters.letter import token
from purveyor.sources.ldif.records import Record

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def subject(source: str) -> str:
    """Where records of a source go; InvalidName when it is not a token: letters, digits, `-` and `_`, at most 64."""
    if token(source) != source:
        raise InvalidName(f"invalid source name {source!r}", fix="use 1 to 64 letters, digits, '-' or '_'")
    return f"ldif.{source}"


def source_of(name: str) -> str:
    """The source that a file's name stands for.

    >>> source_of("people (2026).ldif"), source_of("-"), source_of("Ärzte.ldif")
    ('people-2026', 'stdin', 'rzte')
    """
    if name == "-":
        return "stdin"
    return token(name.removesuffix(".ldif"))


def body(record: Record) -> bytes:
    r"""The body of its message.

    >>> body(Record(1, "cn=a", Change.CONTENT, {"cn": (b"a",), "photo": (b"\xff",)}))
    b'{"dn":"cn=a","change":"content","attributes":{"cn":["a"],"photo":[{"base64":"/w=="}]},"line":1}'
    """
    fields: dict[str, Any] = {"dn": record.dn, "change": record.change.value}
    if record.attributes:
        fields["attributes"] = {name: _values(name, values) for name, values in record.attributes.items()}
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
    fields["line"] = record.line
    return _encode(fields).encode()


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

"""LDIF text: records in the various forms that the RFC allows, and simple files for imports."""

import base64
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from purveyor.model.ldif_changes import Change
from purveyor.sources.ldif.records import Control, Modification, Record

_SAFE = frozenset(range(1, 128)) - {0, 10, 13}


@dataclass(frozen=True)
class Style:
    """The form in which to write a record."""

    newline: bytes = b"\n"
    fold_at: int | None = None
    always_base64: bool = False
    comments: bool = False
    last_newline: bool = True


PLAIN = Style()


def person(number: int, tag: str = "people") -> bytes:
    """Return an entry with the empty line after it."""
    return f"dn: uid=u{number},ou={tag}\nobjectClass: inetOrgPerson\nuid: u{number}\ncn: User {number}\n\n".encode()


def people(count: int, tag: str = "people", *, first: int = 1) -> bytes:
    return b"".join(person(number, tag) for number in range(first, first + count))


def write(records: Iterable[Record], style: Style = PLAIN) -> bytes:
    """Return the records as a file."""
    text = (style.newline * 2).join(style.newline.join(_physical(record, style)) for record in records)
    return text + style.newline * style.last_newline


def _physical(record: Record, style: Style) -> list[bytes]:
    lines = [_line(b"dn", record.dn.encode(), style)]
    lines += [_control(control, style) for control in record.controls]
    if record.change is not Change.CONTENT:
        lines.append(b"changetype: " + record.change.value.encode())
    lines += _BODIES[record.change](record, style)
    if style.comments:
        lines = [b"# a remark: with a colon", *lines[:1], b"#dn: another", *lines[1:]]
    return [part for line in lines for part in _fold(line, style)]


def _attributes(record: Record, style: Style) -> list[bytes]:
    return [_line(name.encode(), value, style) for name, values in record.attributes.items() for value in values]


def _modifications(record: Record, style: Style) -> list[bytes]:
    return [line for step in record.modifications for line in _modification(step, style)]


def _modification(step: Modification, style: Style) -> list[bytes]:
    name = step.attribute.encode()
    return [step.step.value.encode() + b": " + name, *(_line(name, value, style) for value in step.values), b"-"]


def _rename(record: Record, style: Style) -> list[bytes]:
    assert record.new_rdn is not None
    lines = [_line(b"newrdn", record.new_rdn.encode(), style), b"deleteoldrdn: %d" % bool(record.delete_old_rdn)]
    return lines + ([] if record.new_superior is None else [_line(b"newsuperior", record.new_superior.encode(), style)])


_BODIES: dict[Change, Callable[[Record, Style], Sequence[bytes]]] = {
    Change.CONTENT: _attributes,
    Change.ADD: _attributes,
    Change.MODIFY: _modifications,
    Change.DELETE: lambda _record, _style: [],
    Change.MODRDN: _rename,
}


def _control(control: Control, style: Style) -> bytes:
    head = f"control: {control.oid} {'true' if control.critical else 'false'}".encode()
    return head if control.value is None else _line(head, control.value, style)


def _line(name: bytes, value: bytes, style: Style) -> bytes:
    plain = all(byte in _SAFE for byte in value) and value[:1] not in (b" ", b":", b"<") and value[-1:] != b" "
    if plain and not style.always_base64:
        return name + b": " + value
    return name + b":: " + base64.b64encode(value)


def _fold(line: bytes, style: Style) -> list[bytes]:
    if style.fold_at is None:
        return [line]
    at = style.fold_at
    return [line[:at], *(b" " + line[start : start + at] for start in range(at, len(line), at))]

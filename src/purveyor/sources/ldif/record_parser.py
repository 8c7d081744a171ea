"""The grammar of one LDIF record (RFC 2849, with `increment` of RFC 4525): lines in, a record out. Pure.

It is strict where a guess could change data, and lenient where files of the wild differ from the RFC without harm: the
lines of a rename come in any order, the last `-` of a modify may be missing, content and changes may share a file.
"""

import binascii
import re
from collections.abc import Callable

from purveyor.model.ldif_changes import Change, Step
from purveyor.sources.ldif.records import Attributes, Control, Modification, Record

_NAME = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]*(;[A-Za-z0-9_-]+)*")
_INTEGER = re.compile(rb"-?[0-9]+")
_CONTROL = re.compile(rb"(?P<oid>[0-9]+(\.[0-9]+)*)( +(?P<critical>true|false))?(?P<value>:.*)?", re.DOTALL)
_RESERVED = frozenset({"dn", "changetype", "control"})
_SHOWN = 40

_NAMES: dict[bytes, str] = {}
_MOST_NAMES = 10_000
"""Names seen and found good: a directory has some hundred, and rubbish must not fill the memory."""


class Malformed(Exception):
    """Why lines are no record. Never leaves the intake: it becomes a `Broken`."""


def parse_record(raw: bytes, line: int) -> Record:
    r"""The record in these lines, of which the first is on `line` of its file; Malformed when there is none.

    >>> parse_record(b"dn: cn=Ada,dc=example\ncn: Ada\nsn:: TG92ZWxhY2U=", 7).attributes
    {'cn': (b'Ada',), 'sn': (b'Lovelace',)}
    """
    lines = logical_lines(raw)
    name, value = _attribute(lines[0])
    if name.lower() == "version":
        raise Malformed("only version 1 of LDIF is known")
    if name.lower() != "dn":
        raise Malformed(f"a record begins with its dn, not with {_show(lines[0])}")
    dn = _text(value, "dn")
    if len(lines) == 1:
        raise Malformed("a dn and nothing else")
    if lines[1][:11].lower() != b"changetype:" and lines[1][:8].lower() != b"control:":
        return Record(line, dn, Change.CONTENT, _attributes(lines, 1), raw=raw)
    return _change_record(lines, dn, line, raw)


def logical_lines(raw: bytes) -> list[bytes]:
    """The lines without their folds and ends, and without comments."""
    if b"\r" in raw:
        raw = raw.replace(b"\r\n", b"\n")
    if b"\n " in raw:
        raw = raw.replace(b"\n ", b"")
    lines = raw.split(b"\n")
    if b"\n#" in raw or raw[:1] == b"#":
        lines = [line for line in lines if line[:1] != b"#"]
    return lines


def _change_record(lines: list[bytes], dn: str, line: int, raw: bytes) -> Record:
    at = 1
    controls: list[Control] = []
    while at < len(lines) and lines[at][:8].lower() == b"control:":
        controls.append(_control(lines[at]))
        at += 1
    if at == len(lines) or lines[at][:11].lower() != b"changetype:":
        raise Malformed("controls without a changetype after them")
    word = _text(_attribute(lines[at])[1], "changetype").strip().lower()
    try:
        change = Change.MODRDN if word == "moddn" else Change(word)
    except ValueError:
        change = Change.CONTENT
    if change is Change.CONTENT:
        raise Malformed(f"unknown changetype {_show(word.encode())}")
    known = Record(line, dn, change, controls=tuple(controls), raw=raw)
    return _READERS[change](known, lines, at + 1)


def _add(known: Record, lines: list[bytes], at: int) -> Record:
    if at == len(lines):
        raise Malformed("an add without attributes")
    return Record(known.line, known.dn, known.change, _attributes(lines, at), controls=known.controls, raw=known.raw)


def _delete(known: Record, lines: list[bytes], at: int) -> Record:
    if at != len(lines):
        raise Malformed(f"a delete has nothing after its changetype, but there is {_show(lines[at])}")
    return known


def _modify(known: Record, lines: list[bytes], at: int) -> Record:
    modifications: list[Modification] = []
    while at < len(lines):
        word, name = _attribute(lines[at])
        try:
            step = Step(word.lower())
        except ValueError:
            raise Malformed(f"{_show(lines[at])} is not add, delete, replace or increment of an attribute") from None
        attribute = _name(name.strip())
        values: list[bytes] = []
        at += 1
        while at < len(lines) and lines[at] != b"-":
            given, value = _attribute(lines[at])
            if given.lower() != attribute.lower():
                raise Malformed(f"{given!r} in the {step.value} of {attribute!r}: is a line with '-' missing?")
            values.append(value)
            at += 1
        at += 1
        _check_values(step, attribute, values)
        modifications.append(Modification(step, attribute, tuple(values)))
    return Record(
        known.line,
        known.dn,
        known.change,
        modifications=tuple(modifications),
        controls=known.controls,
        raw=known.raw,
    )


def _check_values(step: Step, attribute: str, values: list[bytes]) -> None:
    if step is Step.ADD and not values:
        raise Malformed(f"an add of {attribute!r} without values")
    if step is Step.INCREMENT and not (len(values) == 1 and _INTEGER.fullmatch(values[0].strip())):
        raise Malformed(f"an increment of {attribute!r} needs one number")


def _rename(known: Record, lines: list[bytes], at: int) -> Record:
    found: dict[str, str] = {}
    for line in lines[at:]:
        name, value = _attribute(line)
        word = name.lower()
        if word not in ("newrdn", "deleteoldrdn", "newsuperior") or word in found:
            raise Malformed(f"{_show(line)} has no place in a rename")
        found[word] = _text(value, word)
    if not found.get("newrdn"):
        raise Malformed("a rename without newrdn")
    if found.get("deleteoldrdn", "").strip() not in ("0", "1"):
        raise Malformed("a rename needs deleteoldrdn: 0 or 1")
    return Record(
        known.line,
        known.dn,
        known.change,
        new_rdn=found["newrdn"],
        delete_old_rdn=found["deleteoldrdn"].strip() == "1",
        new_superior=found.get("newsuperior"),
        controls=known.controls,
        raw=known.raw,
    )


_READERS: dict[Change, Callable[[Record, list[bytes], int], Record]] = {
    Change.ADD: _add,
    Change.DELETE: _delete,
    Change.MODIFY: _modify,
    Change.MODRDN: _rename,
}


def _attributes(lines: list[bytes], at: int) -> Attributes:
    """Values by attribute; a name spelled in several ways is one attribute, as in LDAP."""
    found: dict[str, tuple[bytes, ...]] = {}
    for line in lines[at:]:
        # The common form of a line, taken without a call: nine lines of ten are `known-name: value`.
        label, _, value = line.partition(b": ")
        name = _NAMES.get(label)
        if name is None or value[:1] == b" ":
            name, value = _attribute(line)
        if name in found:
            found[name] += (value,)
        else:
            found[name] = (value,)
    folded = {*map(str.lower, found)}
    if not folded.isdisjoint(_RESERVED):
        word = next(name for name in found if name.lower() in _RESERVED)
        raise Malformed(f"{word!r} amid the attributes of an entry: is an empty line missing before it?")
    return found if len(folded) == len(found) else _merge(found)


def _merge(found: Attributes) -> Attributes:
    merged: dict[str, tuple[bytes, ...]] = {}
    spelled: dict[str, str] = {}
    for name, values in found.items():
        first = spelled.setdefault(name.lower(), name)
        merged[first] = merged.get(first, ()) + values
    return merged


def _attribute(line: bytes) -> tuple[str, bytes]:
    """Name and value of a line."""
    name, colon, rest = line.partition(b":")
    if not colon:
        raise Malformed(f"a line without a colon: {_show(line)}")
    return _name(name), _value(rest, name)


def _value(rest: bytes, name: bytes) -> bytes:
    """What follows the first colon of a line."""
    kind = rest[:1]
    if kind == b":":
        try:
            return binascii.a2b_base64(rest[1:].strip(b" "), strict_mode=True)
        except binascii.Error as error:
            raise Malformed(f"bad base64 in {_show(name)}: {str(error).lower()}") from None
    if kind == b"<":
        raise Malformed(f"a URL as the value of {_show(name)}: files elsewhere are not read")
    return rest.lstrip(b" ")


def _control(line: bytes) -> Control:
    found = _CONTROL.fullmatch(line[8:].strip(b" "))
    if found is None:
        raise Malformed(f"not a control: {_show(line)}")
    value = found["value"]
    return Control(
        found["oid"].decode(),
        critical=found["critical"] == b"true",
        value=None if value is None else _value(value[1:], b"control"),
    )


def _name(name: bytes) -> str:
    known = _NAMES.get(name)
    if known is not None:
        return known
    if not _NAME.fullmatch(name):
        raise Malformed(f"{_show(name)} is not the name of an attribute")
    if len(_NAMES) < _MOST_NAMES:
        _NAMES[name] = name.decode()
    return name.decode()


def _text(value: bytes, what: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise Malformed(f"the {what} is not UTF-8: {_show(value)}") from None


def _show(data: bytes) -> str:
    """The beginning of a line, for people. Attribute values are left out: they may be secrets."""
    head, colon, _ = data.partition(b":")
    cut = len(head) > _SHOWN or bool(colon and data[len(head) + 1 :])
    return repr((head[:_SHOWN] + colon).decode("utf-8", "replace")) + ("..." if cut else "")

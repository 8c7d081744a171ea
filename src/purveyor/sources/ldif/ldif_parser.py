"""A parser of LDIF (RFC 2849, with `increment` of RFC 4525): portions of bytes in, records out. Pure.

`LdifParser` splits a stream into records, each with its line. Empty lines separate records, so a broken one ends at the
next empty line. Memory holds one portion and one record; of a record above the limit only the beginning.

`parse_record` parses one record. It is strict where a guess could change data, and lenient where real files differ from
the RFC without harm: the lines of a rename come in any order, the last `-` of a modify may be missing, content and
changes may share a file.
"""

import binascii
import re
from collections.abc import Callable, Iterable, Iterator

from purveyor.model.ldif_changes import Change, Step
from purveyor.sources.ldif.records import Attributes, BrokenRecord, Control, Modification, Record

_NAME = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]*(;[A-Za-z0-9_-]+)*")
_INTEGER = re.compile(rb"-?[0-9]+")
_CONTROL = re.compile(rb"(?P<oid>[0-9]+(\.[0-9]+)*)( +(?P<critical>true|false))?(?P<value>:.*)?", re.DOTALL)
_RESERVED = frozenset({"dn", "changetype", "control"})
_SHOWN_BYTES = 40

_KNOWN_NAMES: dict[bytes, str] = {}
_MAX_KNOWN_NAMES = 10_000
"""Valid attribute names seen before: a directory has some hundred, and bad input must not fill the memory."""


class MalformedRecord(Exception):
    """Why lines are not a valid record. `LdifParser` turns it into a `BrokenRecord`."""


def parse_record(raw: bytes, line: int) -> Record:
    r"""Return the record in these lines, the first of which is `line` of its file; raise MalformedRecord if invalid.

    >>> parse_record(b"dn: cn=Ada,dc=example\ncn: Ada\nsn:: TG92ZWxhY2U=", 7).attributes
    {'cn': (b'Ada',), 'sn': (b'Lovelace',)}
    """
    lines = logical_lines(raw)
    name, value = _attribute(lines[0])
    if name.lower() == "version":
        raise MalformedRecord("only version 1 of LDIF is known")
    if name.lower() != "dn":
        raise MalformedRecord(f"a record begins with its dn, not with {_show(lines[0])}")
    dn = _text(value, "dn")
    if len(lines) == 1:
        raise MalformedRecord("a dn and nothing else")
    if lines[1][:11].lower() != b"changetype:" and lines[1][:8].lower() != b"control:":
        return Record(line, dn, Change.CONTENT, _attributes(lines, 1), raw=raw)
    return _change_record(lines, dn, line, raw)


def logical_lines(raw: bytes) -> list[bytes]:
    """Return the lines without folds, line ends and comments."""
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
        raise MalformedRecord("controls without a changetype after them")
    word = _text(_attribute(lines[at])[1], "changetype").strip().lower()
    try:
        change = Change.MODRDN if word == "moddn" else Change(word)
    except ValueError:
        change = Change.CONTENT
    if change is Change.CONTENT:
        raise MalformedRecord(f"unknown changetype {_show(word.encode())}")
    known = Record(line, dn, change, controls=tuple(controls), raw=raw)
    return _PARSERS[change](known, lines, at + 1)


def _add(known: Record, lines: list[bytes], at: int) -> Record:
    if at == len(lines):
        raise MalformedRecord("an add without attributes")
    return Record(known.line, known.dn, known.change, _attributes(lines, at), controls=known.controls, raw=known.raw)


def _delete(known: Record, lines: list[bytes], at: int) -> Record:
    if at != len(lines):
        raise MalformedRecord(f"a delete has nothing after its changetype, but there is {_show(lines[at])}")
    return known


def _modify(known: Record, lines: list[bytes], at: int) -> Record:
    modifications: list[Modification] = []
    while at < len(lines):
        word, name = _attribute(lines[at])
        try:
            step = Step(word.lower())
        except ValueError:
            raise MalformedRecord(
                f"{_show(lines[at])} is not add, delete, replace or increment of an attribute"
            ) from None
        attribute = _name(name.strip())
        values: list[bytes] = []
        at += 1
        while at < len(lines) and lines[at] != b"-":
            given, value = _attribute(lines[at])
            if given.lower() != attribute.lower():
                raise MalformedRecord(f"{given!r} in the {step.value} of {attribute!r}: is a line with '-' missing?")
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
        raise MalformedRecord(f"an add of {attribute!r} without values")
    if step is Step.INCREMENT and not (len(values) == 1 and _INTEGER.fullmatch(values[0].strip())):
        raise MalformedRecord(f"an increment of {attribute!r} needs one number")


def _rename(known: Record, lines: list[bytes], at: int) -> Record:
    found: dict[str, str] = {}
    for line in lines[at:]:
        name, value = _attribute(line)
        word = name.lower()
        if word not in ("newrdn", "deleteoldrdn", "newsuperior") or word in found:
            raise MalformedRecord(f"{_show(line)} is no line of a rename")
        found[word] = _text(value, word)
    if not found.get("newrdn"):
        raise MalformedRecord("a rename without newrdn")
    if found.get("deleteoldrdn", "").strip() not in ("0", "1"):
        raise MalformedRecord("a rename needs deleteoldrdn: 0 or 1")
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


_PARSERS: dict[Change, Callable[[Record, list[bytes], int], Record]] = {
    Change.ADD: _add,
    Change.DELETE: _delete,
    Change.MODIFY: _modify,
    Change.MODRDN: _rename,
}


def _attributes(lines: list[bytes], at: int) -> Attributes:
    """Return the values by attribute; names that differ in case are one attribute, as in LDAP."""
    found: dict[str, tuple[bytes, ...]] = {}
    for line in lines[at:]:
        # The common form of a line, without a call: nine lines of ten are `known-name: value`.
        label, _, value = line.partition(b": ")
        name = _KNOWN_NAMES.get(label)
        if name is None or value[:1] == b" ":
            name, value = _attribute(line)
        if name in found:
            found[name] += (value,)
        else:
            found[name] = (value,)
    folded = {*map(str.lower, found)}
    if not folded.isdisjoint(_RESERVED):
        word = next(name for name in found if name.lower() in _RESERVED)
        raise MalformedRecord(f"{word!r} amid the attributes of an entry: is an empty line missing before it?")
    return found if len(folded) == len(found) else _merge(found)


def _merge(found: Attributes) -> Attributes:
    merged: dict[str, tuple[bytes, ...]] = {}
    spelled: dict[str, str] = {}
    for name, values in found.items():
        first = spelled.setdefault(name.lower(), name)
        merged[first] = merged.get(first, ()) + values
    return merged


def _attribute(line: bytes) -> tuple[str, bytes]:
    """Return name and value of a line."""
    name, colon, rest = line.partition(b":")
    if not colon:
        raise MalformedRecord(f"a line without a colon: {_show(line)}")
    return _name(name), _value(rest, name)


def _value(rest: bytes, name: bytes) -> bytes:
    """Decode the text after the first colon of a line."""
    kind = rest[:1]
    if kind == b":":
        try:
            return binascii.a2b_base64(rest[1:].strip(b" "), strict_mode=True)
        except binascii.Error as error:
            raise MalformedRecord(f"bad base64 in {_show(name)}: {str(error).lower()}") from None
    if kind == b"<":
        raise MalformedRecord(f"a URL as the value of {_show(name)}: the import reads no other files")
    return rest.lstrip(b" ")


def _control(line: bytes) -> Control:
    found = _CONTROL.fullmatch(line[8:].strip(b" "))
    if found is None:
        raise MalformedRecord(f"not a control: {_show(line)}")
    value = found["value"]
    return Control(
        found["oid"].decode(),
        critical=found["critical"] == b"true",
        value=None if value is None else _value(value[1:], b"control"),
    )


def _name(name: bytes) -> str:
    known = _KNOWN_NAMES.get(name)
    if known is not None:
        return known
    if not _NAME.fullmatch(name):
        raise MalformedRecord(f"{_show(name)} is not the name of an attribute")
    if len(_KNOWN_NAMES) < _MAX_KNOWN_NAMES:
        _KNOWN_NAMES[name] = name.decode()
    return name.decode()


def _text(value: bytes, what: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise MalformedRecord(f"the {what} is not UTF-8: {_show(value)}") from None


def _show(data: bytes) -> str:
    """Return the beginning of a line for an error message, without attribute values: they may be secrets."""
    head, colon, _ = data.partition(b":")
    cut = len(head) > _SHOWN_BYTES or bool(colon and data[len(head) + 1 :])
    return repr((head[:_SHOWN_BYTES] + colon).decode("utf-8", "replace")) + ("..." if cut else "")


MAX_RECORD_BYTES = 16 << 20
"""The largest record that the parser reads, in the bytes of its lines."""

_SEPARATOR = re.compile(rb"\n\r?\n")
_VERSION = re.compile(rb"version: *1 *\r?", re.IGNORECASE)
_BOM = b"\xef\xbb\xbf"
_LINE_ENDS = b"\r\n"
_KEPT_BYTES = 64 << 10  # of a record above the limit: enough to recognise it
_SLACK_BYTES = 8  # half an end of a record, and line ends before the record


class LdifParser:
    r"""Splits a stream into records.

    >>> parser = LdifParser()
    >>> [record.dn for record in parser.feed(b"dn: cn=a\ncn: a\n\ndn: cn=b\nc")]
    ['cn=a']
    >>> [record.dn for record in parser.feed(b"n: b")], [record.dn for record in parser.close()]
    ([], ['cn=b'])
    """

    def __init__(self, *, max_record_bytes: int = MAX_RECORD_BYTES) -> None:
        self._max_record_bytes = max_record_bytes
        self._kept_bytes = min(max_record_bytes, _KEPT_BYTES)
        self._rest = b""
        self._line = 1
        self._skipping: BrokenRecord | None = None
        """A record above the limit whose end has not come yet; its size is the bytes dropped so far."""

    def feed(self, chunk: bytes) -> Iterator[Record | BrokenRecord]:
        """Yield the records that end in this portion, which may be of any size."""
        data = self._rest + chunk
        seen = max(len(self._rest) - 2, 0)  # no record ends before this; one may end across it
        if self._skipping is not None:
            separator = _SEPARATOR.search(data)
            if separator is None:
                self._drop(data)
                return
            yield self._too_large(self._skipping, data[: separator.start()])
            self._line += data.count(b"\n", 0, separator.end())
            data, seen = data[separator.end() :], 0
        end = _last_separator_end(data, seen)
        if end:
            whole, data = data[:end], data[end:]
            *blocks, tail = _SEPARATOR.split(whole) if b"\r" in whole else whole.split(b"\n\n")
            for block in blocks:
                if (found := self._parse_block(block)) is not None:
                    yield found
                self._line += block.count(b"\n") + 2
            self._line += tail.count(b"\n")  # at most one more empty line
        self._rest = data
        if len(data) > self._max_record_bytes + _SLACK_BYTES:
            self._drop(data)

    def close(self) -> Iterator[Record | BrokenRecord]:
        """Yield the last record, which needs no empty line after it."""
        data, self._rest = self._rest, b""
        if self._skipping is not None:
            yield self._too_large(self._skipping, data)
        elif (found := self._parse_block(data)) is not None:
            yield found

    def abandon(self, reason: str) -> Iterator[BrokenRecord]:
        """Yield an incomplete record, whose end will never come, as a broken one."""
        data, self._rest = self._rest.strip(_LINE_ENDS), b""
        if self._skipping is not None:
            yield self._too_large(self._skipping, data)
        elif data:
            yield BrokenRecord(self._line, reason, data, len(data))

    def _parse_block(self, block: bytes) -> Record | BrokenRecord | None:
        """Parse the text between two empty lines: a record, perhaps after comments or a version, or nothing."""
        if len(block) > self._max_record_bytes:
            body = block.lstrip(_LINE_ENDS)
            if len(body) > self._max_record_bytes:
                line = self._line + block.count(b"\n", 0, len(block) - len(body))
                return self._too_large(BrokenRecord(line, "", body[: self._kept_bytes], 0), body)
        line = self._line
        raw = block.rstrip(_LINE_ENDS)
        if line == 1:
            raw = raw.removeprefix(_BOM)
        if raw[:3] != b"dn:":
            skipped, lines = _preamble(raw)
            raw, line = raw[skipped:], line + lines
        if not raw:
            return None
        try:
            return parse_record(raw, line)
        except MalformedRecord as error:
            return BrokenRecord(line, str(error), raw, len(raw))

    def _drop(self, data: bytes) -> None:
        """Drop the bytes of a record above the limit, except for a possible beginning of its end."""
        if self._skipping is None:
            body = data.lstrip(_LINE_ENDS)
            line = self._line + data.count(b"\n", 0, len(data) - len(body))
            self._skipping = BrokenRecord(line, "", body[: self._kept_bytes], len(body) - len(data))
        dropped, self._rest = data[:-2], data[-2:]
        self._line += dropped.count(b"\n")
        known = self._skipping
        self._skipping = BrokenRecord(known.line, "", known.raw, known.size + len(dropped))

    def _too_large(self, known: BrokenRecord, end: bytes) -> BrokenRecord:
        self._skipping = None
        return BrokenRecord(known.line, f"larger than {self._max_record_bytes} bytes", known.raw, known.size + len(end))


def parse_ldif(chunks: Iterable[bytes], *, max_record_bytes: int = MAX_RECORD_BYTES) -> Iterator[Record | BrokenRecord]:
    """Yield all records of a stream."""
    parser = LdifParser(max_record_bytes=max_record_bytes)
    for chunk in chunks:
        yield from parser.feed(chunk)
    yield from parser.close()


def _last_separator_end(data: bytes, start: int) -> int:
    """Return the end of the last empty line of the data; 0 if none ends behind the start."""
    plain = data.rfind(b"\n\n", start)
    carriage = data.rfind(b"\n\r\n", start)
    return max(plain + 2 if plain >= 0 else 0, carriage + 3 if carriage >= 0 else 0)


def _preamble(raw: bytes) -> tuple[int, int]:
    """Count the bytes and lines before a record: empty lines, comments (with their folds) and the version."""
    at = lines = 0
    in_comment = False
    while at < len(raw):
        end = raw.find(b"\n", at)
        end = len(raw) if end < 0 else end
        first = raw[at : at + 1]
        in_comment = first == b"#" or (in_comment and first == b" ")
        if not (in_comment or at == end or raw[at:end] == b"\r" or _VERSION.fullmatch(raw, at, end)):
            break
        at = end + 1
        lines += 1
    return at, lines

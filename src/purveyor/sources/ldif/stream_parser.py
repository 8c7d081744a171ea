"""LDIF as a stream: bytes in, in portions of any size; records out, each with its line. The first step of an import.

Records are parted by empty lines, so whatever is broken ends at the next one. Memory holds one portion and one record;
of a record above the limit only the beginning is kept. `grammar` knows what is in a record.
"""

import re
from collections.abc import Iterable, Iterator

from purveyor.sources.ldif.record_parser import Malformed, parse_record
from purveyor.sources.ldif.records import Broken, Record

MOST_BYTES = 16 << 20
"""The largest record that is read, in the bytes of its lines."""

_SEPARATOR = re.compile(rb"\n\r?\n")
_VERSION = re.compile(rb"version: *1 *\r?", re.IGNORECASE)
_BOM = b"\xef\xbb\xbf"
_LINE_ENDS = b"\r\n"
_MOST_KEPT = 64 << 10  # bytes of a record above the limit: enough to see what it is
_SLACK = 8  # an end of record that is half there, and line ends before the record


class Parser:
    r"""Cuts a stream into records.

    >>> parser = Parser()
    >>> [record.dn for record in parser.feed(b"dn: cn=a\ncn: a\n\ndn: cn=b\nc")]
    ['cn=a']
    >>> [record.dn for record in parser.feed(b"n: b")], [record.dn for record in parser.close()]
    ([], ['cn=b'])
    """

    def __init__(self, *, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept_bytes = min(most_bytes, _MOST_KEPT)  # what is there at least, whatever the portions
        self._rest = b""
        self._line = 1
        self._skipping: Broken | None = None
        """A record above the limit whose end was not seen yet; its size is what was let go of it so far."""

    def feed(self, chunk: bytes) -> Iterator[Record | Broken]:
        """The records that end in this portion, which may be of any size."""
        data = self._rest + chunk
        seen = max(len(self._rest) - 2, 0)  # before it no record ends; at it one may have begun to
        if self._skipping is not None:
            end_of_it = _SEPARATOR.search(data)
            if end_of_it is None:
                self._let_go(data)
                return
            yield self._too_large(self._skipping, data[: end_of_it.start()])
            self._line += data.count(b"\n", 0, end_of_it.end())
            data, seen = data[end_of_it.end() :], 0
        end = _last_separator_end(data, seen)
        if end:
            whole, data = data[:end], data[end:]
            *blocks, tail = _SEPARATOR.split(whole) if b"\r" in whole else whole.split(b"\n\n")
            for block in blocks:
                if (found := self._block(block)) is not None:
                    yield found
                self._line += block.count(b"\n") + 2
            self._line += tail.count(b"\n")  # at most one more empty line
        self._rest = data
        if len(data) > self._most_bytes + _SLACK:
            self._let_go(data)

    def close(self) -> Iterator[Record | Broken]:
        """The last record, which needs no empty line after it."""
        data, self._rest = self._rest, b""
        if self._skipping is not None:
            yield self._too_large(self._skipping, data)
        elif (found := self._block(data)) is not None:
            yield found

    def abandon(self, reason: str) -> Iterator[Broken]:
        """What was read of a record whose end will never come."""
        data, self._rest = self._rest.strip(_LINE_ENDS), b""
        if self._skipping is not None:
            yield self._too_large(self._skipping, data)
        elif data:
            yield Broken(self._line, reason, data, len(data))

    def _block(self, block: bytes) -> Record | Broken | None:
        """What lies between two empty lines: a record, perhaps with comments or a version before it, or nothing."""
        if len(block) > self._most_bytes:
            body = block.lstrip(_LINE_ENDS)
            if len(body) > self._most_bytes:
                line = self._line + block.count(b"\n", 0, len(block) - len(body))
                return self._too_large(Broken(line, "", body[: self._kept_bytes], 0), body)
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
        except Malformed as error:
            return Broken(line, str(error), raw, len(raw))

    def _let_go(self, data: bytes) -> None:
        """Forget what was read of a record above the limit, but for what may be the beginning of its end."""
        if self._skipping is None:
            body = data.lstrip(_LINE_ENDS)
            line = self._line + data.count(b"\n", 0, len(data) - len(body))
            self._skipping = Broken(line, "", body[: self._kept_bytes], len(body) - len(data))
        gone, self._rest = data[:-2], data[-2:]
        self._line += gone.count(b"\n")
        known = self._skipping
        self._skipping = Broken(known.line, "", known.raw, known.size + len(gone))

    def _too_large(self, known: Broken, end: bytes) -> Broken:
        self._skipping = None
        return Broken(known.line, f"larger than {self._most_bytes} bytes", known.raw, known.size + len(end))


def read(chunks: Iterable[bytes], *, most_bytes: int = MOST_BYTES) -> Iterator[Record | Broken]:
    """All records of a stream that is at hand."""
    parser = Parser(most_bytes=most_bytes)
    for chunk in chunks:
        yield from parser.feed(chunk)
    yield from parser.close()


def _last_separator_end(data: bytes, start: int) -> int:
    """Where the last empty line of the data ends; 0 when there is none that ends behind the start."""
    plain = data.rfind(b"\n\n", start)
    carriage = data.rfind(b"\n\r\n", start)
    return max(plain + 2 if plain >= 0 else 0, carriage + 3 if carriage >= 0 else 0)


def _preamble(raw: bytes) -> tuple[int, int]:
    """How many bytes and lines before a record are empty lines, comments (with their folds) or the version."""
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

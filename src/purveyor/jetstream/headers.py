"""NATS header blocks: `NATS/1.0[ status[ text]]`, then `Name: value` lines, an empty line. Names may repeat."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from purveyor.model.errors import InvalidHeader
from purveyor.model.name_rules import check_header

MSG_ID = "Nats-Msg-Id"
EXPECTED_STREAM = "Nats-Expected-Stream"
EXPECTED_LAST_SEQUENCE = "Nats-Expected-Last-Sequence"
EXPECTED_LAST_SUBJECT_SEQUENCE = "Nats-Expected-Last-Subject-Sequence"
EXPECTED_LAST_MSG_ID = "Nats-Expected-Last-Msg-Id"
ROLLUP = "Nats-Rollup"
TTL = "Nats-TTL"
POSITION = "Purveyor-Position"
"""The position of a message in its origin. `append_once` writes it and reads it to find where to continue."""

MAX_HEADER_BLOCK_BYTES = 65_535
"""JetStream does not store a message with a larger header block."""
_VERSION = b"NATS/1.0"
_CRLF = b"\r\n"
_BLANK = " \t\n\r\v\f"
_MAX_NUMBER_LENGTH = 20

Headers = Mapping[str, tuple[str, ...]]
"""The headers of a message: each name with its values in order."""

HeadersIn = Mapping[str, str | Sequence[str]]
"""Headers that a caller passes: one value or several per name."""


class HeaderBlock(NamedTuple):
    """A parsed block: the status of a server's reply (0 on ordinary messages) and the headers."""

    status: int = 0
    description: str = ""
    headers: Headers = MappingProxyType({})


def normalise(headers: HeadersIn | None) -> dict[str, tuple[str, ...]]:
    """Return headers with a tuple of values per name; check names and values.

    >>> normalise({"Trace": "1", "Tag": ["a", "b"]})
    {'Trace': ('1',), 'Tag': ('a', 'b')}
    """
    result: dict[str, tuple[str, ...]] = {}
    for name, given in (headers or {}).items():
        values = (given,) if isinstance(given, str) else tuple(given)
        for value in values:
            if not isinstance(value, str):
                raise InvalidHeader(f"invalid value of header {name!r}: {type(value).__name__}", fix="give a string")
            check_header(name, value)
        result[name] = values
    return result


def encode(headers: Headers) -> bytes:
    """Return the header block for the wire."""
    lines = [_VERSION]
    lines += [f"{name}: {value}".encode() for name, values in headers.items() for value in values]
    return _CRLF.join(lines) + _CRLF + _CRLF


def decode(block: bytes) -> HeaderBlock:
    """Parse a header block; bytes that are not UTF-8 become surrogates."""
    first, *lines = block.decode("utf-8", "surrogateescape").split("\r\n")
    headers: dict[str, tuple[str, ...]] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            headers[name] = (*headers.get(name, ()), value.strip(_BLANK))
    if len(first) == len(_VERSION):
        return HeaderBlock(headers=headers)
    code, _, description = first[len(_VERSION) :].strip(_BLANK).partition(" ")
    return HeaderBlock(int(code) if code.isdecimal() else 0, description.strip(_BLANK), headers)


def first(headers: Headers, name: str) -> str | None:
    """Return the first value of a header, if there is one."""
    values = headers.get(name)
    return values[0] if values else None


def number(headers: Headers, name: str) -> int | None:
    """Return the first value of a header as an integer; None if it is missing, invalid or above 63 bits.

    >>> number({"Purveyor-Position": ("17",)}, POSITION), number({"Purveyor-Position": ("9" * 30,)}, POSITION)
    (17, None)
    """
    text = first(headers, name)
    if text is None or not 0 < len(text) < _MAX_NUMBER_LENGTH or not text.isascii() or not text.isdecimal():
        return None
    value = int(text)
    return value if value < 1 << 63 else None

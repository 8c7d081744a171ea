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
"""The place of a message in the order of its origin: `append_once` writes it, and finds by it where to go on."""
PARKED_POSITION = "Purveyor-Parked-Position"
"""The position of a dead letter that was parked out of order: `append_once` does not go by it."""
EVENT_ID = "Purveyor-Id"
"""The id that an event had when it was published, on its copies in other queues."""
LETTER = "Purveyor-Letter"
"""The dead letter that a message was before it was put back: its sequence in `stream:dead-letters`."""
CAME_ON = "Purveyor-Came-On"
"""Where a message that was put back lay at first: `main`, `prefill`, or `none` if it never was in the queue."""
RETRIES = "Purveyor-Retries"
"""How often a message was put back."""
FAILED_FIRST = "Purveyor-Failed-First"
"""When a message that was put back failed for the first time."""

LARGEST_BLOCK = 65_535
"""Bytes: JetStream stores no message whose header block is larger."""
_VERSION = b"NATS/1.0"
_CRLF = b"\r\n"
_BLANK = " \t\n\r\v\f"
_LONGEST_NUMBER = 20

Headers = Mapping[str, tuple[str, ...]]
"""What a message carries: each name with its values in order."""

HeadersIn = Mapping[str, str | Sequence[str]]
"""What a caller may give: one value or several."""


class HeaderBlock(NamedTuple):
    """A parsed block: the status of a server's answer (0 on ordinary messages) and the headers."""

    status: int = 0
    description: str = ""
    headers: Headers = MappingProxyType({})


def normalise(headers: HeadersIn | None) -> dict[str, tuple[str, ...]]:
    """One shape for what callers give; names and values are checked here, once.

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
    """The block as it goes over the wire."""
    lines = [_VERSION]
    lines += [f"{name}: {value}".encode() for name, values in headers.items() for value in values]
    return _CRLF.join(lines) + _CRLF + _CRLF


def decode(block: bytes) -> HeaderBlock:
    """Parse a block; bytes that are not UTF-8 are kept as surrogates rather than lost."""
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
    """The first value of a header, if there is one."""
    values = headers.get(name)
    return values[0] if values else None


def number(headers: Headers, name: str) -> int | None:
    """The first value of a header as a whole number; None if it is none, or more than 63 bits hold.

    >>> number({"Purveyor-Position": ("17",)}, POSITION), number({"Purveyor-Position": ("9" * 30,)}, POSITION)
    (17, None)
    """
    text = first(headers, name)
    if text is None or not 0 < len(text) < _LONGEST_NUMBER or not text.isascii() or not text.isdecimal():
        return None
    value = int(text)
    return value if value < 1 << 63 else None

"""BER as LDAP uses it (RFC 4511, 5.1): definite lengths, tags of one byte, primitive strings.

The decoder reads input of an untrusted server: whatever the bytes are, the result is a value or a `BerError`.
"""

from typing import Final

from purveyor.model.errors import PurveyorError

BOOLEAN: Final = 0x01
INTEGER: Final = 0x02
OCTET_STRING: Final = 0x04
ENUMERATED: Final = 0x0A
SEQUENCE: Final = 0x30
SET: Final = 0x31

MAX_NESTING: Final = 64
_MAX_LENGTH_OCTETS: Final = 8
_MAX_INTEGER_OCTETS: Final = 8


class BerError(PurveyorError):
    """Bytes that are no valid BER, or not the expected element."""


def encode_element(tag: int, content: bytes) -> bytes:
    r"""Return tag, length and content.

    >>> encode_element(OCTET_STRING, b"ab")
    b'\x04\x02ab'
    """
    length = len(content)
    if length < 0x80:
        return bytes((tag, length)) + content
    octets = length.to_bytes((length.bit_length() + 7) // 8, "big")
    return bytes((tag, 0x80 | len(octets))) + octets + content


def encode_sequence(*parts: bytes, tag: int = SEQUENCE) -> bytes:
    """Return a constructed element of encoded parts."""
    return encode_element(tag, b"".join(parts))


def encode_octets(value: bytes | str, *, tag: int = OCTET_STRING) -> bytes:
    """Return an octet string; text is encoded in UTF-8."""
    return encode_element(tag, value.encode() if isinstance(value, str) else value)


def encode_integer(value: int, *, tag: int = INTEGER) -> bytes:
    r"""Return an integer in the smallest two's complement.

    >>> encode_integer(128), encode_integer(-1, tag=ENUMERATED)
    (b'\x02\x02\x00\x80', b'\n\x01\xff')
    """
    size = (value if value >= 0 else ~value).bit_length() // 8 + 1
    return encode_element(tag, value.to_bytes(size, "big", signed=True))


def encode_boolean(value: bool, *, tag: int = BOOLEAN) -> bytes:
    """Return a boolean, TRUE as 0xFF (RFC 4511 requires it)."""
    return encode_element(tag, b"\xff" if value else b"\x00")


def read_header(data: bytes, at: int, end: int) -> tuple[int, int, int]:
    """Return the tag at an offset, and where its content begins and ends; BerError unless that is before `end`."""
    if at + 2 > end:
        raise BerError(f"BER ends at byte {end}, in the middle of an element that begins at byte {at}")
    tag, length = data[at], data[at + 1]
    if tag & 0x1F == 0x1F:
        raise BerError(f"BER tag of several bytes at byte {at}; LDAP has none")
    start = at + 2
    if length >= 0x80:
        count = length & 0x7F
        if count == 0:
            raise BerError(f"indefinite BER length at byte {at}; LDAP forbids it")
        if count > _MAX_LENGTH_OCTETS:
            raise BerError(f"BER length of {count} bytes at byte {at}")
        start += count
        if start > end:
            raise BerError(f"BER ends at byte {end}, in the middle of a length at byte {at}")
        length = int.from_bytes(data[at + 2 : start], "big")
    stop = start + length
    if stop > end:
        raise BerError(f"BER element at byte {at} has {length} bytes, but only {end - start} are there")
    return tag, start, stop


def measure_element(data: bytes | bytearray, at: int, *, tag: int, max_bytes: int) -> int | None:
    """Return the length of the element at an offset, header included, or None while its header is incomplete.

    The element itself may be incomplete. BerError at another tag, an indefinite length, or more than `max_bytes`.
    """
    available = len(data) - at
    if available >= 1 and data[at] != tag:
        raise BerError(f"BER tag 0x{data[at]:02x} where 0x{tag:02x} is expected")
    if available < 2:
        return None
    length, header = data[at + 1], 2
    if length >= 0x80:
        count = length & 0x7F
        if not 0 < count <= _MAX_LENGTH_OCTETS:
            raise BerError("indefinite BER length" if count == 0 else f"BER length of {count} bytes")
        header += count
        if available < header:
            return None
        length = int.from_bytes(data[at + 2 : at + header], "big")
    if header + length > max_bytes:
        raise BerError(f"BER element of {header + length} bytes, at most {max_bytes} are accepted")
    return header + length


class BerReader:
    """Reads elements one after the other from a part of some bytes."""

    __slots__ = ("_depth", "data", "end", "position")

    def __init__(self, data: bytes, position: int = 0, end: int | None = None, *, _depth: int = 0) -> None:
        self.data = data
        self.position = position
        self.end = len(data) if end is None else end
        self._depth = _depth

    @property
    def at_end(self) -> bool:
        """Whether no element is left."""
        return self.position >= self.end

    def next_tag(self) -> int | None:
        """Return the tag of the next element without reading it, or None at the end."""
        return self.data[self.position] if self.position < self.end else None

    def read_element(self) -> tuple[int, bytes]:
        """Return the tag and the content of the next element, whatever it is."""
        tag, start, stop = read_header(self.data, self.position, self.end)
        self.position = stop
        return tag, self.data[start:stop]

    def read_octets(self, tag: int = OCTET_STRING) -> bytes:
        """Return the content of the next element, which must have this tag."""
        start, stop = self._expect(tag)
        return self.data[start:stop]

    def read_text(self, tag: int = OCTET_STRING) -> str:
        """Return the next octet string as text; BerError unless it is UTF-8."""
        start, stop = self._expect(tag)
        return decode_text(self.data, start, stop)

    def read_integer(self, tag: int = INTEGER) -> int:
        """Return the next integer or enumerated value."""
        start, stop = self._expect(tag)
        if not 0 < stop - start <= _MAX_INTEGER_OCTETS:
            raise BerError(f"BER integer of {stop - start} bytes at byte {start}")
        return int.from_bytes(self.data[start:stop], "big", signed=True)

    def read_boolean(self, tag: int = BOOLEAN) -> bool:
        """Return the next boolean."""
        start, stop = self._expect(tag)
        if stop - start != 1:
            raise BerError(f"BER boolean of {stop - start} bytes at byte {start}")
        return self.data[start] != 0

    def enter(self, tag: int = SEQUENCE) -> "BerReader":
        """Return a reader of the parts of the next element, and go behind it."""
        start, stop = self._expect(tag)
        if self._depth >= MAX_NESTING:
            raise BerError(f"more than {MAX_NESTING} nested BER elements")
        return BerReader(self.data, start, stop, _depth=self._depth + 1)

    def expect_end(self) -> None:
        """Raise BerError if an element is left."""
        if self.position < self.end:
            raise BerError(f"{self.end - self.position} unexpected bytes at byte {self.position}")

    def _expect(self, tag: int) -> tuple[int, int]:
        found, start, stop = read_header(self.data, self.position, self.end)
        if found != tag:
            raise BerError(f"BER tag 0x{found:02x} at byte {self.position}, where 0x{tag:02x} is expected")
        self.position = stop
        return start, stop


def decode_text(data: bytes, start: int, stop: int) -> str:
    """Return a part of some bytes as text; BerError unless it is UTF-8."""
    try:
        return str(data[start:stop], "utf-8")
    except UnicodeDecodeError:
        raise BerError(f"text at byte {start} is not UTF-8") from None

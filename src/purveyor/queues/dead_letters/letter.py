"""Dead letters: messages that nobody could process, parked with the reason in the queue `dead-letters`.

The body of a dead letter is the original message's, untouched. What is known about it stands in headers:

| header | is |
|---|---|
| `Purveyor-Reason` | why, in words |
| `Purveyor-Origin` | the part or queue that gave up; also the last token of the subject |
| `Purveyor-Subject` | where the original came on |
| `Purveyor-Position` | its sequence in its stream |
| `Purveyor-Parked-Position` | the same, on a letter that was parked out of order: `append_once` does not go by it |
| `Purveyor-Attempts` | how often it was tried |
| `Purveyor-First-Error`, `Purveyor-Last-Error` | when it failed, in UTC |
| `Purveyor-Details` | more, as a JSON object |
| `Purveyor-Letter-Version` | the version of these headers (see `model.stored`) |
| `Purveyor-Original-<name>` | each header of the original, its id (`Nats-Msg-Id`) among them |
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, TypeAlias
from urllib.parse import quote

from purveyor.jetstream import headers as header_codec
from purveyor.jetstream.headers import LARGEST_BLOCK, MSG_ID, PARKED_POSITION, Headers
from purveyor.model.errors import InvalidInput
from purveyor.model.stored_record import VERSION, Kind
from purveyor.queues.catalogue import DEAD_LETTERS

if TYPE_CHECKING:
    from purveyor.jetstream.publisher import Receipt
    from purveyor.queues.client import Queues

Detail: TypeAlias = str | int | float | bool | None

_PREFIX = "Purveyor-"
_ORIGINAL = f"{_PREFIX}Original-"
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")
_HEADER_NAME = re.compile(r"[!-9;-~]+")
_SURROGATE = re.compile("[\ud800-\udfff]")
_VERSION = "Letter-Version"
_PARKED_POSITION = PARKED_POSITION.removeprefix(_PREFIX)
LETTER = Kind("dead letter")
_HEADER_ROOM = 512  # the id, what is expected, and the words about a cut
_LONGEST_REASON = 2000  # characters: a reason may quote a whole answer of somebody else
CUT = "cut_from_bytes"
"""The detail that tells how large a body was that no server would have taken whole."""
LEFT_OUT = "headers_left_out"
"""The detail that tells how many headers of the original no server would have taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A message given up. Times are aware."""

    reason: str
    origin: str
    subject: str
    data: bytes
    failed_first: datetime
    failed_last: datetime
    headers: Headers = field(default_factory=dict)
    position: int | None = None
    attempts: int = 1
    details: Mapping[str, Detail] = field(default_factory=dict)
    out_of_order: bool = False
    """Whether letters of earlier positions may still be written to the same subject by `append_once`."""

    @property
    def id(self) -> str:
        """Derived from where the message came from, not from when or why it failed: parked again, it is the same."""
        told = (self.origin, self.subject, self.position, header_codec.first(self.headers, MSG_ID))
        return hashlib.sha256(json.dumps(told).encode() + b"\n" + self.data).hexdigest()

    def to_message(self) -> tuple[str, bytes, Headers]:
        """Subject, body and headers of the message that it is parked as."""
        place = _PARKED_POSITION if self.out_of_order else "Position"
        fields = {
            "Reason": _one_line(self.reason)[:_LONGEST_REASON],
            "Origin": _one_line(self.origin),
            "Subject": _one_line(self.subject),
            place: None if self.position is None else str(self.position),
            "Attempts": str(self.attempts),
            "First-Error": self.failed_first.isoformat(),
            "Last-Error": self.failed_last.isoformat(),
            "Details": json.dumps(dict(self.details), sort_keys=True) if self.details else None,
            _VERSION: str(LETTER.version),
        }
        about = {f"{_PREFIX}{name}": (value,) for name, value in fields.items() if value is not None}
        kept = {f"{_ORIGINAL}{_name(name)}": tuple(map(_one_line, values)) for name, values in self.headers.items()}
        return f"dead-letters.{token(self.origin)}", self.data, about | kept

    @classmethod
    def from_message(cls, headers: Headers, data: bytes) -> "DeadLetter":
        """The letter that a message of the queue is; InvalidInput when it is none.

        UnreadableRecord when a newer program parked it.
        """
        _check_version(headers)

        def text(name: str) -> str | None:
            return header_codec.first(headers, f"{_PREFIX}{name}")

        try:
            parked_position = text(_PARKED_POSITION)
            position = text("Position") if parked_position is None else parked_position
            return cls(
                reason=text("Reason") or "",
                origin=text("Origin") or "",
                subject=text("Subject") or "",
                data=data,
                failed_first=datetime.fromisoformat(text("First-Error") or ""),
                failed_last=datetime.fromisoformat(text("Last-Error") or ""),
                headers={
                    name.removeprefix(_ORIGINAL): values
                    for name, values in headers.items()
                    if name.startswith(_ORIGINAL)
                },
                position=None if position is None else int(position),
                attempts=int(text("Attempts") or ""),
                details=dict(json.loads(text("Details") or "{}")),
                out_of_order=parked_position is not None,
            )
        except (ValueError, TypeError) as error:
            raise InvalidInput(f"not a dead letter: {error}", fix="who else writes to dead-letters.>?") from error


def _check_version(headers: Headers) -> None:
    """Raise UnreadableRecord for a version that is not known. Whoever passes a message on may add headers."""
    version = header_codec.first(headers, f"{_PREFIX}{_VERSION}")
    if version is not None:
        LETTER.check_version({VERSION: int(version) if version.isdecimal() else version})


async def park(queues: "Queues", letter: DeadLetter) -> "Receipt":
    """Store a dead letter; the queue has been ensured. Parked again within its window it is recognised as the same."""
    subject, data, headers = fitted(letter, queues.connection.max_payload)
    from purveyor.jetstream.publisher import Expect  # noqa: PLC0415 - an executor that writes letters in bulk needs no client

    expect = Expect(stream=DEAD_LETTERS.stream)
    return await queues.publish(subject, data, headers=dict(headers), msg_id=letter.id, expect=expect)


def fitted(letter: DeadLetter, max_payload: int) -> tuple[str, bytes, Headers]:
    """The message of a letter, so that a server takes it.

    Headers of the original are left out, the largest first, where all headers together would be too large. A body that
    would not fit any more with the headers added is cut. `details` says how much is missing: better than a message that
    can neither be processed nor parked.
    """
    letter = _with_fewer_headers(letter, min(max_payload // 2, LARGEST_BLOCK) - _HEADER_ROOM)
    subject, data, headers = letter.to_message()
    room = max_payload - len(header_codec.encode(headers)) - _HEADER_ROOM
    if len(data) > room:
        cut = dataclasses.replace(letter, details={**letter.details, CUT: len(data)})
        subject, data, headers = cut.to_message()
        data = data[: max(room, 0)]
    return subject, data, headers


def _with_fewer_headers(letter: DeadLetter, room: int) -> DeadLetter:
    size = len(header_codec.encode(letter.to_message()[2]))
    if size <= room:
        return letter
    kept, left = dict(letter.headers), 0
    for name in sorted(kept, key=lambda each: -sum(map(len, kept[each]))):
        if size <= room:
            break
        size -= sum(len(f"{_ORIGINAL}{_name(name)}: {_one_line(value)}\r\n".encode()) for value in kept.pop(name))
        left += 1
    return dataclasses.replace(letter, headers=kept, details={**letter.details, LEFT_OUT: left})


def subscription_origin(name: str) -> str:
    """The origin of what was in the queue of a subscription, and was rejected or delivered too often."""
    return f"subscription:{name}"


def token(text: str) -> str:
    """Any words as one token of a subject.

    >>> token("pipeline: transform"), token("stream:ox"), token("…")
    ('pipeline-transform', 'stream-ox', 'unnamed')
    """
    return _UNSAFE.sub("-", text).strip("-")[:64] or "unnamed"


def _one_line(text: str) -> str:
    """What a header can carry: no line breaks, and a mark for each byte that was not UTF-8 and each half surrogate."""
    readable = _SURROGATE.sub("\ufffd", text)
    return re.sub(r"[\r\n\0]+", " ", readable).strip()


def _name(name: str) -> str:
    """A header name that can be published: what may not stand in one is percent-encoded."""
    return name if _HEADER_NAME.fullmatch(name) else quote(name, errors="surrogatepass")

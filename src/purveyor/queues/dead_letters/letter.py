"""The format of dead letters: messages that could not be processed, parked with the reason in the queue `dead-letters`.

The body of a dead letter is the unchanged body of the original message. Headers describe it:

| header | meaning |
|---|---|
| `Purveyor-Reason` | why it could not be processed |
| `Purveyor-Origin` | the part or queue that gave it up; also the last token of the subject |
| `Purveyor-Subject` | the subject of the original |
| `Purveyor-Position` | its sequence in its stream |
| `Purveyor-Parked-Position` | the same, on a letter that was parked out of order: `append_once` ignores it |
| `Purveyor-Attempts` | the number of attempts |
| `Purveyor-First-Error`, `Purveyor-Last-Error` | the times of the first and last failure, in UTC |
| `Purveyor-Details` | more, as a JSON object |
| `Purveyor-Letter-Version` | the version of these headers (see `model.json_fields`) |
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
from purveyor.jetstream.headers import MAX_HEADER_BLOCK_BYTES, MSG_ID, Headers
from purveyor.model.errors import InvalidInput
from purveyor.model.json_fields import VERSION, Kind
from purveyor.model.message_headers import PARKED_POSITION
from purveyor.queues.catalogue import DEAD_LETTERS

if TYPE_CHECKING:
    from purveyor.jetstream.api import Receipt
    from purveyor.queues.client import Queues

Detail: TypeAlias = str | int | float | bool | None

_STREAM = DEAD_LETTERS.stream
_PREFIX = "Purveyor-"
_ORIGINAL = f"{_PREFIX}Original-"
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")
_HEADER_NAME = re.compile(r"[!-9;-~]+")
_SURROGATE = re.compile("[\ud800-\udfff]")
_VERSION = "Letter-Version"
LAST_ERROR = f"{_PREFIX}Last-Error"
_PARKED_POSITION = PARKED_POSITION.removeprefix(_PREFIX)
LETTER = Kind("dead letter")
_HEADER_RESERVE_BYTES = 512  # for the id, the expectations, and the details about a cut
_MAX_REASON_CHARACTERS = 2000  # characters: a reason may quote a long HTTP answer
CUT_FROM_BYTES = "cut_from_bytes"
"""The detail with the original size of a body that was too large for the server."""
HEADERS_LEFT_OUT = "headers_left_out"
"""The detail with the number of headers of the original that were too large for the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetter:
    """A message that could not be processed. Times have a time zone."""

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
        """The id, derived from the origin of the message, not from the failure: parked again, it has the same id."""
        identity = (self.origin, self.subject, self.position, header_codec.first(self.headers, MSG_ID))
        return hashlib.sha256(json.dumps(identity).encode() + b"\n" + self.data).hexdigest()

    def to_message(self) -> tuple[str, bytes, Headers]:
        """Return subject, body and headers of its message in the queue."""
        position_field = _PARKED_POSITION if self.out_of_order else "Position"
        fields = {
            "Reason": _one_line(self.reason)[:_MAX_REASON_CHARACTERS],
            "Origin": _one_line(self.origin),
            "Subject": _one_line(self.subject),
            position_field: None if self.position is None else str(self.position),
            "Attempts": str(self.attempts),
            "First-Error": self.failed_first.isoformat(),
            "Last-Error": self.failed_last.isoformat(),
            "Details": json.dumps(dict(self.details), sort_keys=True) if self.details else None,
            _VERSION: str(LETTER.version),
        }
        about = {f"{_PREFIX}{name}": (value,) for name, value in fields.items() if value is not None}
        kept = {
            f"{_ORIGINAL}{_header_name(name)}": tuple(map(_one_line, values)) for name, values in self.headers.items()
        }
        return f"dead-letters.{subject_token(self.origin)}", self.data, about | kept

    @classmethod
    def from_message(cls, headers: Headers, data: bytes) -> "DeadLetter":
        """Decode a message of the queue; InvalidInput if it is no dead letter.

        UnreadableRecord if a newer program parked it.
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
            raise InvalidInput(
                f"not a dead letter: {error}", fix="find out which other program writes to dead-letters.>"
            ) from error


def _check_version(headers: Headers) -> None:
    """Raise UnreadableRecord for an unknown version. Unknown headers are allowed: other programs may add them."""
    version = header_codec.first(headers, f"{_PREFIX}{_VERSION}")
    if version is not None:
        LETTER.check_version({VERSION: int(version) if version.isdecimal() else version})


async def park(queues: "Queues", letter: DeadLetter) -> "Receipt":
    """Store a dead letter; the queue must exist. The server recognises a repetition within its duplicate window."""
    subject, data, headers = fit_letter(letter, queues.connection.max_payload)
    from purveyor.jetstream.publisher import Expect  # noqa: PLC0415 - executors that write letters in bulk do not load the client

    expect = Expect(stream=_STREAM)
    return await queues.publish(subject, data, headers=dict(headers), msg_id=letter.id, expect=expect)


def fit_letter(letter: DeadLetter, max_payload: int) -> tuple[str, bytes, Headers]:
    """Return the message of a letter, reduced so that the server accepts it.

    If all headers together are too large, headers of the original are left out, the largest first. A body that does not
    fit together with the headers is cut. `details` says how much is missing. Otherwise the message could neither be
    processed nor parked.
    """
    letter = _with_fewer_headers(letter, min(max_payload // 2, MAX_HEADER_BLOCK_BYTES) - _HEADER_RESERVE_BYTES)
    subject, data, headers = letter.to_message()
    room = max_payload - len(header_codec.encode(headers)) - _HEADER_RESERVE_BYTES
    if len(data) > room:
        cut = dataclasses.replace(letter, details={**letter.details, CUT_FROM_BYTES: len(data)})
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
        size -= sum(
            len(f"{_ORIGINAL}{_header_name(name)}: {_one_line(value)}\r\n".encode()) for value in kept.pop(name)
        )
        left += 1
    return dataclasses.replace(letter, headers=kept, details={**letter.details, HEADERS_LEFT_OUT: left})


def subscription_origin(name: str) -> str:
    """Return the origin of messages that a subscription rejected or that were delivered too often."""
    return f"subscription:{name}"


def subject_token(text: str) -> str:
    """Convert any text to one token of a subject.

    >>> subject_token("pipeline: transform"), subject_token("stream:ox"), subject_token("…")
    ('pipeline-transform', 'stream-ox', 'unnamed')
    """
    return _UNSAFE.sub("-", text).strip("-")[:64] or "unnamed"


def _one_line(text: str) -> str:
    """Convert a text for a header: no line breaks, and a replacement character for each half of a surrogate pair."""
    readable = _SURROGATE.sub("\ufffd", text)
    return re.sub(r"[\r\n\0]+", " ", readable).strip()


def _header_name(name: str) -> str:
    """Return a valid header name: other characters are percent-encoded."""
    return name if _HEADER_NAME.fullmatch(name) else quote(name, errors="surrogatepass")

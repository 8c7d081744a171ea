"""Dead letters: messages that nobody could process, parked with the reason in the queue `dead-letters`.

The body of a dead letter is the original message's, untouched. What is known about it stands in headers:

| header | is |
|---|---|
| `Purveyor-Reason` | why, in words |
| `Purveyor-Origin` | the part or queue that gave up; also the last token of the subject |
| `Purveyor-Subject` | where the original came on |
| `Purveyor-Position` | its sequence in its stream |
| `Purveyor-Attempts` | how often it was tried |
| `Purveyor-First-Error`, `Purveyor-Last-Error` | when it failed, in UTC |
| `Purveyor-Details` | more, as a JSON object |
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

from purveyor.model.errors import InvalidInput
from purveyor.queues import headers as header_codec
from purveyor.queues.catalogue import DEAD_LETTERS
from purveyor.queues.headers import MSG_ID, Headers

if TYPE_CHECKING:
    from purveyor.queues.client import Queues
    from purveyor.queues.publisher import Receipt

Detail: TypeAlias = str | int | float | bool | None

_PREFIX = "Purveyor-"
_ORIGINAL = f"{_PREFIX}Original-"
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")
_HEADER_ROOM = 512  # the id, what is expected, and the words about a cut
_LONGEST_REASON = 2000  # characters: a reason may quote a whole answer of somebody else
CUT = "cut_from_bytes"
"""The detail that tells how large a body was that no server would have taken whole."""


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

    @property
    def id(self) -> str:
        """Derived from where the message came from, not from when or why it failed: parked again, it is the same."""
        told = (self.origin, self.subject, self.position, header_codec.first(self.headers, MSG_ID))
        return hashlib.sha256(json.dumps(told).encode() + b"\n" + self.data).hexdigest()

    def to_message(self) -> tuple[str, bytes, Headers]:
        """Subject, body and headers of the message that it is parked as."""
        fields = {
            "Reason": _one_line(self.reason)[:_LONGEST_REASON],
            "Origin": _one_line(self.origin),
            "Subject": _one_line(self.subject),
            "Position": None if self.position is None else str(self.position),
            "Attempts": str(self.attempts),
            "First-Error": self.failed_first.isoformat(),
            "Last-Error": self.failed_last.isoformat(),
            "Details": json.dumps(dict(self.details), sort_keys=True) if self.details else None,
        }
        about = {f"{_PREFIX}{name}": (value,) for name, value in fields.items() if value is not None}
        kept = {f"{_ORIGINAL}{name}": tuple(map(_one_line, values)) for name, values in self.headers.items()}
        return f"dead-letters.{token(self.origin)}", self.data, about | kept

    @classmethod
    def from_message(cls, headers: Headers, data: bytes) -> "DeadLetter":
        """The letter that a message of the queue is; InvalidInput when it is none."""

        def text(name: str) -> str | None:
            return header_codec.first(headers, f"{_PREFIX}{name}")

        try:
            position = text("Position")
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
            )
        except (ValueError, TypeError) as error:
            raise InvalidInput(f"not a dead letter: {error}", fix="who else writes to dead-letters.>?") from error


async def park(queues: "Queues", letter: DeadLetter) -> "Receipt":
    """Store a dead letter; the queue has been ensured. Parked again within its window it is recognised as the same."""
    subject, data, headers = fitted(letter, queues.connection.max_payload)
    from purveyor.queues.publisher import Expect  # noqa: PLC0415 - an executor that writes letters in bulk needs no client

    expect = Expect(stream=DEAD_LETTERS.stream)
    return await queues.publish(subject, data, headers=dict(headers), msg_id=letter.id, expect=expect)


def fitted(letter: DeadLetter, max_payload: int) -> tuple[str, bytes, Headers]:
    """The message of a letter, so that a server takes it.

    A body that would not fit any more with the headers added is cut, and `details` says from how much: better than
    a message that can neither be processed nor parked.
    """
    subject, data, headers = letter.to_message()
    room = max_payload - len(header_codec.encode(headers)) - _HEADER_ROOM
    if len(data) > room:
        cut = dataclasses.replace(letter, details={**letter.details, CUT: len(data)})
        subject, data, headers = cut.to_message()
        data = data[: max(room, 0)]
    return subject, data, headers


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
    """What a header can carry: no line breaks, and bytes that were not UTF-8 marked as such."""
    readable = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    return re.sub(r"[\r\n\0]+", " ", readable).strip()

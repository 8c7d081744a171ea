"""Messages as people look at them: read without being consumed, decoded as far as they can be. Nothing is taken."""

import json
from dataclasses import dataclass

from purveyor.app.console.formatting import moment, size
from purveyor.jetstream.direct_get import Page, Wanted, read_page
from purveyor.jetstream.maintenance import STREAM_PREFIX
from purveyor.jetstream.streams import StoredMessage
from purveyor.queues.catalogue import reserved_names
from purveyor.queues.client import Queues

PAGE = 20
_LONGEST_PREVIEW = 120
_OPEN = frozenset({"dead-letters"})
"""Internal queues that the API's own user may read."""


@dataclass(frozen=True, slots=True)
class Look:
    """Where to look: a queue, and from which sequence on."""

    queue: str
    begin: int = 1

    @property
    def needs_operator(self) -> bool:
        """Whether the API itself has no business in that queue."""
        return self.queue in reserved_names() - _OPEN


async def read(queues: Queues, look: Look) -> Page:
    """A page of messages by direct get: nobody's place in the queue changes."""
    return await read_page(
        queues, f"{STREAM_PREFIX}{look.queue}", Wanted(subject=">", from_sequence=look.begin, count=PAGE)
    )


def body(data: bytes) -> str:
    """The content, indented if it is JSON, else as text, else as bytes."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return f"{size(len(data))} that are no text:\n{data[:512].hex(' ')}{' ...' if len(data) > 512 else ''}"
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except ValueError:
        return text


def preview(data: bytes) -> str:
    """The content in a line."""
    text = " ".join(data[: 4 * _LONGEST_PREVIEW].decode(errors="replace").split())
    return text if len(text) <= _LONGEST_PREVIEW else f"{text[:_LONGEST_PREVIEW]}…"


def headers(message: StoredMessage) -> str:
    """The headers, one on a line."""
    return "\n".join(f"{name}: {value}" for name, values in sorted(message.headers.items()) for value in values)


def about(message: StoredMessage) -> list[tuple[str, str]]:
    """What is known about a message beside its content."""
    return [
        ("Sequence", str(message.sequence)),
        ("Subject", message.subject),
        ("Stored", moment(message.timestamp)),
        ("Size", size(len(message.data))),
    ]

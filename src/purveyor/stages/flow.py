"""What travels with a message beside its body: the trace, the state, and who waits for the reply. Pure.

| header | is |
|---|---|
| `Nats-Msg-Id` | which message it is: derived from the message that caused it, so that a repetition repeats it |
| `Purveyor-Key` | what it is about: order is kept by key |
| `Purveyor-Key-Json` | the same as JSON, for a key that a header cannot carry as it is: line breaks, blanks at an end |
| `Purveyor-Flow` | JSON: `trace`, `state` of the endpoint, `stack` of those who wait for a reply, `interactive` |

A request puts its own next stage and its state on the stack; a reply takes the topmost off, and goes there. A message
without these headers (published by hand, say) begins a flow.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final
from uuid import uuid4

from purveyor.jetstream.api_errors import HEADERS_TOO_LARGE, MESSAGE_TOO_LARGE
from purveyor.jetstream.bulk.publish.frame_builder import LONGEST_SUBJECT
from purveyor.jetstream.headers import LARGEST_BLOCK, MSG_ID, Headers, first
from purveyor.model.errors import InvalidInput, InvalidSubject, PublishRefused
from purveyor.model.name_rules import check_header, check_subject
from purveyor.model.tracing import Carrier

KEY: Final = "Purveyor-Key"
KEY_JSON: Final = "Purveyor-Key-Json"
FLOW: Final = "Purveyor-Flow"
NOT_STORABLE: Final = re.compile("[\0\ud800-\udfff]")
"""Characters that no text column can hold: NUL (on PostgreSQL), and half surrogates, which UTF-8 does not have."""
_NOT_IN_A_HEADER: Final = re.compile(r"[\r\n]|^[ \t\v\f]|[ \t\v\f]$")
"""What a header loses: readers take blanks off both ends of a value."""
_LONGEST_ID: Final = 600
"""Characters: 2,400 bytes at most, where an index of PostgreSQL takes entries of 2,700."""
_FRAME_BYTES: Final = len("NATS/1.0\r\n\r\n")
"""Of a block of headers without any."""


@dataclass(frozen=True, slots=True)
class Frame:
    """Somebody who waits for a reply: the subject it goes to, and the state that is theirs."""

    subject: str
    state: Any = None
    key: str | None = None
    """The key of the one who asked: its next stage stays in line with it."""


@dataclass(frozen=True, slots=True)
class Flow:
    """See the module."""

    trace: str
    state: Any = None
    stack: tuple[Frame, ...] = ()
    interactive: bool = False

    def to_header(self) -> str:
        """As JSON, in ASCII on one line."""
        value: dict[str, Any] = {"trace": self.trace}
        if self.state is not None:
            value["state"] = self.state
        if self.stack:
            value["stack"] = [[frame.subject, frame.state, frame.key] for frame in self.stack]
        if self.interactive:
            value["interactive"] = True
        return json.dumps(value, separators=(",", ":"))

    @classmethod
    def from_headers(cls, headers: Headers, message_id: str) -> "Flow":
        """The flow of a message; one that has none begins its own, and its id is the trace."""
        text = first(headers, FLOW)
        if text is None:
            return cls(trace=message_id)
        try:
            value = json.loads(text)
            return cls(
                trace=str(value["trace"]),
                state=value.get("state"),
                stack=tuple(_frame(*each) for each in value.get("stack", ())),
                interactive=bool(value.get("interactive", False)),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidInput(f"the header {FLOW} is not what a stage writes: {error!r}") from error

    def asking(self, frame: Frame, *, interactive: bool | None) -> "Flow":
        """For a request: somebody more waits."""
        return Flow(self.trace, None, (*self.stack, frame), self.interactive if interactive is None else interactive)

    def answering(self) -> tuple[Frame, "Flow"] | None:
        """For a reply: who gets it, and the flow as it goes on there; None when nobody waits."""
        if not self.stack:
            return None
        frame = self.stack[-1]
        return frame, replace(self, state=frame.state, stack=self.stack[:-1])


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to be sent: what a row of the outbox holds."""

    id: str
    subject: str
    data: bytes
    headers: Mapping[str, str]
    key: str | None = None

    def traced(self, trace: Carrier) -> "Outgoing":
        """The same, as a part of a trace; itself if there is none."""
        return replace(self, headers={**self.headers, **trace}) if trace else self

    def to_publish(self) -> tuple[str, bytes, Mapping[str, str], str]:
        """As the bulk path takes it."""
        return self.subject, self.data, self.headers, self.id


def message(message_id: str, subject: str, data: bytes, flow: Flow, key: str | None) -> Outgoing:
    """A message of a flow."""
    return Outgoing(message_id, subject, data, {FLOW: flow.to_header(), **key_header(key)}, key)


def key_header(key: str | None) -> dict[str, str]:
    r"""The header that carries a key.

    >>> key_header("user-1"), key_header("two\nlines")
    ({'Purveyor-Key': 'user-1'}, {'Purveyor-Key-Json': '"two\\nlines"'})
    """
    if key is None:
        return {}
    return {KEY_JSON: json.dumps(key)} if _NOT_IN_A_HEADER.search(key) else {KEY: key}


def key_of(headers: Headers) -> str | None:
    """The key of a message; None if it has none."""
    text = first(headers, KEY_JSON)
    if text is None:
        return first(headers, KEY)
    try:
        key = json.loads(text)
    except ValueError:
        return text  # written by somebody else: any text is a key
    return key if isinstance(key, str) else text


def check_sendable(message: Outgoing, max_payload: int) -> Outgoing:
    """The message, if the outbox can store it and a server with that limit takes it.

    Raises InvalidHeader, InvalidSubject or InvalidInput, or PublishRefused for a message that is too large.
    """
    if message.key is not None:
        _check_text("key", message.key)
    _check_text("subject", check_subject(message.subject))
    if len(message.subject.encode()) > LONGEST_SUBJECT:
        raise InvalidSubject(f"a subject of more than {LONGEST_SUBJECT} bytes", fix="shorten it")
    size = _FRAME_BYTES
    for name, value in (*message.headers.items(), (MSG_ID, message.id)):
        check_header(name, value)
        _check_text(f"value of header {name!r}", value)
        size += len(name) + len(value.encode()) + len(": \r\n")
    if size > LARGEST_BLOCK:
        raise PublishRefused(
            f"a message with {size} bytes of headers, the state and the key of its flow among them; the server takes "
            f"{LARGEST_BLOCK}",
            fix="keep less in the state, or put it into the database or the message",
            code=400,
            err_code=HEADERS_TOO_LARGE,
        )
    if size + len(message.data) > max_payload:
        raise PublishRefused(
            f"a message of {size + len(message.data)} bytes with its headers, the server takes {max_payload}",
            fix="send less, or raise max_payload of the server",
            code=400,
            err_code=MESSAGE_TOO_LARGE,
        )
    return message


def _check_text(what: str, text: str) -> None:
    bad = NOT_STORABLE.search(text)
    if bad is not None:
        name = "NUL" if bad[0] == "\0" else "half a surrogate pair"
        raise InvalidInput(f"the {what} holds {name}: {text[:100]!r}", fix="take it out")


def _frame(subject: str, state: Any, key: str | None) -> Frame:
    if not isinstance(key, str | None):
        raise TypeError(f"a key that is no text: {key!r}")
    return Frame(str(subject), state, key)


def derived_id(origin: str, cause: str, index: int) -> str:
    """The id of the nth message that a message causes at a stage: the same, however often it is processed."""
    told = "\0".join((origin, cause, str(index)))
    return hashlib.blake2b(told.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def new_id() -> str:
    """The id of a message that nothing caused."""
    return uuid4().hex


def identity(headers: Headers, stream: str, sequence: int, stamp: str) -> str:
    """Which message it is, for the inbox: its id, else the place and time at which it was stored.

    The time is part of it because an older store that is put back counts from there again. An id that the inbox cannot
    store (any bytes may be one, and an index entry has a limit) is replaced by its digest.
    """
    given = first(headers, MSG_ID)
    if given and (len(given) > _LONGEST_ID or NOT_STORABLE.search(given)):
        return f"digest:{hashlib.blake2b(given.encode('utf-8', 'surrogateescape'), digest_size=16).hexdigest()}"
    return given or f"{stream}:{sequence}:{stamp}"

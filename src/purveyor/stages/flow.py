"""The flow of a message and its headers, and the messages that a handler's result becomes. Pure.

| header | content |
|---|---|
| `Nats-Msg-Id` | the id of the message: derived from the message that caused it, so that a repetition has the same |
| `Purveyor-Key` | the key: stages keep the order by key |
| `Purveyor-Key-Json` | the key as JSON, if a header cannot carry it as it is: line breaks, blanks at an end |
| `Purveyor-Flow` | JSON: `trace`, `state` of the endpoint, `stack` of the stages that wait for a reply, `interactive` |

A request pushes the next stage of its endpoint and its state onto the stack; a reply pops the topmost entry, and goes
there. A message without these headers (published by hand, for example) begins a flow.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from purveyor.jetstream.api import HEADERS_TOO_LARGE, MESSAGE_TOO_LARGE
from purveyor.jetstream.bulk.publish.frame_builder import MAX_SUBJECT_BYTES
from purveyor.jetstream.headers import MAX_HEADER_BLOCK_BYTES, MSG_ID, Headers, first
from purveyor.model.errors import InvalidConfig, InvalidInput, InvalidSubject, PublishRefused
from purveyor.model.event import SUBJECT
from purveyor.model.message_headers import EVENT_ID
from purveyor.model.name_rules import check_header, check_subject
from purveyor.model.tracing import Carrier
from purveyor.queues.catalogue import stage_subject
from purveyor.stages.endpoint import Stage
from purveyor.stages.handler_types import (
    Context,
    Goto,
    NewFlow,
    Next,
    PublishedEvent,
    Reply,
    Request,
    Target,
    derived_id,
)
from purveyor.stages.message_codec import dump, to_json

KEY: Final = "Purveyor-Key"
KEY_JSON: Final = "Purveyor-Key-Json"
FLOW: Final = "Purveyor-Flow"
NOT_STORABLE: Final = re.compile("[\0\ud800-\udfff]")
"""Characters that no text column can hold: NUL (on PostgreSQL), and half surrogates, which UTF-8 does not have."""
_CHANGED_BY_A_HEADER: Final = re.compile(r"[\r\n]|^[ \t\v\f]|[ \t\v\f]$")
"""Text that a header does not keep: readers strip blanks from both ends of a value."""
_MAX_ID_CHARACTERS: Final = 600
"""2,400 bytes at most: an index of PostgreSQL takes entries of 2,700."""
_EMPTY_HEADER_BLOCK_BYTES: Final = len("NATS/1.0\r\n\r\n")


@dataclass(frozen=True, slots=True)
class Frame:
    """A stage that waits for a reply: the subject for the reply, and the state of its flow."""

    subject: str
    state: Any = None
    key: str | None = None
    """The key of the requester: its next stage keeps the order of that key."""


@dataclass(frozen=True, slots=True)
class Flow:
    """The content of the header `Purveyor-Flow`."""

    trace: str
    state: Any = None
    stack: tuple[Frame, ...] = ()
    interactive: bool = False

    def to_header(self) -> str:
        """Return the flow as JSON, in ASCII on one line."""
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
        """Return the flow of a message; without the header, a new flow that has the message id as its trace."""
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

    def for_request(self, frame: Frame, *, interactive: bool | None) -> "Flow":
        """Return the flow of a request: with one more frame on the stack."""
        return Flow(self.trace, None, (*self.stack, frame), self.interactive if interactive is None else interactive)

    def for_reply(self) -> tuple[Frame, "Flow"] | None:
        """Return the frame that gets a reply and the flow as it continues there; None with an empty stack."""
        if not self.stack:
            return None
        frame = self.stack[-1]
        return frame, replace(self, state=frame.state, stack=self.stack[:-1])


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to be sent: the content of a row of the outbox."""

    id: str
    subject: str
    data: bytes
    headers: Mapping[str, str]
    key: str | None = None

    def with_trace(self, trace: Carrier) -> "Outgoing":
        """Return the message with the headers of a trace; the message itself if the trace is empty."""
        return replace(self, headers={**self.headers, **trace}) if trace else self

    def to_publish(self) -> tuple[str, bytes, Mapping[str, str], str]:
        """Return the message in the form of the bulk path."""
        return self.subject, self.data, self.headers, self.id


def flow_message(message_id: str, subject: str, data: bytes, flow: Flow, key: str | None) -> Outgoing:
    """Return a message of a flow, with its headers."""
    return Outgoing(message_id, subject, data, {FLOW: flow.to_header(), **key_header(key)}, key)


# Results of handlers


def result_messages(stage: Stage, flow: Flow, context: Context[Any], result: object) -> list[Outgoing]:
    """Return all messages that one call of a handler causes: the flows that it began, its result, its events.

    The same call gives the same messages with the same ids.
    """
    parts = [_new_flow_parts(flow, context, new_flow) for new_flow in context.new_flows]
    parts += _result_parts(stage, flow, context, result)
    messages = [
        flow_message(derived_id(stage.id, context.message_id, index), subject, data, next_flow, key)
        for index, (subject, data, next_flow, key) in enumerate(parts)
    ]
    return [*messages, *map(event_message, context.events)]


def event_message(published: PublishedEvent) -> Outgoing:
    """Return an event as a message for the queue `incoming`. No other writer of the queue has ids of this form."""
    message_id, headers = f"stage-event:{published.id}", {EVENT_ID: published.id}
    return Outgoing(message_id, SUBJECT, published.data, headers, published.event.object_key)


def first_message(new_flow: NewFlow, message_id: str, trace: str) -> Outgoing:
    """Return the message that begins a flow outside of any stage."""
    interactive = bool(new_flow.interactive)
    stack = _reply_stack(new_flow.reply_to, new_flow.state, new_flow.key, interactive=interactive)
    flow = Flow(trace, None, stack, interactive)
    data = _encode_request(new_flow.to, new_flow.message)
    return flow_message(message_id, _first_subject(new_flow.to, flow), data, flow, new_flow.key)


_MessageParts = tuple[str, bytes, Flow, str | None]
"""Subject, data, flow and key."""


def _result_parts(stage: Stage, flow: Flow, context: Context[Any], result: object) -> Iterator[_MessageParts]:
    if stage.last and not isinstance(result, Reply | Goto):
        result = Reply(result)
    match result:
        case None:
            return
        case Reply():
            waiting = flow.for_reply()
            if waiting is not None:
                frame, next_flow = waiting
                yield frame.subject, dump(result.message), next_flow, frame.key
        case Goto():
            next_flow = Flow(flow.trace, None, flow.stack, flow.interactive)
            key = context.key if result.key is None else result.key
            yield _first_subject(result.to, next_flow), _encode_request(result.to, result.message), next_flow, key
        case Next():
            next_flow = Flow(flow.trace, to_json(context.state), flow.stack, flow.interactive)
            yield _next_subject(stage, flow), dump(result.message), next_flow, context.key
        case Request():
            frame = Frame(_next_subject(stage, flow), to_json(context.state), context.key)
            next_flow = flow.for_request(frame, interactive=result.interactive)
            key = context.key if result.key is None else result.key
            yield _first_subject(result.to, next_flow), _encode_request(result.to, result.message), next_flow, key
        case _:
            raise InvalidConfig(
                f"stage {stage.number} of {stage.endpoint!r} returned a {type(result).__name__}",
                fix="return Request, Next, Goto, Reply or None; only the last stage returns the reply itself",
            )


def _new_flow_parts(flow: Flow, context: Context[Any], new_flow: NewFlow) -> _MessageParts:
    interactive = flow.interactive if new_flow.interactive is None else new_flow.interactive
    key = context.key if new_flow.key is None else new_flow.key
    stack = _reply_stack(new_flow.reply_to, new_flow.state, key, interactive=interactive)
    begun = Flow(flow.trace, None, stack, interactive)
    return _first_subject(new_flow.to, begun), _encode_request(new_flow.to, new_flow.message), begun, key


def _reply_stack(
    reply_to: Target[Any, Any] | None, state: object, key: str | None, *, interactive: bool
) -> tuple[Frame, ...]:
    if reply_to is None:
        return ()
    return (Frame(stage_subject(reply_to.name, 0, interactive=interactive), to_json(state), key),)


def _first_subject(to: Target[Any, Any], flow: Flow) -> str:
    return stage_subject(to.name, 0, interactive=flow.interactive)


def _next_subject(stage: Stage, flow: Flow) -> str:
    if stage.last:
        raise InvalidConfig(f"the last stage of {stage.endpoint!r} has none after it", fix="return the reply")
    return stage_subject(stage.endpoint, stage.number + 1, interactive=flow.interactive)


def _encode_request(to: Target[Any, Any], value: object) -> bytes:
    """Return a request as JSON; InvalidInput when the endpoint takes another type."""
    wanted: Any = to.request  # a type by its annotation, but isinstance takes no `list[int]`
    if isinstance(wanted, type) and not isinstance(value, wanted):
        raise InvalidInput(f"endpoint {to.name!r} takes {wanted.__name__}, not {type(value).__name__}", fix="send that")
    return dump(value)


# Keys, ids and limits


def key_header(key: str | None) -> dict[str, str]:
    r"""Return the header that carries a key.

    >>> key_header("user-1"), key_header("two\nlines")
    ({'Purveyor-Key': 'user-1'}, {'Purveyor-Key-Json': '"two\\nlines"'})
    """
    if key is None:
        return {}
    return {KEY_JSON: json.dumps(key)} if _CHANGED_BY_A_HEADER.search(key) else {KEY: key}


def read_key(headers: Headers) -> str | None:
    """Return the key of a message; None if it has none."""
    text = first(headers, KEY_JSON)
    if text is None:
        return first(headers, KEY)
    try:
        key = json.loads(text)
    except ValueError:
        return text  # another program wrote it: any text is a key
    return key if isinstance(key, str) else text


def check_sendable(message: Outgoing, max_payload: int) -> Outgoing:
    """Return the message, if the outbox can store it and a server with that limit takes it.

    Raises InvalidHeader, InvalidSubject or InvalidInput, or PublishRefused for a message that is too large.
    """
    if message.key is not None:
        _check_text("key", message.key)
    _check_text("subject", check_subject(message.subject))
    if len(message.subject.encode()) > MAX_SUBJECT_BYTES:
        raise InvalidSubject(f"a subject of more than {MAX_SUBJECT_BYTES} bytes", fix="shorten it")
    size = _EMPTY_HEADER_BLOCK_BYTES
    for name, value in (*message.headers.items(), (MSG_ID, message.id)):
        check_header(name, value)
        _check_text(f"value of header {name!r}", value)
        size += len(name) + len(value.encode()) + len(": \r\n")
    if size > MAX_HEADER_BLOCK_BYTES:
        raise PublishRefused(
            f"a message with {size} bytes of headers, the state and the key of its flow among them; the server takes "
            f"{MAX_HEADER_BLOCK_BYTES}",
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


def message_identity(headers: Headers, stream: str, sequence: int, stamp: str) -> str:
    """Return the id of a message in the inbox: its message id, else its stream, sequence and time of storage.

    The time is part of it because a broker with a restored older store gives the same sequences again. A digest
    replaces an id that the inbox cannot store (any bytes may be one, and an index entry has a limit).
    """
    given = first(headers, MSG_ID)
    if given and (len(given) > _MAX_ID_CHARACTERS or NOT_STORABLE.search(given)):
        return f"digest:{hashlib.blake2b(given.encode('utf-8', 'surrogateescape'), digest_size=16).hexdigest()}"
    return given or f"{stream}:{sequence}:{stamp}"

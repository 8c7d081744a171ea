"""What travels with a message beside its body: the trace, the state, and who waits for the reply. Pure.

| header | is |
|---|---|
| `Nats-Msg-Id` | which message it is: derived from the message that caused it, so that a repetition repeats it |
| `Purveyor-Key` | what it is about: order is kept by key |
| `Purveyor-Flow` | JSON: `trace`, `state` of the endpoint, `stack` of those who wait for a reply, `interactive` |

A request puts its own next stage and its state on the stack; a reply takes the topmost off, and goes there. A message
without these headers (published by hand, say) begins a flow.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final
from uuid import uuid4

from purveyor.model.errors import InvalidInput
from purveyor.model.tracing import Carrier
from purveyor.queues.headers import MSG_ID, Headers, first

KEY: Final = "Purveyor-Key"
FLOW: Final = "Purveyor-Flow"


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
                stack=tuple(Frame(str(subject), state, key) for subject, state, key in value.get("stack", ())),
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
    headers = {FLOW: flow.to_header()}
    if key is not None:
        headers[KEY] = key
    return Outgoing(message_id, subject, data, headers, key)


def derived_id(origin: str, cause: str, index: int) -> str:
    """The id of the nth message that a message causes at a stage: the same, however often it is processed."""
    told = "\0".join((origin, cause, str(index)))
    return hashlib.blake2b(told.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def new_id() -> str:
    """The id of a message that nothing caused."""
    return uuid4().hex


def identity(headers: Headers, stream: str, sequence: int, stamp: str) -> str:
    """Which message it is, for the inbox: its id, else the place and time at which it was stored.

    The time is part of it because an older store that is put back counts from there again.
    """
    return first(headers, MSG_ID) or f"{stream}:{sequence}:{stamp}"

"""The types of a handler: what it gets (`Context`) and what it may return (`Request`, `Reply`, `Next`, `Goto`).

The returned value says what the flow does next. A stage sends nothing before the handler's transaction is committed.
"""

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Generic, TypeAlias, TypeVar
from uuid import uuid4

from purveyor.model.errors import InvalidInput, PurveyorError
from purveyor.model.event import Event, check_event, check_event_id, check_event_size


def derived_id(origin: str, cause: str, index: int) -> str:
    """Return the id of the nth message that a message causes at a stage: the same each time it is processed."""
    text = "\0".join((origin, cause, str(index)))
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()


def new_id() -> str:
    """Return the id of a message that no other message caused."""
    return uuid4().hex


Q = TypeVar("Q")
R = TypeVar("R")
S = TypeVar("S")


_DEFAULT_MAX_PAYLOAD_BYTES: Final = 1 << 20


class DatabaseKind(Enum):
    """The database object that a handler asks for by the type of its third parameter."""

    NONE = "none"
    SESSION = "AsyncSession"
    CONNECTION = "AsyncConnection"
    PSYCOPG = "psycopg.AsyncConnection"


class Target(Generic[Q, R]):
    """An endpoint as its senders see it: its name, the type of its request and of its reply."""

    def __init__(self, name: str, request: type[Q], reply: type[R]) -> None:
        self.name = name
        self.request = request
        self.reply = reply

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


@dataclass(frozen=True, slots=True, init=False)
class Request(Generic[R]):
    """Send a request to another endpoint; its reply, an R, arrives at the next stage of this endpoint."""

    to: Target[Any, R]
    message: object
    key: str | None
    interactive: bool | None

    def __init__(
        self, to: Target[Q, R], message: Q, *, key: str | None = None, interactive: bool | None = None
    ) -> None:
        _set(self, to=to, message=message, key=key, interactive=interactive)


@dataclass(frozen=True, slots=True)
class Reply(Generic[R]):
    """End this endpoint here, with a reply to the requester."""

    message: R


@dataclass(frozen=True, slots=True)
class Next(Generic[Q]):
    """Continue with the next stage, without a request to another endpoint."""

    message: Q


@dataclass(frozen=True, slots=True, init=False)
class Goto(Generic[R]):
    """Continue at another endpoint: its reply, an R, goes to the requester of this endpoint."""

    to: Target[Any, R]
    message: object
    key: str | None

    def __init__(self, to: Target[Q, R], message: Q, *, key: str | None = None) -> None:
        _set(self, to=to, message=message, key=key)


class Refuse(PurveyorError):
    """Raised by a handler for a message that no retry can process: it becomes a dead letter at once.

    The stage rolls back everything that the handler did.
    """


@dataclass(frozen=True, slots=True)
class NewFlow:
    """A message that begins a flow: sent by a handler beside its result, or from outside of any stage."""

    to: Target[Any, Any]
    message: object
    key: str | None
    interactive: bool | None
    reply_to: Target[Any, Any] | None
    state: object


@dataclass(frozen=True, slots=True)
class PublishedEvent:
    """An event that a handler published: checked, with its id and the body of its message."""

    id: str
    event: Event
    data: bytes


def checked_event(given: object, identity: str, max_payload: int) -> PublishedEvent:
    """Return an event to publish; InvalidInput names the wrong field."""
    event, data = check_event(given)
    check_event_size(data, max_payload)
    return PublishedEvent(check_event_id(identity), event, data)


AfterCommit: TypeAlias = Callable[[], None] | Callable[[], Awaitable[None]]


@dataclass(slots=True)
class Context(Generic[S]):
    """The message's surroundings, passed to a handler.

    `state` travels with the flow from stage to stage of the endpoint: the next handler gets it as this one leaves it.
    """

    state: S
    endpoint: str
    stage: int
    message_id: str
    trace_id: str
    key: str | None = None
    interactive: bool = False
    attempt: int = 1
    """1 at the first delivery; more after a failure, a crash, or a stop."""
    trace: Mapping[str, str] = field(default_factory=dict)
    """The headers `traceparent` and `tracestate` of this call, for further requests; empty without a trace."""
    new_flows: list[NewFlow] = field(default_factory=list, repr=False)
    callbacks: list[AfterCommit] = field(default_factory=list, repr=False)
    events: list[PublishedEvent] = field(default_factory=list, repr=False)
    max_payload: int = field(default=_DEFAULT_MAX_PAYLOAD_BYTES, repr=False)
    """The size of the largest message that the server takes."""

    def send(  # noqa: PLR0913 - each is a property of the message
        self,
        to: Target[Q, R],
        message: Q,
        *,
        key: str | None = None,
        interactive: bool | None = None,
        reply_to: Target[R, Any] | None = None,
        state: object = None,
    ) -> None:
        """Begin another flow: the stage stores the message in this transaction and sends it after the commit.

        A handler may call this any number of times. Without a `key` the message gets the key of this one. The reply of
        the other endpoint goes to `reply_to`, with `state`; without `reply_to` the stage drops it.
        """
        self.new_flows.append(NewFlow(to, message, key, interactive, reply_to, state))

    async def publish(self, event: Event) -> str:
        """Publish an event to all subscribers: the stage stores it in this transaction and sends it after the commit.

        Returns the id of the event, which derives from this message and the number of the call. An event beyond the
        limits of the HTTP API raises Refuse, which names the field: no retry can publish it.
        """
        identity = derived_id(f"{self.endpoint}.{self.stage} publishes", self.message_id, len(self.events))
        try:
            self.events.append(checked_event(event, identity, self.max_payload))
        except InvalidInput as error:
            raise Refuse(f"the event cannot be published: {error.message}", fix=error.fix) from error
        return identity

    def after_commit(self, callback: AfterCommit) -> None:
        """Call this after the commit. A crash can prevent the call, so use it for caches and notifications only."""
        self.callbacks.append(callback)


StageResult: TypeAlias = Request[Any] | Next[Any] | Goto[R] | Reply[R] | None
"""The possible results of a stage that is not the last; None ends the flow here, without a reply."""


def _set(frozen: object, **values: object) -> None:
    for name, value in values.items():
        object.__setattr__(frozen, name, value)

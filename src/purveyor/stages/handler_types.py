"""The words of a handler: what it is given (`Context`) and what it can return (`Request`, `Reply`, `Next`, `Goto`).

A returned value says what the flow does next; nothing is sent before the handler's transaction is committed.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from purveyor.model.errors import PurveyorError

Q = TypeVar("Q")
R = TypeVar("R")
S = TypeVar("S")


class Target(Generic[Q, R]):
    """An endpoint as those see it who send to it: its name, what it takes and what it replies."""

    def __init__(self, name: str, request: type[Q], reply: type[R]) -> None:
        self.name = name
        self.request = request
        self.reply = reply

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"


@dataclass(frozen=True, slots=True, init=False)
class Request(Generic[R]):
    """Ask another endpoint; its reply, an R, arrives at the next stage of this one."""

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
    """End this endpoint here, with a reply to whoever asked."""

    message: R


@dataclass(frozen=True, slots=True)
class Next(Generic[Q]):
    """Go on with the next stage, without asking anybody."""

    message: Q


@dataclass(frozen=True, slots=True, init=False)
class Goto(Generic[R]):
    """Hand the flow over to another endpoint: what it replies, an R, goes to whoever asked this one."""

    to: Target[Any, R]
    message: object
    key: str | None

    def __init__(self, to: Target[Q, R], message: Q, *, key: str | None = None) -> None:
        _set(self, to=to, message=message, key=key)


class Refuse(PurveyorError):
    """Raised by a handler for a message that no other attempt can help: it becomes a dead letter at once.

    Everything the handler did is rolled back.
    """


@dataclass(frozen=True, slots=True)
class Sent:
    """A message that a handler sends beside what it returns; a flow of its own, with the trace of this one."""

    to: Target[Any, Any]
    message: object
    key: str | None
    interactive: bool | None
    reply_to: Target[Any, Any] | None
    state: object


AfterCommit: TypeAlias = Callable[[], None] | Callable[[], Awaitable[None]]


@dataclass(slots=True)
class Context(Generic[S]):
    """What a handler is given beside its message.

    `state` travels with the flow from stage to stage of the endpoint; what a handler changes in it, the next sees.
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
    """The headers `traceparent` and `tracestate` of this call, for requests to others; empty without a trace."""
    sends: list[Sent] = field(default_factory=list, repr=False)
    callbacks: list[AfterCommit] = field(default_factory=list, repr=False)

    def send(  # noqa: PLR0913 - each is a word about the message
        self,
        to: Target[Q, R],
        message: Q,
        *,
        key: str | None = None,
        interactive: bool | None = None,
        reply_to: Target[R, Any] | None = None,
        state: object = None,
    ) -> None:
        """Start another flow with this transaction: stored with it, sent after it. As many as you like.

        The key is that of this message unless another is given. What the other endpoint replies goes to `reply_to`,
        with `state`, or to nobody.
        """
        self.sends.append(Sent(to, message, key, interactive, reply_to, state))

    def after_commit(self, callback: AfterCommit) -> None:
        """Call this when the transaction is committed. Not after a crash: for caches and bells, not for promises."""
        self.callbacks.append(callback)


StageResult: TypeAlias = Request[Any] | Next[Any] | Goto[R] | Reply[R] | None
"""What a stage that is not the last may return; None lets the flow end here, without a reply."""


def _set(frozen: object, **values: object) -> None:
    for name, value in values.items():
        object.__setattr__(frozen, name, value)

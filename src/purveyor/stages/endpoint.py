"""Endpoints and their stages as the user declares them: options, decorators, and the annotations of the handlers.

A mistake in a declaration is reported at the import of the module or at the start of the stages, not by a message.
"""

import inspect
import typing
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Concatenate, Final, Generic, ParamSpec, Protocol, TypeAlias, TypeVar, overload

from psycopg import AsyncConnection as Psycopg
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from purveyor.model.errors import InvalidConfig
from purveyor.model.retries import Backoff
from purveyor.queues.catalogue import check_endpoint
from purveyor.stages.handler_types import Context, DatabaseKind, Next, Request, StageResult, Target
from purveyor.stages.message_codec import decoder_for

_EXTRA_DELIVERIES: Final = 30
"""Deliveries beyond the attempts before a message without any outcome is given up."""
_MAX_CONCURRENCY: Final = 256
Q = TypeVar("Q")
R = TypeVar("R")
S = TypeVar("S")
P = ParamSpec("P")

Handler: TypeAlias = Callable[..., Awaitable[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """The attempts, their delays, and whether other messages wait meanwhile: `Retry.in_order` or `Retry.parallel`."""

    ordered: bool
    """While a message waits for its next attempt, those behind it with the same key (or all, without keys) wait too."""
    attempts: int = 7
    """All attempts together: 1 and 6 more by default."""
    first_delay: timedelta = timedelta(milliseconds=500)
    max_delay: timedelta = timedelta(minutes=1)

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise InvalidConfig(f"{self.attempts} attempts", fix="give 1 or more")
        if self.first_delay < timedelta(0) or self.max_delay < self.first_delay:
            raise InvalidConfig("the delays between attempts must grow", fix="0 <= first_delay <= max_delay")

    @classmethod
    def in_order(
        cls,
        *,
        attempts: int = 7,
        first_delay: timedelta = timedelta(milliseconds=500),
        max_delay: timedelta = timedelta(minutes=1),
    ) -> "Retry":
        """Keep the order: a failed message blocks its key, or the stage when messages have no key.

        One instance works at a time, on up to `concurrency` keys at once. The other instances wait to take over.
        """
        return cls(ordered=True, attempts=attempts, first_delay=first_delay, max_delay=max_delay)

    @classmethod
    def parallel(
        cls,
        *,
        attempts: int = 7,
        first_delay: timedelta = timedelta(milliseconds=500),
        max_delay: timedelta = timedelta(minutes=1),
    ) -> "Retry":
        """Block no other message: a failed one is delivered again later, to any instance."""
        return cls(ordered=False, attempts=attempts, first_delay=first_delay, max_delay=max_delay)

    def after(self, failures: int) -> timedelta | None:
        """Return the delay after that many failures; None when it was the last attempt.

        >>> [Retry.parallel(attempts=4).after(failures) for failures in (1, 2, 4)]
        [datetime.timedelta(microseconds=500000), datetime.timedelta(seconds=1), None]
        """
        if failures >= self.attempts:
            return None
        backoff = Backoff(self.first_delay.total_seconds(), self.max_delay.total_seconds())
        return timedelta(seconds=backoff.delay_seconds(failures))

    def is_exhausted(self, deliveries: int) -> bool:
        """Whether the broker delivered a message too often without any outcome: it probably kills its process."""
        return deliveries > self.attempts + _EXTRA_DELIVERIES


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    """The options of one stage; `Endpoint.stage` explains them."""

    exactly_once: bool = False
    retry: Retry = field(default_factory=Retry.parallel)
    concurrency: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.concurrency <= _MAX_CONCURRENCY:
            raise InvalidConfig(f"a concurrency of {self.concurrency}", fix=f"give 1 to {_MAX_CONCURRENCY}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The times of an application with stages; the defaults are for production."""

    ack_wait: timedelta = timedelta(seconds=30)
    """How long after a crash the broker delivers its messages again."""
    grace: timedelta = timedelta(seconds=3)
    """How long the new owner of a stage in order waits after an owner that did not sign off and may still be alive."""
    outbox_kept: timedelta = timedelta(days=7)
    """How long a replay can send the messages of the outbox again."""
    inbox_kept: timedelta = timedelta(days=30)
    """How long the inbox knows a processed message at least: longer than a sender may be down before it resends."""
    upkeep: timedelta = timedelta(minutes=1)
    """The interval between two cleanups of inbox and outbox."""

    def __post_init__(self) -> None:
        if self.inbox_kept < self.outbox_kept:
            raise InvalidConfig(
                f"the inbox is kept for {self.inbox_kept}, and the outbox, which can be replayed, for "
                f"{self.outbox_kept}",
                fix="keep the inbox at least as long as the outbox",
            )
        if self.ack_wait <= timedelta(0):
            raise InvalidConfig("ack_wait must be longer than 0", fix="leave it at its default")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of an endpoint."""

    endpoint: str
    number: int
    handler: Handler
    message: Any
    """The type that the handler takes."""
    state: Any
    database: DatabaseKind
    """The database object that the handler takes."""
    options: StageOptions
    last: bool

    @property
    def id(self) -> str:
        """The name of the stage in inbox, failures and dead letters."""
        return f"{self.endpoint}.{self.number}"


class StageDecorator(Protocol[S, R]):
    """The result of `stage(...)`: takes a handler and returns it unchanged."""

    def __call__(
        self, handler: Callable[Concatenate[Context[S], P], Awaitable[StageResult[R]]], /
    ) -> Callable[Concatenate[Context[S], P], Awaitable[StageResult[R]]]:
        """Add the handler."""


class LastStageDecorator(Protocol[S, R]):
    """The result of `last_stage(...)`."""

    def __call__(
        self, handler: Callable[Concatenate[Context[S], P], Awaitable[R]], /
    ) -> Callable[Concatenate[Context[S], P], Awaitable[R]]:
        """Add the handler."""


class Endpoint(Target[Q, R], Generic[Q, R, S]):
    """An endpoint of this application: the types of its request, reply and state, and its stages."""

    def __init__(self, name: str, request: type[Q], reply: type[R], state: type[S]) -> None:
        super().__init__(check_endpoint(name), request, reply)
        self.state = state
        self.stages: list[Stage] = []
        kinds: tuple[Any, ...] = (request, reply, state)
        for kind in kinds:
            decoder_for(kind)

    @overload
    def stage(
        self, handler: Callable[Concatenate[Context[S], P], Awaitable[StageResult[R]]], /
    ) -> Callable[Concatenate[Context[S], P], Awaitable[StageResult[R]]]: ...

    @overload
    def stage(
        self, handler: None = None, /, *, exactly_once: bool = ..., retry: Retry | None = ..., concurrency: int = ...
    ) -> "StageDecorator[S, R]": ...

    def stage(
        self,
        handler: Any = None,
        /,
        *,
        exactly_once: bool = False,
        retry: Retry | None = None,
        concurrency: int = 1,
    ) -> Any:
        """Declare the next stage; decorates `async def (ctx, message, db) -> Request | Next | Goto | Reply | None`.

        `exactly_once` runs it with inbox and outbox; without, a crash after the commit and before the acknowledgement
        makes it run twice. `retry` is `Retry.parallel()` or `Retry.in_order()`; `concurrency` is the number of handlers
        that run at once in this process. `db` may be left out; its annotation chooses the database object.
        """
        options = StageOptions(exactly_once=exactly_once, retry=retry or Retry.parallel(), concurrency=concurrency)
        return self._decorator(handler, options, last=False)

    @overload
    def last_stage(
        self, handler: Callable[Concatenate[Context[S], P], Awaitable[R]], /
    ) -> Callable[Concatenate[Context[S], P], Awaitable[R]]: ...

    @overload
    def last_stage(
        self, handler: None = None, /, *, exactly_once: bool = ..., retry: Retry | None = ..., concurrency: int = ...
    ) -> "LastStageDecorator[S, R]": ...

    def last_stage(
        self,
        handler: Any = None,
        /,
        *,
        exactly_once: bool = False,
        retry: Retry | None = None,
        concurrency: int = 1,
    ) -> Any:
        """Declare the last stage (or the only one): its result is the reply of the endpoint. Otherwise like `stage`."""
        options = StageOptions(exactly_once=exactly_once, retry=retry or Retry.parallel(), concurrency=concurrency)
        return self._decorator(handler, options, last=True)

    def _decorator(self, handler: Handler | None, options: StageOptions, *, last: bool) -> Any:
        def add(found: Handler) -> Handler:
            if self.stages and self.stages[-1].last:
                raise InvalidConfig(f"endpoint {self.name!r} has its last stage already", fix="move the decorator up")
            message, database = _read_signature(found)
            if not self.stages and message != self.request:
                raise InvalidConfig(
                    f"endpoint {self.name!r} takes {_name(self.request)}, and its first stage {_name(message)}",
                    fix="make them the same",
                )
            self.stages.append(
                Stage(
                    endpoint=self.name,
                    number=len(self.stages),
                    handler=found,
                    message=message,
                    state=self.state,
                    database=database,
                    options=options,
                    last=last,
                )
            )
            return found

        return add if handler is None else add(handler)

    def check(self) -> None:
        """Raise InvalidConfig unless it has a last stage and each stage takes the type that the one before passes."""
        if not self.stages or not self.stages[-1].last:
            raise InvalidConfig(f"endpoint {self.name!r} has no last stage", fix="end it with @endpoint.last_stage")
        for before, after in zip(self.stages, self.stages[1:], strict=False):
            for passed in _types_passed_on(before.handler):
                if Any not in (passed, after.message) and passed not in (
                    after.message,
                    *typing.get_args(after.message),
                ):
                    raise InvalidConfig(
                        f"stage {before.number} of {self.name!r} leads to {_name(passed)}, "
                        f"and stage {after.number} takes {_name(after.message)}",
                        fix="make them the same",
                    )


def _read_signature(handler: Handler) -> tuple[Any, DatabaseKind]:
    """Return the type of a handler's message, and the database object that it takes."""
    name = getattr(handler, "__qualname__", repr(handler))
    if not inspect.iscoroutinefunction(handler):
        raise InvalidConfig(f"the handler {name} is not async", fix="write `async def`")
    hints = typing.get_type_hints(handler)
    parameters = list(inspect.signature(handler).parameters)
    if len(parameters) not in (2, 3) or any(parameter not in hints for parameter in parameters[1:]):
        raise InvalidConfig(
            f"the handler {name} must take a context, a message and perhaps a database, with their types",
            fix="async def handler(ctx: Context[State], message: Message, db: AsyncSession)",
        )
    message = hints[parameters[1]]
    decoder_for(message)
    if len(parameters) == 2:
        return message, DatabaseKind.NONE
    wanted = typing.get_origin(hints[parameters[2]]) or hints[parameters[2]]
    kinds = {
        AsyncSession: DatabaseKind.SESSION,
        AsyncConnection: DatabaseKind.CONNECTION,
        Psycopg: DatabaseKind.PSYCOPG,
    }
    found = next((kind for base, kind in kinds.items() if isinstance(wanted, type) and issubclass(base, wanted)), None)
    if found is None or wanted is object:
        raise InvalidConfig(
            f"the handler {name} wants a {_name(wanted)}",
            fix="an AsyncSession or AsyncConnection of SQLAlchemy, or an AsyncConnection of psycopg",
        )
    return message, found


def _types_passed_on(handler: Handler) -> list[Any]:
    """Return the types that the next stage gets, by the annotation of the returned value."""
    hint = typing.get_type_hints(handler).get("return")
    options = typing.get_args(hint) if typing.get_origin(hint) not in (Request, Next) else (hint,)
    return [
        typing.get_args(option)[0]
        for option in options
        if typing.get_origin(option) in (Request, Next) and typing.get_args(option)
    ]


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))

"""Endpoints and their stages as they are declared: decorators, and what they find in the handlers' annotations.

A mistake that can be seen in a declaration is told when the module is imported or the stages start, not by a message.
"""

import inspect
import typing
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeAlias, TypeVar, overload

from psycopg import AsyncConnection as Psycopg
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from purveyor.model.errors import InvalidConfig
from purveyor.queues.stage_queues import check_endpoint
from purveyor.stages.handler_types import Context, Next, Request, StageResult, Target
from purveyor.stages.message_codec import reader_of
from purveyor.stages.retry import Retry
from purveyor.stages.sql_store import Handle

Q = TypeVar("Q")
R = TypeVar("R")
S = TypeVar("S")
P = ParamSpec("P")

Handler: TypeAlias = Callable[..., Awaitable[Any]]
_MOST_AT_ONCE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptions:
    """How a stage works; see `Endpoint.stage`."""

    exactly_once: bool = False
    retry: Retry = field(default_factory=Retry.parallel)
    concurrency: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.concurrency <= _MOST_AT_ONCE:
            raise InvalidConfig(f"a concurrency of {self.concurrency}", fix=f"give 1 to {_MOST_AT_ONCE}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of an endpoint."""

    endpoint: str
    number: int
    handler: Handler
    message: Any
    """The type that the handler takes."""
    state: Any
    handle: Handle
    options: StageOptions
    last: bool

    @property
    def id(self) -> str:
        """Its name in inbox, failures and dead letters."""
        return f"{self.endpoint}.{self.number}"


class StageDecorator(Protocol[S, R]):
    """What `stage(...)` gives: takes a handler and leaves it as it is."""

    def __call__(
        self, handler: Callable[Concatenate[Context[S], P], Awaitable[StageResult[R]]], /
    ) -> Callable[Concatenate[Context[S], P], Awaitable[StageResult[R]]]:
        """Add the handler."""


class LastStageDecorator(Protocol[S, R]):
    """What `last_stage(...)` gives."""

    def __call__(
        self, handler: Callable[Concatenate[Context[S], P], Awaitable[R]], /
    ) -> Callable[Concatenate[Context[S], P], Awaitable[R]]:
        """Add the handler."""


class Endpoint(Target[Q, R], Generic[Q, R, S]):
    """An endpoint of this application: what it takes, what it replies, the state of its flows, and its stages."""

    def __init__(self, name: str, request: type[Q], reply: type[R], state: type[S]) -> None:
        super().__init__(check_endpoint(name), request, reply)
        self.state = state
        self.stages: list[Stage] = []
        kinds: tuple[Any, ...] = (request, reply, state)
        for kind in kinds:
            reader_of(kind)

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
        """The next stage, as a decorator: `async def (ctx, message, db) -> Request | Next | Goto | Reply | None`.

        `exactly_once` runs it with inbox and outbox; without, a crash between the database's commit and the broker can
        make it run twice. `retry` is `Retry.parallel()` or `Retry.in_order()`; `concurrency` is how many handlers run
        at once in this process. `db` may be left out; its annotation says what is handed in.
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
        """The last stage (or the only one): what it returns is the reply of the endpoint. As `stage` otherwise."""
        options = StageOptions(exactly_once=exactly_once, retry=retry or Retry.parallel(), concurrency=concurrency)
        return self._decorator(handler, options, last=True)

    def _decorator(self, handler: Handler | None, options: StageOptions, *, last: bool) -> Any:
        def add(found: Handler) -> Handler:
            if self.stages and self.stages[-1].last:
                raise InvalidConfig(f"endpoint {self.name!r} has its last stage already", fix="move the decorator up")
            message, handle = _signature(found)
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
                    handle=handle,
                    options=options,
                    last=last,
                )
            )
            return found

        return add if handler is None else add(handler)

    def check(self) -> None:
        """Whether it is complete, and each stage takes what the one before it passes on."""
        if not self.stages or not self.stages[-1].last:
            raise InvalidConfig(f"endpoint {self.name!r} has no last stage", fix="end it with @endpoint.last_stage")
        for before, after in zip(self.stages, self.stages[1:], strict=False):
            for passed in _passed_on(before.handler):
                if Any not in (passed, after.message) and passed not in (
                    after.message,
                    *typing.get_args(after.message),
                ):
                    raise InvalidConfig(
                        f"stage {before.number} of {self.name!r} leads to {_name(passed)}, "
                        f"and stage {after.number} takes {_name(after.message)}",
                        fix="make them the same",
                    )


def _signature(handler: Handler) -> tuple[Any, Handle]:
    """What a handler takes: the type of its message, and what it wants of the database."""
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
    reader_of(message)
    if len(parameters) == 2:
        return message, Handle.NONE
    wanted = typing.get_origin(hints[parameters[2]]) or hints[parameters[2]]
    kinds = {AsyncSession: Handle.SESSION, AsyncConnection: Handle.CONNECTION, Psycopg: Handle.PSYCOPG}
    found = next((kind for base, kind in kinds.items() if isinstance(wanted, type) and issubclass(base, wanted)), None)
    if found is None or wanted is object:
        raise InvalidConfig(
            f"the handler {name} wants a {_name(wanted)}",
            fix="an AsyncSession or AsyncConnection of SQLAlchemy, or an AsyncConnection of psycopg",
        )
    return message, found


def _passed_on(handler: Handler) -> list[Any]:
    """What the next stage gets, by the annotation of the returned value."""
    hint = typing.get_type_hints(handler).get("return")
    options = typing.get_args(hint) if typing.get_origin(hint) not in (Request, Next) else (hint,)
    return [
        typing.get_args(option)[0]
        for option in options
        if typing.get_origin(option) in (Request, Next) and typing.get_args(option)
    ]


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))

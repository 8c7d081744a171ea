"""Endpoints and their stages as the user declares them: decorators, and the annotations of the handlers.

A mistake in a declaration is reported at the import of the module or at the start of the stages, not by a message.
"""

import inspect
import typing
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeAlias, TypeVar, overload

from psycopg import AsyncConnection as Psycopg
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from purveyor.model.errors import InvalidConfig
from purveyor.queues.catalogue import check_endpoint
from purveyor.stages.handler_types import Context, DatabaseKind, Next, Request, StageResult, Target
from purveyor.stages.message_codec import decoder_for
from purveyor.stages.stage_options import Retry, StageOptions

Q = TypeVar("Q")
R = TypeVar("R")
S = TypeVar("S")
P = ParamSpec("P")

Handler: TypeAlias = Callable[..., Awaitable[Any]]


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

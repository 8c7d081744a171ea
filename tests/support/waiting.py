"""The one way in which tests wait: for a condition, with a deadline that a slow machine does not miss."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar, overload

from tests.support.scale import pick

T = TypeVar("T")

PATIENCE_SECONDS = pick(240, 1200)
"""The deadline for a step that takes a second on an idle machine; longer in `make chaos`."""

_PAUSE_SECONDS = 0.02


@overload
async def until(
    condition: Callable[[], Awaitable[T | Literal[False] | None]],
    *,
    what: str = ...,
    seconds: float = ...,
    ignoring: tuple[type[Exception], ...] = ...,
) -> T: ...


@overload
async def until(
    condition: Callable[[], T | Literal[False] | None],
    *,
    what: str = ...,
    seconds: float = ...,
    ignoring: tuple[type[Exception], ...] = ...,
) -> T: ...


async def until(
    condition: Callable[[], Any],
    *,
    what: str = "",
    seconds: float = PATIENCE_SECONDS,
    ignoring: tuple[type[Exception], ...] = (),
) -> Any:
    """Wait until the condition, a function or a coroutine function, returns a true value; return that value.

    An exception of the condition ends the wait at once, unless it is one of `ignoring`: then the condition is tried
    again. When the time is over, the AssertionError says what was awaited, and the last value or exception seen.
    """
    seen = _Seen(condition, what, seconds)
    try:
        async with asyncio.timeout(seconds) as limit:
            while True:
                try:
                    value = condition()
                    if inspect.isawaitable(value):
                        value = await value
                except ignoring as error:
                    seen.last = error
                else:
                    if value:
                        return value
                    seen.last = value
                await asyncio.sleep(_PAUSE_SECONDS)
    except TimeoutError:
        if not limit.expired():
            raise
        raise seen.failure() from seen.cause


def wait_until(
    condition: Callable[[], T | Literal[False] | None],
    *,
    what: str = "",
    seconds: float = PATIENCE_SECONDS,
    ignoring: tuple[type[Exception], ...] = (),
) -> T:
    """Do the same as `until` where no event loop runs."""
    seen = _Seen(condition, what, seconds)
    deadline = time.monotonic() + seconds
    while True:
        try:
            value = condition()
        except ignoring as error:
            seen.last = error
        else:
            if value:
                return value
            seen.last = value
        if time.monotonic() >= deadline:
            raise seen.failure() from seen.cause
        time.sleep(_PAUSE_SECONDS)


class _Seen:
    """Describe the condition of a wait, and its last value or exception."""

    def __init__(self, condition: Callable[[], object], what: str, seconds: float) -> None:
        self.last: object = "nothing: the condition has not returned"
        self._what = what or _place(condition)
        self._seconds = seconds

    @property
    def cause(self) -> Exception | None:
        return self.last if isinstance(self.last, Exception) else None

    def failure(self) -> AssertionError:
        return AssertionError(f"waited {self._seconds:g} s for {self._what}; last seen: {self.last!r}")


def _place(condition: Callable[[], object]) -> str:
    """Return the file and line of the condition."""
    code = getattr(inspect.unwrap(condition), "__code__", None)
    if code is None:
        return repr(condition)
    return f"the condition {code.co_name} in {code.co_filename}:{code.co_firstlineno}"


__all__ = ["PATIENCE_SECONDS", "until", "wait_until"]

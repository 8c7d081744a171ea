"""Traces through the system: the header by which they travel, and the hook by which parts tell their spans.

A message carries `traceparent` (and `tracestate`) as a header, as W3C's Trace Context has it; every queue keeps it. The
parts open a `span` around their work. Unless somebody installed a `Tracer` (`app/telemetry/traces.py`) that does
nothing but hand on the header as it came, and costs a function call where there is none.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Final, Protocol, TypeAlias

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
_FORM: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[^ ]*)?")
_LONGEST_STATE: Final = 512
MOST_LINKS: Final = 32
"""A span of many messages is linked to so many of their traces: enough to find it by."""

Carrier: TypeAlias = Mapping[str, str]
"""The headers of a trace: `traceparent`, and `tracestate` if there is one; empty without a trace."""
Value: TypeAlias = str | int | float | bool
NONE: Final[Carrier] = {}


class Tracer(Protocol):
    """Who is told of spans."""

    def span(
        self, name: str, parent: Carrier, links: Sequence[Carrier], attributes: Mapping[str, Value]
    ) -> AbstractContextManager[Carrier]:
        """A span as long as the block lasts; gives the headers that make others its children."""

    def record(
        self, name: str, seconds: float, parent: Carrier, links: Sequence[Carrier], attributes: Mapping[str, Value]
    ) -> None:
        """A span that is over now, and began so many seconds ago."""

    def link(self, links: Sequence[Carrier]) -> None:
        """Tie the span that is open here to other traces."""


_tracer: Tracer | None = None
_current: ContextVar[Carrier | None] = ContextVar("purveyor-trace", default=None)


def install(tracer: Tracer | None) -> None:
    """Tell spans to this one from now on; None: to nobody."""
    global _tracer  # noqa: PLW0603 - one process, one place where traces go
    _tracer = tracer


def enabled() -> bool:
    """Whether anybody listens: for those to whom finding out the parents is work."""
    return _tracer is not None


def span(
    name: str, parent: Carrier = NONE, *, links: Sequence[Carrier] = (), **attributes: Value
) -> AbstractContextManager[Carrier]:
    """A span around a piece of work; the headers to send on with what comes of it.

    >>> with span("deliver", {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}) as onward:
    ...     onward["traceparent"][:7]
    '00-1111'
    """
    if _tracer is not None:
        return _spanning(_tracer, name, parent, links, attributes)
    return _carrying(parent) if parent else contextlib.nullcontext(parent)


@contextlib.contextmanager
def _carrying(parent: Carrier) -> Iterator[Carrier]:
    """Nobody listens here; those behind a queue may, so that the header has to be found by whoever sends."""
    token = _current.set(parent)
    try:
        yield parent
    finally:
        _current.reset(token)


@contextlib.contextmanager
def _spanning(
    tracer: Tracer, name: str, parent: Carrier, links: Sequence[Carrier], attributes: Mapping[str, Value]
) -> Iterator[Carrier]:
    with tracer.span(name, parent or _current.get() or NONE, links, attributes) as onward, _carrying(onward):
        yield onward


def record(
    name: str, seconds: float, parent: Carrier = NONE, *, links: Sequence[Carrier] = (), **attributes: Value
) -> None:
    """A span that is over: where work has no block of its own, or what it belongs to is known only at its end."""
    if _tracer is not None:
        _tracer.record(name, seconds, parent, links, attributes)


def link(links: Sequence[Carrier]) -> None:
    """Tie the open span to traces that were found while it lasted, to so many of them."""
    if _tracer is not None and links:
        _tracer.link(links[:MOST_LINKS])


def current() -> Carrier | None:
    """The span that is open here, or the trace that was handed on; None if there is neither."""
    return _current.get()


def carrier(get: Callable[[str], str | None]) -> Carrier:
    """The headers of a trace, from wherever headers are found; what is no such header is left out.

    >>> carrier({"traceparent": "rubbish"}.get)
    {}
    """
    parent = get(TRACEPARENT)
    if parent is None or not valid(parent):
        return NONE
    state = get(TRACESTATE)
    if state is None or not 0 < len(state) <= _LONGEST_STATE or not (state.isascii() and state.isprintable()):
        return {TRACEPARENT: parent}
    return {TRACEPARENT: parent, TRACESTATE: state}


def of_headers(headers: Mapping[str, Sequence[str]]) -> Carrier:
    """The same from the headers of a message."""
    if TRACEPARENT not in headers:
        return NONE
    return carrier(lambda name: next(iter(headers.get(name, ())), None))


def valid(traceparent: str) -> bool:
    """Whether it is a `traceparent`; those of versions to come are, if they begin as this one."""
    found = _FORM.fullmatch(traceparent)
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return False
    return found[2].strip("0") != "" and found[3].strip("0") != ""


def ids(found: Carrier) -> tuple[str, str]:
    """The ids of a trace and of its span."""
    _, trace, parent, *_ = found[TRACEPARENT].split("-")
    return trace, parent

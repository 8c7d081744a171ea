"""Distributed traces: the headers that carry them, and the hook that receives the spans of the parts.

A message carries `traceparent` (and `tracestate`) as headers, as in the W3C Trace Context; every queue keeps them. The
parts open a `span` around their work. Without an installed `Tracer` (`app/telemetry/traces.py`) a span only passes the
headers on, and costs a function call if there are none.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Final, Protocol, TypeAlias

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
_TRACEPARENT_FORMAT: Final = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[^ ]*)?")
_LONGEST_STATE_CHARACTERS: Final = 512
MOST_LINKS: Final = 32
"""The largest number of traces that a span of many messages is linked to."""

Carrier: TypeAlias = Mapping[str, str]
"""The headers of a trace: `traceparent`, and `tracestate` if there is one; empty without a trace."""
Value: TypeAlias = str | int | float | bool
NO_TRACE: Final[Carrier] = {}


class Tracer(Protocol):
    """Receives spans."""

    def span(
        self, name: str, parent: Carrier, links: Sequence[Carrier], attributes: Mapping[str, Value]
    ) -> AbstractContextManager[Carrier]:
        """Open a span during a block; it yields the headers that make other spans its children."""

    def record(
        self, name: str, seconds: float, parent: Carrier, links: Sequence[Carrier], attributes: Mapping[str, Value]
    ) -> None:
        """Record a span that ends now and took `seconds`."""

    def link(self, links: Sequence[Carrier]) -> None:
        """Link the open span to other traces."""


_tracer: Tracer | None = None
_current: ContextVar[Carrier | None] = ContextVar("purveyor-trace", default=None)


def install_tracer(tracer: Tracer | None) -> None:
    """Send spans to this tracer from now on; None sends them nowhere."""
    global _tracer  # noqa: PLW0603 - one process, one place where traces go
    _tracer = tracer


def is_enabled() -> bool:
    """Return whether a tracer is installed. For callers to whom finding the parents is work."""
    return _tracer is not None


def span(
    name: str, parent: Carrier = NO_TRACE, *, links: Sequence[Carrier] = (), **attributes: Value
) -> AbstractContextManager[Carrier]:
    """Open a span around a piece of work; it yields the headers for the messages that result from it.

    >>> with span("deliver", {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}) as headers:
    ...     headers["traceparent"][:7]
    '00-1111'
    """
    if _tracer is not None:
        return _open_span(_tracer, name, parent, links, attributes)
    return _passing_on(parent) if parent else contextlib.nullcontext(parent)


@contextlib.contextmanager
def _passing_on(parent: Carrier) -> Iterator[Carrier]:
    """Make the headers of the parent the current ones, so that messages carry them to processes that have a tracer."""
    token = _current.set(parent)
    try:
        yield parent
    finally:
        _current.reset(token)


@contextlib.contextmanager
def _open_span(
    tracer: Tracer, name: str, parent: Carrier, links: Sequence[Carrier], attributes: Mapping[str, Value]
) -> Iterator[Carrier]:
    with tracer.span(name, parent or _current.get() or NO_TRACE, links, attributes) as headers, _passing_on(headers):
        yield headers


def record(
    name: str, seconds: float, parent: Carrier = NO_TRACE, *, links: Sequence[Carrier] = (), **attributes: Value
) -> None:
    """Record a span that is over, for work without a block, or whose parent is known only at its end."""
    if _tracer is not None:
        _tracer.record(name, seconds, parent, links, attributes)


def link(links: Sequence[Carrier]) -> None:
    """Link the open span to other traces, to `MOST_LINKS` of them at most."""
    if _tracer is not None and links:
        _tracer.link(links[:MOST_LINKS])


def current_carrier() -> Carrier | None:
    """Return the headers of the open span, or of the trace that is passed on; None if there is neither."""
    return _current.get()


def read_carrier(get: Callable[[str], str | None]) -> Carrier:
    """Read the headers of a trace with a lookup function; invalid ones are left out.

    >>> read_carrier({"traceparent": "rubbish"}.get)
    {}
    """
    parent = get(TRACEPARENT)
    if parent is None or not is_valid_traceparent(parent):
        return NO_TRACE
    state = get(TRACESTATE)
    if (
        state is None
        or not 0 < len(state) <= _LONGEST_STATE_CHARACTERS
        or not (state.isascii() and state.isprintable())
    ):
        return {TRACEPARENT: parent}
    return {TRACEPARENT: parent, TRACESTATE: state}


def carrier_from_headers(headers: Mapping[str, Sequence[str]]) -> Carrier:
    """Read the headers of a trace from the headers of a message."""
    if TRACEPARENT not in headers:
        return NO_TRACE
    return read_carrier(lambda name: next(iter(headers.get(name, ())), None))


def is_valid_traceparent(traceparent: str) -> bool:
    """Return whether a text is a `traceparent`, also of a later version that begins like this one."""
    found = _TRACEPARENT_FORMAT.fullmatch(traceparent)
    if found is None or found[1] == "ff" or (found[1] == "00" and found[5]):
        return False
    return found[2].strip("0") != "" and found[3].strip("0") != ""


def trace_ids(found: Carrier) -> tuple[str, str]:
    """Return the ids of a trace and of its span."""
    _, trace, parent, *_ = found[TRACEPARENT].split("-")
    return trace, parent

"""The points in the steps of a stage at which a crash has a distinct meaning, each with a name.

Tests kill a process at each of them. Without a listener `reach` costs the read of one variable. This module is small
because the relay, the processor and the runner all import it.
"""

from collections.abc import Callable
from enum import Enum


class CrashPoint(Enum):
    """A point in the numbered steps of `processor.py`."""

    RECEIVED = "after receive"
    INBOX = "after inbox"
    BEFORE_COMMIT = "before commit"
    COMMITTED = "after commit"
    MID_PUBLISH = "in mid-publish"
    PUBLISHED = "after publish, before mark-sent"
    MARKED = "before ack"
    BEFORE_DEAD_LETTER = "before the dead-letter publish"
    AFTER_DEAD_LETTER = "after the dead-letter publish"
    EVENTS_STORED = "after the events are stored"


_listener: Callable[[CrashPoint], None] | None = None


def set_listener(listener: Callable[[CrashPoint], None] | None) -> None:
    """Call a function, on the thread that reaches it, for every point; None to stop."""
    global _listener  # noqa: PLW0603 - one process, one listener: it may be about to end the process
    _listener = listener


def has_listener() -> bool:
    """Whether a listener is set: for points that are costly to find."""
    return _listener is not None


def reach(point: CrashPoint) -> None:
    """Report that this process has reached a point."""
    if _listener is not None:
        _listener(point)

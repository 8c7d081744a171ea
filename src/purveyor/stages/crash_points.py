"""The places in the steps of a stage where a crash means something of its own, each with a name.

Tests kill a process at each of them; in all other processes nobody listens and `reach` is a look at a variable.
"""

from collections.abc import Callable
from enum import Enum


class Point(Enum):
    """Where a process can be; see `transaction.py` for the numbered steps."""

    RECEIVED = "after receive"
    INBOX = "after inbox"
    BEFORE_COMMIT = "before commit"
    COMMITTED = "after commit"
    MID_PUBLISH = "in mid-publish"
    PUBLISHED = "after publish, before mark-sent"
    MARKED = "before ack"
    BEFORE_DEAD_LETTER = "before the dead-letter publish"
    AFTER_DEAD_LETTER = "after the dead-letter publish"


_listener: Callable[[Point], None] | None = None


def listen(listener: Callable[[Point], None] | None) -> None:
    """Be told, on the thread that is there, of every point that is reached; None to stop."""
    global _listener  # noqa: PLW0603 - one process, one listener: it may be about to end the process
    _listener = listener


def heard() -> bool:
    """Whether somebody listens: for points that are costly to find."""
    return _listener is not None


def reach(point: Point) -> None:
    """Say that this process has come here."""
    if _listener is not None:
        _listener(point)

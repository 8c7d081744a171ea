"""Moves the durable of a query when batches are done: at once, later, or while the next batch runs.

`Releases` decides how far the durable may move, `DurableMover` moves it.

To move a durable past a hundred thousand messages of an interest stream, the server needs about two microseconds for
each, in one thread. Spark waits for a commit before it begins the next batch, which needs nothing of that. So the mover
starts a long move in a thread and waits for it before the next one. The next start completes what a crash interrupts.
"""

import threading
from collections import deque
from typing import Final

from purveyor.spark.offsets import Offset
from purveyor.spark.stream_control import StreamControl

LONG_MOVE_MESSAGES: Final = 10_000
"""A move past this many messages takes longer than the start of a batch."""
_FINISH_TIMEOUT_SECONDS: Final = 5.0


class Releases:
    """The batches that are done and whose messages the stream still keeps. Pure: the caller gives the time.

    A batch is released `hold_seconds` after it was done. While batches follow each other, at least `interval_seconds`
    lie between two releases: each costs requests to the server and, with a checkpoint to sync, writes to the disk.
    """

    def __init__(self, *, hold_seconds: float = 0.0, interval_seconds: float = 0.0) -> None:
        self._hold_seconds = hold_seconds
        self._interval_seconds = interval_seconds
        self._done: deque[tuple[float, Offset]] = deque()
        self._newest = 0
        self._released_at = -interval_seconds

    def add(self, offset: Offset, now: float) -> None:
        """Record that everything up to an offset is done. Repeated calls with one offset do nothing."""
        if offset.sequence > self._newest:
            self._done.append((now, offset))
            self._newest = offset.sequence

    @property
    def pending(self) -> bool:
        """Whether a batch is done and not released."""
        return bool(self._done)

    def give_back(self, offset: Offset, now: float) -> None:
        """Put back an offset that was due but to which the durable was not moved."""
        self._done.appendleft((now - self._hold_seconds, offset))

    def due(self, now: float, *, idle: bool = True, hold: bool = True) -> Offset | None:
        """Return the offset to which the durable is to move now; None if it is to stay.

        >>> releases = Releases(hold_seconds=10, interval_seconds=5)
        >>> for second in (1, 2, 3):
        ...     releases.add(Offset("s", "c", second), second)
        >>> [found and found.sequence for found in (releases.due(now, idle=False) for now in (10, 12, 13, 17))]
        [None, 2, None, 3]
        """
        if not idle and now < self._released_at + self._interval_seconds:
            return None
        found = None
        while self._done and (not hold or self._done[0][0] + self._hold_seconds <= now):
            found = self._done.popleft()[1]
        if found is not None:
            self._released_at = now
        return found


class DurableMover:
    """Moves the durable of one reader. A copy in another process has no move in progress."""

    def __init__(self, control: StreamControl) -> None:
        self._control = control
        self._move_thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def __reduce__(self) -> tuple[type["DurableMover"], tuple[StreamControl]]:
        return DurableMover, (self._control,)

    def move(self, offset: Offset) -> None:
        """Move the durable and wait until that is done."""
        self.settle()
        self._control.move_durable(offset)

    def begin(self, offset: Offset) -> None:
        """Start to move the durable. The next call of any method raises the error if the move fails."""
        self.settle()
        # A daemon: the end of the query does not wait for a server that is away.
        self._move_thread = threading.Thread(target=self._run, args=(offset,), name="purveyor-commit", daemon=True)
        self._move_thread.start()

    def is_moving(self) -> bool:
        """Return whether a move is in progress. Raise the error of one that failed."""
        if self._move_thread is not None and self._move_thread.is_alive():
            return True
        self.settle()
        return False

    def settle(self) -> None:
        """Wait for the move in progress, which has its own timeout; raise its error."""
        if self._move_thread is None:
            return
        self._move_thread.join()
        self._move_thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def end(self) -> None:
        """Give the move in progress a few seconds to complete."""
        if self._move_thread is not None:
            self._move_thread.join(_FINISH_TIMEOUT_SECONDS)

    def _run(self, offset: Offset) -> None:
        try:
            self._control.move_durable(offset)
        except BaseException as error:  # noqa: BLE001 - raised by the next call
            self._failure = error

"""Moving the durable of a query: at once, later, or beside the next batch.

`Releases` decides how far the durable may move, `Mover` moves it.

To move it past a hundred thousand messages of an interest stream takes the server some two microseconds for each, in
one thread. Spark waits for a commit before it begins the next batch, which needs none of that: so a long move is begun,
and awaited before the next one. What a crash leaves undone is done by the next start.
"""

import threading
from collections import deque
from typing import Final

from purveyor.spark.offsets import Offset
from purveyor.spark.stream_control import Control

LONG_MOVE: Final = 10_000
"""Messages: to move past so many takes longer than to begin a batch."""
_LAST_SECONDS: Final = 5.0


class Releases:
    """The batches that are done and whose messages the stream still keeps. Pure: the caller gives the time.

    A batch is released `hold_seconds` after it was done. While batches come one after the other, `interval_seconds` lie
    between two releases: each costs questions to the server and, with a checkpoint to sync, writes to the disk.
    """

    def __init__(self, *, hold_seconds: float = 0.0, interval_seconds: float = 0.0) -> None:
        self._hold_seconds = hold_seconds
        self._interval_seconds = interval_seconds
        self._done: deque[tuple[float, Offset]] = deque()
        self._newest = 0
        self._released_at = -interval_seconds

    def add(self, offset: Offset, now: float) -> None:
        """Take in that everything up to an offset is done. To say it again does nothing."""
        if offset.sequence > self._newest:
            self._done.append((now, offset))
            self._newest = offset.sequence

    @property
    def pending(self) -> bool:
        """Whether a batch is done and not released."""
        return bool(self._done)

    def give_back(self, offset: Offset, now: float) -> None:
        """Take back an offset that was due and that the durable was not moved to."""
        self._done.appendleft((now - self._hold_seconds, offset))

    def due(self, now: float, *, idle: bool = True, hold: bool = True) -> Offset | None:
        """Return up to where the durable is to move now; None if it is to stay.

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


class Mover:
    """Moves the durable of one reader. A copy in another process has nothing under way."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._under_way: threading.Thread | None = None
        self._failure: BaseException | None = None

    def __reduce__(self) -> tuple[type["Mover"], tuple[Control]]:
        return Mover, (self._control,)

    def move(self, offset: Offset) -> None:
        """Move it, and be done."""
        self.settle()
        self._control.move_durable(offset)

    def begin(self, offset: Offset) -> None:
        """Begin to move it. That it failed is raised by whatever is asked for next."""
        self.settle()
        # A daemon: who ends the query does not wait for a server that is away.
        self._under_way = threading.Thread(target=self._run, args=(offset,), name="purveyor-commit", daemon=True)
        self._under_way.start()

    def is_moving(self) -> bool:
        """Return whether a move is under way. Raises what went wrong with one that has ended."""
        if self._under_way is not None and self._under_way.is_alive():
            return True
        self.settle()
        return False

    def settle(self) -> None:
        """Wait for what is under way; it has its own patience."""
        if self._under_way is None:
            return
        self._under_way.join()
        self._under_way = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def end(self) -> None:
        """Nothing is asked for any more: let what is under way come to its end, if that does not take long."""
        if self._under_way is not None:
            self._under_way.join(_LAST_SECONDS)

    def _run(self, offset: Offset) -> None:
        try:
            self._control.move_durable(offset)
        except BaseException as error:  # noqa: BLE001 - raised by the next one to ask
            self._failure = error

"""Moving the durable of a query: at once, or beside the next batch.

To move it past a hundred thousand messages of an interest stream takes the server some two microseconds for each, in
one thread. Spark waits for a commit before it begins the next batch, which needs none of that: so a long move is begun,
and awaited before the next one. What a crash leaves undone is done by the next start.
"""

import threading
from typing import Final

from purveyor.spark.control import Control
from purveyor.spark.offsets import Offset

LONG_MOVE: Final = 10_000
"""Messages: to move past so many takes longer than to begin a batch."""
_LAST_SECONDS: Final = 5.0


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

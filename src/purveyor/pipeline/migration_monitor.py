"""Migrations while the pipeline runs: told to people as they happen, and brought forward until no queue is sealed.

The queries drain a sealed queue and try to complete its migration, but they do so in processes of Spark, which nobody
hears. So the service looks too, once a second, as long as there is something to wait for, and tells what they did.
"""

import logging
import queue
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from purveyor.model.errors import Unavailable

_LOGGER = logging.getLogger("purveyor.migration")
_LOOK_SECONDS = 1.0
_SEALED = "Stream '%s' sealed"
_COMPLETED = "Migration completed for '%s'"


class MigrationWatch(logging.Handler):
    """See the module. `ensure` brings all queues forward and tells whether all are ready; `say` is who is told."""

    def __init__(self, ensure: Callable[[], bool], say: Callable[[str, str], None]) -> None:
        super().__init__(logging.INFO)
        self._ensure = ensure
        self._say = say
        self._news: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._ready = True
        self._sealed: set[str] = set()
        self._look_at = 0.0
        self._told = ""
        self._before = (_LOGGER.level, _LOGGER.propagate)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it for `look`: it may come from any thread."""
        stream = str(record.args[0]) if isinstance(record.args, tuple) and record.args else ""
        if record.msg.startswith(_SEALED):
            self._sealed.add(stream)
        elif record.msg == _COMPLETED:
            self._sealed.discard(stream)
        self._news.put(record.getMessage())

    def ensure(self) -> None:
        """Bring all queues to their declaration, or a step nearer. Raises what makes that impossible."""
        ready = self._ensure()
        if ready and not self._ready:
            for stream in sorted(self._sealed):  # a query was quicker
                _LOGGER.info("Sealed stream '%s' is empty, completing migration", stream)
                _LOGGER.info(_COMPLETED, stream)
            _LOGGER.info("Stream migration completed, resuming normal operation")
        self._ready = ready
        self._tell()

    def look(self) -> None:
        """Now and then."""
        self._tell()
        if not self._ready and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_SECONDS
            try:
                self.ensure()
            except Unavailable:
                return  # the parts tell that the server is away

    def _tell(self) -> None:
        while not self._news.empty():
            text = self._news.get()
            if text != self._told:  # each look is a connection of its own, which knows nothing of the last
                self._told = text
                self._say("migration", text)

    def __enter__(self) -> Self:
        _LOGGER.addHandler(self)
        _LOGGER.setLevel(logging.INFO)
        _LOGGER.propagate = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tell()
        _LOGGER.removeHandler(self)
        level, _LOGGER.propagate = self._before
        _LOGGER.setLevel(level)

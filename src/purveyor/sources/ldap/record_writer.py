"""Writes the records of a source into the queue `ldif`, in order and in batches, and says up to where they are stored.

`add` waits while too much is not acknowledged, so the memory stays bounded and a slow queue slows the directory down.
`mark` names a place in the directory; when the queue has acknowledged every record that was added before it, the writer
reports the place. Batches are atomic and follow one another: what is stored is always a beginning of what was added.

A record that is larger than a message of the server becomes a dead letter, and its substitute is written in its place.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Final, Generic, TypeVar

from purveyor.jetstream import Outgoing, PublishMode, PublishOptions, outgoing, publish_many
from purveyor.jetstream.headers import MSG_ID
from purveyor.model.errors import OutcomeUnknown, ServerUnavailable, Unavailable
from purveyor.model.retries import Backoff, RetryDelays
from purveyor.queues.catalogue import LDIF
from purveyor.queues.client import Queues
from purveyor.queues.dead_letters.letter import DeadLetter, park
from purveyor.queues.permissions import SOURCES
from purveyor.sources.ldap.source_store import HeldSource
from purveyor.sources.ldif.queue_store import run_in_thread

_BATCH_RECORDS: Final = 4000
_BATCH_BYTES: Final = 8 << 20
_MOST_RECORDS: Final = 8000
_MOST_BYTES: Final = 16 << 20
_HEADER_BYTES: Final = 1024  # of the largest message: its id, and its place in a batch
_PATIENCE_SECONDS: Final = 30.0
_DEFAULT_WINDOW_SECONDS: Final = 120.0
"""For how long a server recognises ids, if the stream does not say."""
_RETRY_BACKOFF: Final = Backoff(0.1, 2.0)
P = TypeVar("P")


class RecordWriter(Generic[P]):
    """Writes records while `run` runs. `on_stored` gets the newest place before which everything is stored."""

    def __init__(
        self,
        queues: Queues,
        subject: str,
        taken: HeldSource,
        *,
        lease_seconds: float,
        on_stored: Callable[[P], None],
    ) -> None:
        self.added = 0
        """The number of records added so far."""
        self.stored = 0
        """The number of records that the queue has acknowledged."""
        self.parked = 0
        """The number of records that became dead letters."""
        self._queues = queues
        self._subject = subject
        self._taken = taken
        self._lease_seconds = lease_seconds
        self._on_stored = on_stored
        self._waiting: deque[Outgoing] = deque()
        self._unstored_bytes = 0
        self._places: deque[tuple[int, P]] = deque()
        self._work = asyncio.Event()
        self._changed = asyncio.Condition()
        self._window_seconds = _DEFAULT_WINDOW_SECONDS

    async def add(self, data: bytes, substitute: Callable[[], bytes] | None = None) -> None:
        """Add a record; wait while too many are not stored. `substitute` takes the place of one that is too large."""
        if len(data) + _HEADER_BYTES > self._queues.connection.max_payload:
            await self._park(data)
            if substitute is None:
                return
            data = substitute()
        if self.added - self.stored >= _MOST_RECORDS or self._unstored_bytes >= _MOST_BYTES:
            async with self._changed:
                await self._changed.wait_for(
                    lambda: self.added - self.stored < _MOST_RECORDS and self._unstored_bytes < _MOST_BYTES
                )
        self.added += 1
        self._unstored_bytes += len(data)
        self._waiting.append((self._subject, data, None, f"{self._taken.source}.{self._taken.epoch}.{self.added}"))
        self._work.set()

    def mark(self, place: P) -> None:
        """Report this place when all records that were added so far are stored."""
        self._places.append((self.added, place))
        self._work.set()

    async def flush(self) -> None:
        """Wait until all records are stored and all places reported; `run` must run."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.stored == self.added and not self._places)

    async def run(self) -> None:
        """Publish what is added, without end.

        LeaseLost if another process has taken the source; ServerUnavailable if the outcome of a batch stays unknown.
        """
        window = (await self._queues.streams.info(LDIF.stream)).config.duplicate_window
        self._window_seconds = _DEFAULT_WINDOW_SECONDS if window is None else window.total_seconds()
        while True:
            await self._work.wait()
            self._work.clear()
            while self._waiting or self._places:
                batch, size = self._next_batch()
                if batch:
                    await self._publish(batch)
                async with self._changed:
                    self.stored += len(batch)
                    self._unstored_bytes -= size
                    self._report_places()
                    self._changed.notify_all()

    def _next_batch(self) -> tuple[list[Outgoing], int]:
        batch: list[Outgoing] = []
        size = 0
        while self._waiting and len(batch) < _BATCH_RECORDS and size < _BATCH_BYTES:
            batch.append(self._waiting.popleft())
            size += len(batch[-1][1])
        return batch, size

    def _report_places(self) -> None:
        place: P | None = None
        while self._places and self._places[0][0] <= self.stored:
            place = self._places.popleft()[1]
        if place is not None:
            self._on_stored(place)

    async def _publish(self, batch: list[Outgoing]) -> None:
        """Publish a batch, again while the server is away: the ids of its messages stay the same.

        ServerUnavailable if the outcome is unknown for half of the time in which the server recognises ids. A later
        attempt could store the versions of an entry again, behind newer ones: v1, v2, v1, v2. The next run has another
        epoch and begins at the stored cookie with a refresh, which reports only what is there now.
        """
        began, delays = time.monotonic(), RetryDelays(_RETRY_BACKOFF)
        while True:
            await self._taken.ensure_held(self._lease_seconds)
            left = began + self._window_seconds / 2 - time.monotonic()
            if left <= 0:
                raise _unknown_outcome(time.monotonic() - began)
            options = PublishOptions(
                mode=PublishMode.ATOMIC,
                expected_stream=LDIF.stream,
                patience_seconds=min(_PATIENCE_SECONDS, left),
            )
            try:
                await run_in_thread(partial(publish_many, self._queues.address, outgoing(batch, rows=1000), options))
            except OutcomeUnknown as error:
                raise _unknown_outcome(time.monotonic() - began) from error
            except Unavailable:
                await asyncio.sleep(delays.next_seconds())
            else:
                return

    async def _park(self, data: bytes) -> None:
        """Store a record that is too large as a dead letter; the letter has as much of it as fits."""
        now = datetime.now(UTC)
        letter = DeadLetter(
            reason=f"a record of {len(data)} bytes, and the server takes {self._queues.connection.max_payload}",
            origin=SOURCES,
            subject=self._subject,
            data=data,
            headers={MSG_ID: (f"{self._taken.source}.{self._taken.epoch}.{self.added + 1}",)},
            failed_first=now,
            failed_last=now,
            details={"bytes": len(data)},
        )
        delays = RetryDelays(_RETRY_BACKOFF)
        while True:
            await self._taken.ensure_held(self._lease_seconds)
            try:
                await park(self._queues, letter)
            except Unavailable:
                await asyncio.sleep(delays.next_seconds())
            else:
                self.parked += 1
                return


def _unknown_outcome(seconds: float) -> ServerUnavailable:
    return ServerUnavailable(
        f"the queue {LDIF.name} has not confirmed records for {seconds:.0f} s: the source begins again at its cookie",
        fix="check that the NATS server runs and has room",
    )

"""One bulk publish that is fed page by page: the next page is read from the database while one is on its way.

Between two calls of the bulk path nothing is on its way; between two pages of one call something always is.
"""

import asyncio
import queue
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from purveyor.queues.bulk import Outgoing as Tuple
from purveyor.queues.bulk import PublishOptions
from purveyor.queues.client import Queues
from purveyor.stages.statements import Row

_PAGES_AHEAD: Final = 2


class Pages:
    """A bulk publish under way. Feed it with `put`, end it with `finish`, or give it up with `abandon`."""

    def __init__(self, queues: Queues, options: PublishOptions) -> None:
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Semaphore(_PAGES_AHEAD)
        self._pages: queue.SimpleQueue[Sequence[Row] | None] = queue.SimpleQueue()
        self._call = asyncio.create_task(self._publish(queues, options))

    async def put(self, rows: Sequence[Row]) -> None:
        """The next page, as soon as there is room for it. Raises what the publish failed with."""
        room = asyncio.create_task(self._room.acquire())
        try:
            await asyncio.wait((room, self._call), return_when=asyncio.FIRST_COMPLETED)
        finally:
            room.cancel()
        if self._call.done():
            self._call.result()
        self._pages.put(rows)

    async def finish(self) -> None:
        """Return when every message is stored; raises what the publish failed with."""
        self._pages.put(None)
        await asyncio.shield(self._call)

    async def abandon(self) -> None:
        """No more pages; what was put is sent, and how that goes is nobody's concern."""
        self._pages.put(None)
        await asyncio.wait((self._call,))
        self._call.exception()

    async def _publish(self, queues: Queues, options: PublishOptions) -> None:
        await queues.publish_many(self._messages(self._loop.call_soon_threadsafe), options)

    def _messages(self, tell: Callable[[Callable[[], None]], object]) -> Iterator[Tuple]:
        """All messages of all pages; runs in the thread of the bulk path."""
        while (page := self._pages.get()) is not None:
            for row in page:
                yield row.to_publish()
            tell(self._room.release)

"""The schemas and topics of the registry in the memory of a process: read once, kept up to date by a watch.

A write of another process takes effect here as soon as the watch delivers it, a write of this process at once. While
the server is unavailable nothing can be published, so a slightly old cache does no harm. Before the first read the
process accepts no event.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final

from purveyor.model.errors import PurveyorError, Unavailable
from purveyor.model.event import Event
from purveyor.queues.client import Queues
from purveyor.sources.schemas.event_validator import EventValidator, ValidatorBuilder
from purveyor.sources.schemas.registry import SchemaRegistry

_RETRY_DELAY_SECONDS: Final = 1.0
MAX_TOPICS: Final = 10_000
"""The largest number of topics that the registry lists. Events of further topics are accepted and delivered, but not
listed: a publisher with a new topic for each event does not fill the registry, which every API loads at its start."""
_log = logging.getLogger(__name__)


class SchemaCache:
    """The cache of one process."""

    def __init__(self, queues: Queues, *, replicas: int = 1) -> None:
        self.registry = SchemaRegistry(queues, replicas=replicas, on_write=self._apply_own_write)
        self._builder = self._next_builder = ValidatorBuilder()
        self._validator: EventValidator | None = None
        self._seen: set[tuple[str, str]] = set()
        self._recording: asyncio.Task[None] | None = None
        self._warned_full = False

    @property
    def validator(self) -> EventValidator:
        """The current validator; use one for all events of a request. Raises `Unavailable` before the first read."""
        if self._validator is None:
            raise Unavailable("the schemas of events are not read yet", fix="try again in a moment")
        return self._validator

    @property
    def is_full(self) -> bool:
        """Whether the registry lists the largest number of topics."""
        return len(self._seen) >= MAX_TOPICS

    async def follow(self, ready: Callable[[], None]) -> None:
        """Keep the cache up to date until cancelled; call `ready` whenever it is."""
        while True:
            try:
                await self._follow(ready)
            except PurveyorError as error:
                _log.warning("the cache of schemas gets no changes until the watch works again: %s", error)
            await asyncio.sleep(_RETRY_DELAY_SECONDS)

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Keep the cache up to date for the length of a block; raise if the first read fails."""
        began: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def ready() -> None:
            if not began.done():
                began.set_result(None)

        async def run() -> None:
            try:
                await self._follow(ready)
            except PurveyorError as error:
                if not began.done():
                    began.set_exception(error)
                    return
            await self.follow(ready)

        following = asyncio.create_task(run())
        try:
            await began
            yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    def record_topics_in_background(self, events: Iterable[Event]) -> None:
        """Add the new topics of accepted events to the registry, in the background."""
        new = self._unlisted((event.realm, event.topic) for event in events)
        if new and (self._recording is None or self._recording.done()):
            self._recording = asyncio.create_task(self._record(new))

    async def record_topics(self, topics: Iterable[tuple[str, str]]) -> None:
        """Add the new ones of these topics to the registry."""
        new = self._unlisted(topics)
        if new:
            await self._record(new)

    def _unlisted(self, topics: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
        """Return topics that the registry does not list, at most as many as it has room for."""
        new = set(topics) - self._seen
        room = max(MAX_TOPICS - len(self._seen), 0)
        if len(new) > room and not self._warned_full:
            self._warned_full = True
            _log.warning(
                "the list of known topics is full: %d. Events of other topics are delivered, but not listed; "
                "`purveyor topic delete` makes room",
                MAX_TOPICS,
            )
        return set(itertools.islice(new, room))

    async def close(self) -> None:
        """End the background task."""
        if self._recording is not None:
            self._recording.cancel()
            await asyncio.gather(self._recording, return_exceptions=True)

    async def _record(self, topics: set[tuple[str, str]]) -> None:
        try:
            await self.registry.add_seen_topics(topics)
        except PurveyorError as error:
            _log.warning("the registry does not list new topics: %s", error)
        self._seen |= topics  # one attempt is enough, also if it failed

    async def _follow(self, ready: Callable[[], None]) -> None:
        bucket = await self.registry.bucket()
        current = False
        # A new builder: a server that lost its store counts revisions from 1 again.
        builder = self._next_builder = ValidatorBuilder()
        async with contextlib.aclosing(bucket.watch()) as changes:
            async for entry in changes:
                if entry is None:
                    current, self._builder = True, builder
                    self._rebuild()
                    ready()
                elif builder.apply(entry.key, entry.revision, None if entry.deleted else entry.value) and current:
                    self._rebuild()

    def _apply_own_write(self, key: str, revision: int, value: bytes | None) -> None:
        """Apply a write of this process."""
        for each in {self._builder, self._next_builder}:
            each.apply(key, revision, value)
        if self._validator is not None:
            self._rebuild()

    def _rebuild(self) -> None:
        self._validator = self._builder.build()
        self._seen = {(topic.realm, topic.topic) for topic in self._builder.topics.values()}

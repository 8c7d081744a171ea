"""The rules for events as a process knows them: read once, kept up to date by a watch on the registry.

What another process adds counts here as soon as the watch tells of it, what this one adds at once. While the server is
away nothing can be published, so rules that are a moment old do no harm; before they were read for the first time no
event is taken.
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
from purveyor.sources.schemas.event_validator import Gathering, Rules
from purveyor.sources.schemas.registry import Schemas

_AGAIN_SECONDS: Final = 1.0
MOST_TOPICS: Final = 10_000
"""How many topics the registry lists. Events of further topics are accepted and delivered, but not listed: a publisher
that makes up a topic for each event does not fill the registry, which every API loads at its start."""
_log = logging.getLogger(__name__)


class Book:
    """See the module."""

    def __init__(self, queues: Queues, *, replicas: int = 1) -> None:
        self.schemas = Schemas(queues, replicas=replicas, heard=self._take)
        self._gathered = self._next = Gathering()
        self._rules: Rules | None = None
        self._seen: set[tuple[str, str]] = set()
        self._noting: asyncio.Task[None] | None = None
        self._said_full = False

    @property
    def rules(self) -> Rules:
        """As of now; the same for all events of one request. `Unavailable` before they were read."""
        if self._rules is None:
            raise Unavailable("the schemas of events were not read yet", fix="try again in a moment")
        return self._rules

    @property
    def is_full(self) -> bool:
        """Whether the list of known topics has no room for more."""
        return len(self._seen) >= MOST_TOPICS

    async def follow(self, ready: Callable[[], None]) -> None:
        """Keep the rules up to date, without end; `ready` is called when they are."""
        while True:
            try:
                await self._follow(ready)
            except PurveyorError as error:
                _log.warning("changes of schemas are not heard of until they can be watched: %s", error)
            await asyncio.sleep(_AGAIN_SECONDS)

    @contextlib.asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        """Keep the rules up to date for the length of a block; they are read before it begins, or it does not."""
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

    def note(self, events: Iterable[Event]) -> None:
        """Events were accepted: topics that are new are noted, behind the back of the one who sent them."""
        new = self._new((event.realm, event.topic) for event in events)
        if new and (self._noting is None or self._noting.done()):
            self._noting = asyncio.create_task(self._note(new))

    async def see(self, topics: Iterable[tuple[str, str]]) -> None:
        """The same, waited for."""
        new = self._new(topics)
        if new:
            await self._note(new)

    def _new(self, topics: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
        """Topics that are not listed, as many as there is room for."""
        new = set(topics) - self._seen
        room = max(MOST_TOPICS - len(self._seen), 0)
        if len(new) > room and not self._said_full:
            self._said_full = True
            _log.warning(
                "the list of known topics is full: %d. Events of other topics are delivered, but not listed; "
                "`purveyor topic delete` makes room",
                MOST_TOPICS,
            )
        return set(itertools.islice(new, room))

    async def close(self) -> None:
        """End what is under way."""
        if self._noting is not None:
            self._noting.cancel()
            await asyncio.gather(self._noting, return_exceptions=True)

    async def _note(self, topics: set[tuple[str, str]]) -> None:
        try:
            await self.schemas.see(topics)
        except PurveyorError as error:
            _log.warning("topics that are new were not noted: %s", error)
        self._seen |= topics  # once is enough, also when it failed

    async def _follow(self, ready: Callable[[], None]) -> None:
        bucket = await self.schemas.bucket()
        current = False
        gathering = self._next = Gathering()  # not what is known: a server that lost its store counts from 1 again
        async with contextlib.aclosing(bucket.watch()) as changes:
            async for entry in changes:
                if entry is None:
                    current, self._gathered = True, gathering
                    self._turn()
                    ready()
                elif gathering.take(entry.key, entry.revision, None if entry.deleted else entry.value) and current:
                    self._turn()

    def _take(self, key: str, revision: int, value: bytes | None) -> None:
        """What this process has written itself."""
        for each in {self._gathered, self._next}:
            each.take(key, revision, value)
        if self._rules is not None:
            self._turn()

    def _turn(self) -> None:
        self._rules = self._gathered.rules()
        self._seen = {(topic.realm, topic.topic) for topic in self._gathered.topics.values()}

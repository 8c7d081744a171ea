"""All parts together: started in the order in which they need each other, stopped in the opposite one."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final

from purveyor.app.up.exit_rules import Backoff
from purveyor.app.up.managed_process import Keeper, News, Tell
from purveyor.app.up.processes import Part

ALL: Final = "everything"


class Supervisor:
    """The parts of one machine. `run` in the main thread, whose end is the end of the parts."""

    def __init__(
        self,
        parts: Sequence[Part],
        tell: Tell,
        *,
        backoff: Backoff | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._keepers = [Keeper(part, self._say, backoff=backoff, environment=environment) for part in parts]
        self._tell = tell
        self._running: list[tuple[Keeper, asyncio.Task[None]]] = []
        self._asked = asyncio.Event()

    def stop(self) -> None:
        """Ask for the end; asked twice, at once. May be called by a signal handler of the loop."""
        if self._asked.is_set():
            for keeper in self._keepers:
                keeper.kill()
        self._asked.set()

    def pid(self, name: str) -> int | None:
        """The process of a part, if it has one at the moment."""
        return next((keeper.pid for keeper in self._keepers if keeper.part.name == name), None)

    async def run(self) -> None:
        """Until `stop`; ServerFailed if a part cannot be started at all, after the others were stopped."""
        async with self.running():
            if not self._asked.is_set():
                self._say(News(ALL, "up", "all parts are ready; Ctrl-C stops them"))
            await self._first(asyncio.create_task(self._asked.wait()))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """All parts are up as long as the block lasts (or a stop was asked for)."""
        try:
            for keeper in self._keepers:
                if self._asked.is_set():
                    break
                self._running.append((keeper, asyncio.create_task(keeper.run())))
                if keeper.part.needed:
                    await self._until_ready(keeper)
            for keeper, _ in self._running:
                await self._until_ready(keeper)
            yield
        finally:
            await self._end()

    def _say(self, news: News) -> None:
        try:
            self._tell(news)
        except OSError:  # the reader of our output is gone: so is whoever wanted this
            self._asked.set()

    async def _until_ready(self, keeper: Keeper) -> None:
        ready, asked = asyncio.create_task(keeper.ready.wait()), asyncio.create_task(self._asked.wait())
        await self._first(ready, asked)

    async def _first(self, *awaited: "asyncio.Task[bool]") -> None:
        """Wait for one of these, or for the failure of a part, which is raised."""
        tasks = [task for _, task in self._running]
        try:
            await asyncio.wait((*awaited, *tasks), return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for each in awaited:
                each.cancel()

    async def _end(self) -> None:
        """One after another: a part that still asks finds the one that answers."""
        while self._running:
            keeper, task = self._running.pop()
            await keeper.stop()
            await asyncio.gather(task, return_exceptions=True)

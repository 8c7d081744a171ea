"""The supervisor of all parts: starts them in the order of their dependencies, and stops them in reverse."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final

from purveyor.app.up.managed_process import RESTART_POLICY, ManagedProcess, OnEvent, Part, PartEvent
from purveyor.model.restarts import RestartPolicy

ALL: Final = "everything"


class Supervisor:
    """Supervises the parts of one machine. Use it in the main thread: the parts end with that thread."""

    def __init__(
        self,
        parts: Sequence[Part],
        on_event: OnEvent,
        *,
        restart_policy: RestartPolicy = RESTART_POLICY,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._processes = [
            ManagedProcess(part, self._report, restart_policy=restart_policy, environment=environment) for part in parts
        ]
        self._on_event = on_event
        self._running: list[tuple[ManagedProcess, asyncio.Task[None]]] = []
        self._stop_requested = asyncio.Event()

    def stop(self) -> None:
        """Stop all parts; a second call kills them. A signal handler of the loop may call this."""
        if self._stop_requested.is_set():
            for process in self._processes:
                process.kill()
        self._stop_requested.set()

    def pid(self, name: str) -> int | None:
        """Return the process id of a part; None if none runs now."""
        return next((process.pid for process in self._processes if process.part.name == name), None)

    async def run(self) -> None:
        """Run until `stop`; if a part cannot start at all, stop the others and raise ServerFailed."""
        async with self.running():
            if not self._stop_requested.is_set():
                self._report(PartEvent(ALL, "up", "all parts are ready; Ctrl-C stops them"))
            await self._wait_for_first(asyncio.create_task(self._stop_requested.wait()))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run all parts during the block, or until `stop`."""
        try:
            for process in self._processes:
                if self._stop_requested.is_set():
                    break
                self._running.append((process, asyncio.create_task(process.run())))
                if process.part.must_be_ready:
                    await self._wait_until_ready(process)
            for process, _ in self._running:
                await self._wait_until_ready(process)
            yield
        finally:
            await self._stop_all()

    def _report(self, event: PartEvent) -> None:
        try:
            self._on_event(event)
        except OSError:  # the program that read our output has ended
            self._stop_requested.set()

    async def _wait_until_ready(self, process: ManagedProcess) -> None:
        ready, asked = asyncio.create_task(process.ready.wait()), asyncio.create_task(self._stop_requested.wait())
        await self._wait_for_first(ready, asked)

    async def _wait_for_first(self, *awaited: "asyncio.Task[bool]") -> None:
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

    async def _stop_all(self) -> None:
        """Stop the parts one after another, clients before their servers."""
        while self._running:
            process, task = self._running.pop()
            await process.stop()
            await asyncio.gather(task, return_exceptions=True)

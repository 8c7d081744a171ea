"""Several API processes on one port: they share the listening socket of their parent, which restarts one that dies.

The parent holds the socket and serves no request. While one worker is away, the others accept the connections: the
kernel gives each connection to a worker that asks for one. The connections of a worker that dies break, and clients
repeat their requests, as when one of several APIs behind a load balancer dies. The workers share nothing but the NATS
server, where compare-and-set protects what they write.
"""

import asyncio
import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from purveyor.app.up.supervisor import LOG, ManagedProcess, Part, PartEvent

_GRACE_SECONDS: Final = 15
"""Longer than uvicorn gives requests that are under way, and shorter than `up` gives the API."""
_SILENT: Final = frozenset({"stopped"})
_LOGGED: Final = frozenset({LOG, "note"})

Print = Callable[[str, str, Mapping[str, Any]], None]


class ApiWorkers:
    """Runs workers from `run` to `stop`. Create it in the main thread, which starts processes.

    It reports `ready` with the fields of a worker when all workers are ready, and `waiting` and `connected` once for
    all of them.
    """

    def __init__(self, commands: Sequence[Sequence[str]], listener: int, on_event: Print) -> None:
        self._on_event = on_event
        self._workers = [
            ManagedProcess(
                Part(f"worker {number}", tuple(command), _GRACE_SECONDS, inherited=(listener,)), self._report
            )
            for number, command in enumerate(commands, start=1)
        ]
        self._stop_requested = asyncio.Event()
        self._ready: set[str] = set()
        self._waiting: set[str] = set()

    def stop(self) -> None:
        """Stop all workers at once; a second call kills them. A signal handler of the loop may call this."""
        if self._stop_requested.is_set():
            for worker in self._workers:
                worker.kill()
        self._stop_requested.set()

    async def run(self) -> None:
        """Run until `stop`; if a worker cannot start at all, stop the others and raise ServerFailed."""
        running = [asyncio.create_task(worker.run()) for worker in self._workers]
        stopping = asyncio.create_task(self._stop_requested.wait())
        try:
            await asyncio.wait((stopping, *running), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            await asyncio.gather(*(worker.stop() for worker in self._workers))
            outcomes = await asyncio.gather(*running, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    def _report(self, event: PartEvent) -> None:
        try:
            self._handle(event)
        except OSError:  # the program that read our output has ended
            self._stop_requested.set()

    def _handle(self, event: PartEvent) -> None:
        name = event.part
        if event.event in _LOGGED:
            with contextlib.suppress(ValueError):  # standard error is closed
                sys.stderr.write(f"{event.detail}\n")
                sys.stderr.flush()
        elif event.event == "ready":
            is_again = len(self._ready) == len(self._workers)
            self._ready.add(name)
            if is_again:
                self._on_event("recovered", f"{name} answers again", {})
            elif len(self._ready) == len(self._workers):
                self._on_event("ready", event.detail, event.fields)
        elif event.event == "waiting":
            if not self._waiting:
                self._on_event("waiting", event.detail, {})
            self._waiting.add(name)
        elif event.event == "connected":
            self._waiting.discard(name)
            if not self._waiting:
                self._on_event("connected", event.detail, {})
        elif event.event not in _SILENT:
            if event.event == "died":
                self._waiting.discard(name)
            self._on_event(event.event, f"{name}: {event.detail}", {})

"""Purveyor's queues for programs without an event loop: the driver of a Spark query, a thread of the pipeline.

Every function here runs the asynchronous code (`Registry`, `subscription_queues`, `Migrator`) in an event loop in a
separate thread, and waits for the result. The thread has one connection, which the next calls use too; it ends when
it was idle for a while, and with the process. A forked child has none of its parent's.
"""

import asyncio
import atexit
import contextlib
import os
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, TypeVar

from purveyor.jetstream.address import Address
from purveyor.jetstream.api import Json
from purveyor.jetstream.maintenance import STREAM_PREFIX
from purveyor.model.errors import SetupError, Unavailable
from purveyor.model.registration import DispatchState, PrefillState, Record

if TYPE_CHECKING:
    from purveyor.model.control_events import Job
    from purveyor.queues.client import Queues
    from purveyor.queues.registrations import Registered, Snapshot
    from purveyor.queues.registry import Registry

T = TypeVar("T")
PATIENCE_SECONDS: Final = 60.0
"""How long a call waits for a lost server."""
_IDLE_SECONDS: Final = 30.0
_EXIT_SECONDS: Final = 2.0


class _Session:
    """A connection with its event loop; `users` counts the calls that run on it. Guarded by `_lock`."""

    def __init__(self, address: Address, patience_seconds: float) -> None:
        self.users = 0
        self.used_at = time.monotonic()
        self.is_retired = False
        self._address = address
        self._patience_seconds = patience_seconds
        self._opened: Future[tuple[asyncio.AbstractEventLoop, Queues]] = Future()
        self._wake: asyncio.Event | None = None
        self.thread = threading.Thread(target=self._main, name="purveyor-sync-client", daemon=True)
        self.thread.start()

    def run(self, work: "Callable[[Queues], Awaitable[T]]") -> T:
        """Run a coroutine on the connection, from any other thread."""
        loop, queues = self._opened.result()

        async def call() -> T:
            return await work(queues)

        return asyncio.run_coroutine_threadsafe(call(), loop).result()

    def retire(self) -> None:
        """Close the connection as soon as no call uses it."""
        self.is_retired = True
        if self._opened.done() and self._opened.exception() is None and self._wake is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed already
                self._opened.result()[0].call_soon_threadsafe(self._wake.set)

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - the callers raise it
            with _lock:
                _forget(self)
            if not self._opened.done():
                self._opened.set_exception(error)

    async def _serve(self) -> None:
        from purveyor.queues.client import connect  # noqa: PLC0415 - loaded when a session is needed

        self._wake = asyncio.Event()
        async with connect(
            self._address, name="purveyor-sync-client", patience_seconds=self._patience_seconds
        ) as queues:
            self._opened.set_result((asyncio.get_running_loop(), queues))
            while not self._is_over():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), _IDLE_SECONDS / 4)
                self._wake.clear()

    def _is_over(self) -> bool:
        with _lock:
            is_idle = time.monotonic() - self.used_at >= _IDLE_SECONDS
            if self.users or not (self.is_retired or is_idle):
                return False
            self.is_retired = True
            _forget(self)
            return True


_lock = threading.Lock()
_sessions: dict[tuple[int, Address, float], _Session] = {}


def run_sync(
    address: Address, work: "Callable[[Queues], Awaitable[T]]", patience_seconds: float = PATIENCE_SECONDS
) -> T:
    """Run asynchronous work on the queues of a server, and wait for its result."""
    key = (os.getpid(), address, patience_seconds)
    with _lock:
        session = _sessions.get(key)
        if session is None:
            session = _sessions[key] = _Session(address, patience_seconds)
        session.users += 1
    try:
        return session.run(work)
    except (Unavailable, SetupError):  # the connection may be at fault: the next call opens a new one
        with _lock:
            _forget(session)
            session.retire()
        raise
    finally:
        with _lock:
            session.users -= 1
            session.used_at = time.monotonic()
            if session.is_retired:
                session.retire()


def _forget(session: _Session) -> None:
    for key in [key for key, each in _sessions.items() if each is session]:
        del _sessions[key]


@atexit.register
def _close_all() -> None:
    with _lock:
        sessions = [session for (pid, _, _), session in _sessions.items() if pid == os.getpid()]
        _sessions.clear()
        for session in sessions:
            session.retire()
    for session in sessions:
        session.thread.join(_EXIT_SECONDS)


def read_subscriptions(address: Address, previous: "Snapshot | None" = None) -> "Snapshot":
    """Return all subscriptions as of now; see `registry.read_snapshot`."""
    from purveyor.queues.registry import read_snapshot  # noqa: PLC0415 - loaded when a session is needed

    return run_sync(address, lambda queues: read_snapshot(queues, previous))


def update_definition(address: Address, record: Record, revision: int) -> int:
    """Overwrite a record; return the new revision."""
    return _on_registry(address, lambda registry: registry.put_record(record, revision))


def update_dispatch(address: Address, name: str, state: DispatchState, revision: int) -> int:
    """Write how far the dispatcher has written a queue; return the new revision."""
    return _on_registry(address, lambda registry: registry.put_dispatch(name, state, revision))


def put_job_once(address: Address, job: "Job") -> int:
    """Store a job on the queue `prefill`, unless the queue holds it; return its sequence."""
    return _on_registry(address, lambda registry: registry.stored_jobs.put_once(job))


def update_prefill(address: Address, name: str, state: PrefillState, revision: int) -> int:
    """Write how far a prefill is; return the new revision."""
    return _on_registry(address, lambda registry: registry.put_prefill(name, state, revision))


def settle_begin(address: Address, found: "Registered", position: int) -> Record:
    """Return the record with its beginning; see `Registry.settle_begin`."""
    return _on_registry(address, lambda registry: registry.settle_begin(found, position))


def settle_change(address: Address, name: str, incarnation: str, change: str, position: int) -> Record | None:
    """Return the record with its pending change in force; see `Registry.settle_change`."""
    return _on_registry(address, lambda registry: registry.settle_change(name, incarnation, change, position))


def restore_queue(address: Address, name: str, incarnation: str, *, replicas: int = 1) -> None:
    """Create the missing queue of a subscription again; see `subscription_queues.restore_queue`."""
    from purveyor.queues import subscription_queues  # noqa: PLC0415 - loaded when a session is needed

    run_sync(address, lambda queues: subscription_queues.restore_queue(queues, name, incarnation, replicas=replicas))


def join_migration(address: Address, stream: str, durable: Json, patience_seconds: float) -> None:
    """Have a durable created with the new stream; until then its reader reads the sealed stream by position."""
    queue = stream.removeprefix(STREAM_PREFIX)
    run_sync(address, lambda queues: queues.migrations.add_durables(queue, (durable,)), patience_seconds)


def report_passed(address: Address, stream: str, durable: str, sequence: int, patience_seconds: float) -> None:
    """Report that a reader by position has processed everything up to a sequence of a sealed work queue."""
    queue = stream.removeprefix(STREAM_PREFIX)
    run_sync(address, lambda queues: queues.migrations.report_position(queue, durable, sequence), patience_seconds)


def advance_migration(address: Address, stream: str, patience_seconds: float) -> bool:
    """Complete the migration of a stream if that is possible now; return whether it is over."""

    async def advance(queues: "Queues") -> bool:
        return await queues.migrations.resume_if_ready(stream.removeprefix(STREAM_PREFIX))

    return run_sync(address, advance, patience_seconds)


def _on_registry(address: Address, work: "Callable[[Registry], Awaitable[T]]") -> T:
    from purveyor.queues.registry import Registry  # noqa: PLC0415 - loaded when a session is needed

    async def call(queues: "Queues") -> T:
        return await work(await Registry.open(queues))

    return run_sync(address, call)


__all__ = [
    "advance_migration",
    "join_migration",
    "put_job_once",
    "read_subscriptions",
    "report_passed",
    "restore_queue",
    "run_sync",
    "settle_begin",
    "settle_change",
    "update_definition",
    "update_dispatch",
    "update_prefill",
]

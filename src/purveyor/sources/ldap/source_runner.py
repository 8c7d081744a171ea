"""Follows one directory until it is stopped: takes the source over, reads, writes, and stores the cookie.

1. Connect to the NATS server, and take the source over; while another process has it, stand by.
2. Connect to the directory. Without a valid cookie, read it as a whole; else what changed since the cookie.
3. Write each change into the queue; store its cookie when the queue has acknowledged it.

Any error ends the run at that point: the source is released, so that a standby can take it over at once, and this
process tries again after a pause. Errors that a person must correct have longer pauses.

An operator who deletes the stored cookie asks for a full refresh: the run ends, and the next one begins without it.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from purveyor.jetstream.address import Address
from purveyor.model.errors import LeaseLost, PurveyorError, ServerUnavailable, describe
from purveyor.model.retries import Backoff, RetryDelays, random_jitter
from purveyor.queues.catalogue import DEAD_LETTERS, LDIF
from purveyor.queues.client import Queues, connect
from purveyor.queues.lease import RENEWALS_PER_LEASE, SeenRevisions
from purveyor.queues.status_board import delete_notice, write_notice
from purveyor.sources.ldap import ldap_client
from purveyor.sources.ldap.accesslog_session import AccesslogSession, find_mode
from purveyor.sources.ldap.cookie_saver import CookieSaver, RefreshRequested
from purveyor.sources.ldap.directory import Directory, Mode
from purveyor.sources.ldap.ldap_client import LdapClient
from purveyor.sources.ldap.record_writer import RecordWriter
from purveyor.sources.ldap.source_status import SourceActivity, SourceStatus
from purveyor.sources.ldap.source_store import LEASE_SECONDS, HeldSource, SourceState, SourceStore
from purveyor.sources.ldap.sync_session import Place, RefreshDue, SecretFilter, SyncSession

_log = logging.getLogger(__name__)
_UNAVAILABLE_BACKOFF: Final = Backoff(0.25, 15.0)
_REFUSED_BACKOFF: Final = Backoff(5.0, 120.0)
"""For errors that a person must correct: an account may be locked after several attempts with a wrong password."""
_CONNECT_SECONDS: Final = 10.0
_FLUSH_SECONDS: Final = 5.0
_RELEASE_SECONDS: Final = 3.0
_STATUS_SECONDS: Final = 1.0
_MOST_STANDBY_SECONDS: Final = 1.0

OnEvent = Callable[[str, str, str, Mapping[str, Any]], None]
"""Called with a source, the name of an event, a description, and further fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions:
    """What all directories of a process share."""

    find_address: Callable[[], Address]
    replicas: int = 1
    is_secret: Callable[[str], bool] = lambda _: False
    """Whether an attribute, in lower case, is dropped."""
    on_event: OnEvent = lambda _source, _event, _detail, _fields: None
    lease_seconds: float = LEASE_SECONDS


class SourceRunner:
    """One directory in this process."""

    def __init__(self, directory: Directory, options: RunnerOptions) -> None:
        self.directory = directory
        self.status = SourceStatus(directory, on_change=self._report_activity)
        self.ready = asyncio.Event()
        """Set when the queue was reached once."""
        self._options = options
        self._secrets = SecretFilter(options.is_secret)
        self._seen: SeenRevisions = {}
        self._reported_error = ""
        self._records_at_failure = 0
        self._transient, self._refused = RetryDelays(_UNAVAILABLE_BACKOFF), RetryDelays(_REFUSED_BACKOFF)
        self._changed = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Follow the directory until `stop`."""
        while not stop.is_set():
            try:
                await self._run_once(stop)
            except Exception as error:  # noqa: BLE001 - the other directories of the process go on
                await self._pause_after(error, stop)
        self.status.enter(SourceActivity.STOPPED)

    async def _pause_after(self, error: Exception, stop: asyncio.Event) -> None:
        if self.status.records > self._records_at_failure:
            self._transient.reset()
            self._refused.reset()
        self._records_at_failure = self.status.records
        self._fail(error)
        delays = self._transient if isinstance(error, PurveyorError) and error.retryable else self._refused
        await _wait(stop, delays.next_seconds(jitter=random_jitter()))

    async def _run_once(self, stop: asyncio.Event) -> None:
        options, name = self._options, f"purveyor-{self.directory.source}"
        address = options.find_address()
        async with connect(address, name=name, patience_seconds=_CONNECT_SECONDS) as queues:
            for queue in (LDIF, DEAD_LETTERS):
                (await queues.ensure(queue, replicas=options.replicas)).require_usable()
            store = await SourceStore.open(
                queues,
                replicas=options.replicas,
                lease_seconds=options.lease_seconds,
                seen=self._seen,
                instance=self.status.instance,
            )
            self.ready.set()
            reporting = asyncio.create_task(self._report_status(queues))
            working = asyncio.create_task(self._work(queues, store, stop))
            try:
                await _first_to_end(working, asyncio.create_task(self._watch_server(queues, address)))
            finally:
                await _cancel(reporting)
                if stop.is_set() and queues.connection.connected:
                    with contextlib.suppress(PurveyorError, TimeoutError):
                        async with asyncio.timeout(_RELEASE_SECONDS):
                            await delete_notice(queues, self.status.key, replicas=options.replicas)

    async def _work(self, queues: Queues, store: SourceStore, stop: asyncio.Event) -> None:
        """Follow the directory again and again while the NATS server is there; meanwhile the status is posted."""
        while not stop.is_set():
            taken = await self._take(store, stop)
            if taken is None:
                return
            try:
                await self._run_taken(queues, store, taken, stop)
            except (RefreshRequested, LeaseLost) as error:
                self._event("released", error.message)
            except Exception as error:
                if not queues.connection.connected:
                    raise
                await self._pause_after(error, stop)

    async def _watch_server(self, queues: Queues, address: Address) -> None:
        """Report that the NATS server is away, or back; raise ServerUnavailable if it is back at another address."""
        states: asyncio.Queue[str] = asyncio.Queue()
        queues.connection.on_state = states.put_nowait
        while True:
            state = await states.get()
            while state == "disconnected":
                self._event("waiting", "the NATS server is away")
                while states.empty():
                    await asyncio.sleep(_STATUS_SECONDS)
                    if self._options.find_address() != address:
                        raise ServerUnavailable("the NATS server has another address")
                state = states.get_nowait()
            self._event("connected", "the NATS server is back")

    async def _take(self, store: SourceStore, stop: asyncio.Event) -> HeldSource | None:
        """Take the source over; None if this process is stopped before another one gives it up."""
        while not stop.is_set():
            taken = await store.take(self.directory.source)
            if taken is not None:
                self.status.epoch = taken.epoch
                self.status.enter(SourceActivity.CONNECTING)
                return taken
            self.status.fix = None
            self.status.enter(SourceActivity.STANDBY)
            await _wait(stop, min(self._options.lease_seconds / RENEWALS_PER_LEASE, _MOST_STANDBY_SECONDS))
        return None

    async def _run_taken(self, queues: Queues, store: SourceStore, taken: HeldSource, stop: asyncio.Event) -> None:
        """Follow the directory while the lease is held and no operator asks for a refresh; release it at the end."""
        following = asyncio.create_task(self._follow(queues, taken, stop))
        keeping = asyncio.create_task(self._keep_lease(taken))
        watching = asyncio.create_task(self._watch_deletions(store, taken))
        try:
            await _first_to_end(following, keeping, watching)
        finally:
            if queues.connection.connected:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_RELEASE_SECONDS):
                        await taken.release()

    async def _keep_lease(self, taken: HeldSource) -> None:
        await taken.lease.keep_renewed(self._options.lease_seconds / RENEWALS_PER_LEASE)
        taken.lease.check()

    async def _watch_deletions(self, store: SourceStore, taken: HeldSource) -> None:
        async for _ in store.watch_deletions(self.directory.source, taken.revision):
            raise RefreshRequested

    async def _follow(self, queues: Queues, taken: HeldSource, stop: asyncio.Event) -> None:
        """Read and write until an error or `stop`; then store what was read."""
        reader = DirectoryReader(self.directory, self.status, self._secrets, lambda text: self._event("refresh", text))
        async with ldap_client.connect(self.directory.address) as client:
            mode = await reader.choose_mode(client)
            self.status.mode = mode.value
            saver = CookieSaver(self.directory, taken, mode)

            def on_stored(place: Place) -> None:
                if place.is_live and place.changed_at is not None:
                    self.status.lag_seconds = (datetime.now(UTC) - place.changed_at).total_seconds()
                saver.put(place)

            writer = RecordWriter[Place](
                queues,
                self.directory.subject,
                taken,
                lease_seconds=self._options.lease_seconds,
                on_stored=on_stored,
            )
            background = [asyncio.create_task(each) for each in (writer.run(), saver.run(), self._count(writer))]
            reading = asyncio.create_task(reader.run(client, mode, writer, taken, saver))
            stopping = asyncio.create_task(stop.wait())
            try:
                await asyncio.wait((*background, reading, stopping), return_when=asyncio.FIRST_COMPLETED)
            finally:
                await _cancel(reading, stopping)
                if queues.connection.connected and not any(task.done() for task in background):
                    with contextlib.suppress(TimeoutError, PurveyorError):
                        async with asyncio.timeout(_FLUSH_SECONDS):
                            await writer.flush()
                            await saver.save()
                await _cancel(*background)
            _raise_first(*background, reading)

    async def _count(self, writer: RecordWriter[Place]) -> None:
        """Show in the status what the writer does."""
        before, parked = self.status.records, self.status.parked
        try:
            while True:
                self._show_counts(writer, before, parked)
                await asyncio.sleep(_STATUS_SECONDS / 2)
        finally:
            self._show_counts(writer, before, parked)
            self.status.waiting = 0

    def _show_counts(self, writer: RecordWriter[Place], before: int, parked: int) -> None:
        status = self.status
        status.records, status.parked = before + writer.stored, parked + writer.parked
        status.waiting = writer.added - writer.stored

    async def _report_status(self, queues: Queues) -> None:
        """Write the status to the status board: once a second, and when the activity changes."""
        while True:
            self._changed.clear()
            with contextlib.suppress(PurveyorError):  # it is posted again
                await write_notice(queues, self.status.key, self.status.to_json(), replicas=self._options.replicas)
            await _wait(self._changed, _STATUS_SECONDS)

    def _report_activity(self, status: SourceStatus) -> None:
        """Print what the process does from now on."""
        base = self.directory.base
        self._changed.set()
        match status.activity:
            case SourceActivity.STANDBY:
                self._event("standby", "another process follows the directory; this one takes over if that one stops")
            case SourceActivity.REFRESHING:
                self._event("refreshing", f"reads {base}, {status.mode}")
            case SourceActivity.FOLLOWING:
                seconds = status.refresh_seconds or 0.0
                entries = "" if status.entries is None else f", {status.entries:,} entries"
                self._event(
                    "following",
                    f"follows {base}{entries}; the refresh reported {status.read:,} in {seconds:.1f} s",
                    entries=status.entries,
                    refreshed=status.read,
                    entries_per_second=round(status.rate),
                    seconds=round(seconds, 3),
                )
                self._reported_error = ""
            case _:
                pass

    def _fail(self, error: Exception) -> None:
        message, fix = (error.message, error.fix) if isinstance(error, PurveyorError) else (describe(error), None)
        if not isinstance(error, PurveyorError):
            _log.error("source %s failed: %s", self.directory.source, message, exc_info=error)
        self.status.fail(message, fix)
        if message != self._reported_error:
            self._reported_error = message
            event = "problem" if self.ready.is_set() else "waiting"
            self._event(event, f"{message}{f'; {fix}' if fix else ''}", error=message, fix=fix)

    def _event(self, event: str, detail: str, **fields: object) -> None:
        source = self.directory.source
        self._options.on_event(source, event, detail, {"source": source, **fields})


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)


async def _first_to_end(*tasks: asyncio.Task[None]) -> None:
    """Return when the first task ends, and cancel the others; raise its error, the last one first."""
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ended = [task for task in tasks if task.done()]
        await _cancel(*tasks)
    _raise_first(*reversed(ended))


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _raise_first(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error


class DirectoryReader:
    """Reads a directory into a writer: decides how, and from where, and begins again when a cookie is not valid.

    `on_notice` gets what an operator may want to know.
    """

    def __init__(
        self,
        directory: Directory,
        status: SourceStatus,
        secrets: SecretFilter,
        on_notice: Callable[[str], None],
    ) -> None:
        self._directory = directory
        self._status = status
        self._secrets = secrets
        self._on_notice = on_notice

    async def choose_mode(self, client: LdapClient) -> Mode:
        """Return how to read the changes of this server."""
        return await find_mode(client, self._directory)

    async def run(
        self, client: LdapClient, mode: Mode, writer: RecordWriter[Place], taken: HeldSource, saver: CookieSaver
    ) -> None:
        """Read until the connection ends, which is an error. Before a full refresh the stored cookie is removed."""
        state = taken.state
        cookie = self._valid_cookie(mode, state)
        self._status.entries = state.entries if state is not None and cookie is not None else None
        while True:
            if cookie is None:
                await writer.flush()  # a place before it must not be stored later
                await saver.forget()
            session = SyncSession(self._directory, writer, self._status, self._secrets, epoch=taken.epoch)
            try:
                if mode is Mode.ACCESSLOG:
                    by_log = AccesslogSession(self._directory, session, self._status, self._secrets)
                    await by_log.follow(client, cookie)
                else:
                    await session.follow(client, cookie)
            except RefreshDue as due:
                self._on_notice(f"the directory cannot continue from the cookie: {due.message}; a full refresh begins")
                cookie = None

    def _valid_cookie(self, mode: Mode, state: SourceState | None) -> str | None:
        """Return the cookie to continue from; None if a full refresh is due."""
        if state is None or state.cookie is None:
            return None
        if not state.continues(self._directory, mode):
            self._on_notice("base, filter or mode changed since the cookie was stored: a full refresh begins")
            return None
        return state.cookie

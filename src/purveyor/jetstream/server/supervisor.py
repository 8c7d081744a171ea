"""The supervisor thread of the embedded server: starts the server, restarts it, and releases the store at the end.

    starting ──answers──▶ running ──dies──▶ pause ──▶ starting on the same port ...
        │                    │                └─ died too often ─▶ failed
        │                    └─ the disk was full and has space again ─▶ starting
        └─ first start fails ─▶ failed        stop at any point ─▶ stopped

Only this thread starts, watches and stops the child. Other threads read the state and request a stop. When the thread
ends, for any reason, the child is dead and the store is free.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from purveyor.jetstream.address import Address, Tls
from purveyor.jetstream.server.config import USER, Identity, ServerOptions, client_url, quote, render, render_users
from purveyor.jetstream.server.files import Files, PortFile, StoreLock, address_of
from purveyor.jetstream.server.process import ServerBinary, ServerProcess
from purveyor.jetstream.server.server_checks import (
    DiskStatus,
    Limit,
    Space,
    check_disk,
    free_port,
    is_port_free,
    size_of,
    stored_bytes,
    why_not_ready,
)
from purveyor.model.errors import PurveyorError, ServerFailed, SetupError
from purveyor.model.retries import GiveUp, Restarts, RunEnd

logger = logging.getLogger(__name__)
_WATCH_INTERVAL_SECONDS = 0.1
_FIRST_PROBE_INTERVAL_SECONDS = 0.02
_PORT_ATTEMPTS = 5
_STORE_SIZE_INTERVAL_SECONDS = 5.0


class EventKind(Enum):
    """The kinds of events of a server."""

    STARTED = "started"
    DIED = "died"
    RESTARTED = "restarted"
    FULL = "full"
    """Its disk or its store is full: it refuses publishers until there is space."""
    ROOM_AGAIN = "room again"
    """There is space again, and the server restarts to use it."""
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """An event of the server. `pid` is its process id."""

    kind: EventKind
    detail: str
    pid: int | None = None


Listener = Callable[[ServerEvent], None]


@dataclass(frozen=True, slots=True)
class _RunFailed:
    """One run of the server ended although no stop was requested."""

    reason: str
    answered: bool
    log: str


@dataclass(frozen=True, slots=True)
class _RestartForDisk:
    """The supervisor ended a run so that the server uses the free space: it starts again at once."""


class Supervisor:
    """A supervised server. `EmbeddedServer.start` creates it after it has locked the store."""

    def __init__(
        self,
        files: Files,
        options: ServerOptions,
        store_lock: StoreLock,
        binary: ServerBinary,
        listener: Listener | None,
    ) -> None:
        self.started = False
        self.restarts = 0
        self.pid: int | None = None
        self.failure: PurveyorError | None = None
        self.settled = threading.Event()
        """The first start succeeded or failed."""
        self._files = files
        self._options = options
        self._store_lock = store_lock
        self._binary = binary
        self._listener = listener
        self._identity = _identity(files, options)
        self._port = self._choose_port()
        self._limit = Limit(0)
        self._stop_requested = threading.Event()
        # A daemon, so that a program that does not stop the server can still exit; the server ends with its parent.
        self._thread = threading.Thread(target=self._main, name="nats-server", daemon=True)

    @property
    def address(self) -> Address:
        """The address of the server. It does not change after the first start."""
        return address_of(self._ports(0), None, self._identity.password)

    def start(self) -> None:
        """Start the thread, which starts the server."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the server and wait until it has ended. Called by a listener, it does not wait."""
        self._stop_requested.set()
        if self._thread.ident is None:  # the thread never started
            self._store_lock.release()
        elif threading.current_thread() is not self._thread:
            self._thread.join()

    def _main(self) -> None:
        try:
            self._supervise()
        except PurveyorError as error:
            self.failure = error
        except Exception as error:
            logger.exception("the supervisor of %s failed", self._files.directory)
            self.failure = ServerFailed(f"the supervisor of {self._files.directory} failed: {error!r}")
        finally:
            self._files.remove_pid()
            self._store_lock.release()
            self._notify_end()
            self.settled.set()

    def _supervise(self) -> None:
        restarts = Restarts(self._options.restart)
        attempts = _PORT_ATTEMPTS
        self._configure()
        while True:
            began = time.monotonic()
            failed = self._run_once()
            if failed is None:
                return
            if isinstance(failed, _RestartForDisk):
                self._reconfigure()
                continue
            if not self.started:
                attempts -= 1
                self._choose_another_port(failed, attempts)
                continue
            now = time.monotonic()
            self._notify(EventKind.DIED, failed.reason)
            decision = restarts.decide(RunEnd(ran_seconds=now - began), now)
            if isinstance(decision, GiveUp):
                raise self._gave_up(decision.deaths, failed)
            if self._stop_requested.wait(decision.pause_seconds):
                return
            self._reconfigure()

    def _run_once(self) -> _RunFailed | _RestartForDisk | None:
        """Run the server once; None if it was stopped as requested."""
        if self._stop_requested.is_set():
            return None
        since = self._files.log_size()
        try:
            child = ServerProcess.start(self._binary.path, self._files, self._store_lock.fd)
        except SetupError as error:  # a full disk, a missing binary: counts as a failed run
            return _RunFailed(error.message, answered=False, log="")
        try:
            missing = self._await_answer(child)
            if missing is None and not self._stop_requested.is_set():
                self._on_ready(child)
                if self._watch(child):
                    return _RestartForDisk()
            if self._stop_requested.is_set():
                return None
            reason = child.exit_reason() or f"did not answer within {self._options.start_seconds:g} s ({missing})"
            return _RunFailed(reason, answered=missing is None, log=self._files.log_tail(since))
        finally:
            child.stop(self._options.stop_seconds)
            self.pid = None

    def _watch(self, child: ServerProcess) -> bool:
        """Watch the server until it ends or a stop is requested; return True if it has to restart for its disk.

        A stream whose write failed for lack of space accepts nothing until the server restarts, and the limit of the
        store is set at the start (see `server_checks`). Clients see a restart as a short pause.
        """
        disk_was_full, full_was_reported, stored, read_store_at = False, False, None, 0.0
        while not self._stop_requested.wait(_WATCH_INTERVAL_SECONDS) and child.exit_reason() is None:
            self._files.trim_log()
            if time.monotonic() >= read_store_at:
                stored = stored_bytes(self._options.host, self._port, self._identity, self._tls)
                read_store_at = time.monotonic() + _STORE_SIZE_INTERVAL_SECONDS
            try:
                space = Space.read(self._files.directory)
            except OSError as error:
                logger.warning("the usage of the disk of %s cannot be read: %s", self._files.directory, error)
                continue
            check = check_disk(space, stored, self._limit, disk_was_full=disk_was_full)
            disk_was_full = check.disk_was_full
            if check.status is DiskStatus.ROOM_AGAIN:
                self._notify(EventKind.ROOM_AGAIN, f"{check.detail}; the server starts again")
                return True
            if check.status is DiskStatus.FULL and not full_was_reported:
                self._notify(EventKind.FULL, f"{check.detail}; the server stores nothing more until there is space")
            full_was_reported = check.status is DiskStatus.FULL
        return False

    def _await_answer(self, child: ServerProcess) -> str | None:
        """Wait until the server answers (None); else return what was missing when it died, timed out or was stopped."""
        deadline = time.monotonic() + self._options.start_seconds
        interval = _FIRST_PROBE_INTERVAL_SECONDS
        while missing := why_not_ready(self._options.host, self._port, self._identity, self._tls):
            if child.exit_reason() is not None or time.monotonic() >= deadline or self._stop_requested.wait(interval):
                return missing
            interval = min(interval * 1.5, _WATCH_INTERVAL_SECONDS)
        return None

    def _on_ready(self, child: ServerProcess) -> None:
        self.pid = child.pid
        first = not self.started
        self._publish_port(child.pid, first=first)
        what = f"nats-server {self._binary.release}, {client_url(self._options.host, self._port)}, process {child.pid}"
        if first:
            self.started = True
            self._notify(EventKind.STARTED, what)
            self.settled.set()
        else:
            self.restarts += 1
            self._notify(EventKind.RESTARTED, what)

    def _publish_port(self, pid: int, *, first: bool) -> None:
        try:
            self._files.write_ports(self._ports(pid))
        except SetupError as error:
            if first:
                raise
            # The file of the first start is right except for the pid; that is no reason to stop the server.
            logger.warning("the port file is out of date: %s", error)

    def _ports(self, pid: int) -> PortFile:
        owner, tls = self._store_lock.owner, self._tls
        return PortFile(
            url=client_url(self._options.host, self._port),
            port=self._port,
            server_pid=pid,
            supervisor_pid=owner.pid,
            user=self._identity.user,
            started_at=owner.started_at,
            tls_ca=None if tls is None else str(tls.ca),
            tls_hostname=None if tls is None else tls.hostname,
        )

    @property
    def _tls(self) -> Tls | None:
        return None if self._options.tls is None else self._options.tls.client

    def _choose_port(self) -> int:
        host, requested = self._options.host, self._options.port
        if requested is not None:
            if not is_port_free(host, requested):
                raise ServerFailed(f"port {requested} on {host} is taken by another program", fix="choose another port")
            return requested
        last = self._files.last_port()
        return last if last is not None and is_port_free(host, last) else free_port(host)

    def _choose_another_port(self, failed: _RunFailed, attempts: int) -> None:
        """After a failed first start: choose another port if another program took ours in the meantime, else raise."""
        is_taken = self._options.port is None and not is_port_free(self._options.host, self._port)
        if not is_taken or attempts <= 0:
            raise self._did_not_start(failed)
        self._port = free_port(self._options.host)
        self._configure()

    def _configure(self) -> None:
        options, directory = self._options, self._files.directory
        if options.max_file_store is not None:
            self._limit = Limit(options.max_file_store, chosen=True)
        else:
            self._limit = Limit(Space.read(directory).limit_bytes(size_of(self._files.store)))
        options = replace(options, max_file_store=self._limit.size_bytes)
        self._files.write_config(render(options, self._port, directory, self._identity))

    def _reconfigure(self) -> None:
        """Write the configuration again before a restart: the limit of the store follows the disk."""
        try:
            self._configure()
        except (SetupError, OSError) as error:  # a full disk: the file of the last start is good enough
            logger.warning("the configuration of the server is the one of its last start: %s", error)

    def _did_not_start(self, failed: _RunFailed) -> ServerFailed:
        return ServerFailed(
            f"{self._binary.path} ({self._binary.release}) did not start on {self._files.directory}: "
            f"{failed.reason}{_last_lines(failed)}",
            fix=f"see {self._files.log}",
        )

    def _gave_up(self, deaths: int, failed: _RunFailed) -> ServerFailed:
        return ServerFailed(
            f"nats-server on {self._files.directory} died {deaths} times within "
            f"{self._options.restart.window_seconds:g} s, the last time: {failed.reason}"
            f"{'' if failed.answered else _last_lines(failed)}",
            fix=f"see {self._files.log}, then start it again",
        )

    def _notify_end(self) -> None:
        if self.failure is not None:
            self._notify(EventKind.FAILED, str(self.failure))
        else:
            self._notify(EventKind.STOPPED, f"nats-server on {self._files.directory} is stopped")

    def _notify(self, kind: EventKind, detail: str) -> None:
        if self._listener is None:
            return
        try:
            self._listener(ServerEvent(kind, detail, self.pid))
        except Exception:
            logger.exception(
                "a listener failed on the event %r", kind.value
            )  # the server matters more than the listener


def _identity(files: Files, options: ServerOptions) -> Identity:
    """Return a name for this run, and the users with their passwords, which are generated if they are missing."""
    passwords = {each.user: quote("password", files.ensure_password(each.user)) for each in options.users}
    others = render_users(options.users, passwords)
    return Identity(f"purveyor-{secrets.token_hex(4)}", USER, files.ensure_password(), others)


def _last_lines(failed: _RunFailed) -> str:
    return f"\n{failed.log.rstrip()}" if failed.log else ""


__all__ = ["EventKind", "Listener", "ServerEvent", "Supervisor"]

"""One run of the embedded server, from taking its store to giving it back: the thread that owns the child.

    starting ──answers──▶ running ──dies──▶ pause ──▶ starting on the same port ...
        │                    │                └─ died too often ─▶ failed
        │                    └─ the disk was full and has room again ─▶ starting
        └─ fails at first ─▶ failed           stop at any point ─▶ stopped

The thread does everything to the child itself: starts it, waits, starts it again, ends it. Other threads only read the
state and ask it to stop. When it ends, for whatever reason, the child is dead and the store is free.
"""

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from purveyor.jetstream.address import Address, Tls
from purveyor.jetstream.server.binary import ServerBinary
from purveyor.jetstream.server.config import USER, Identity, ServerOptions, quote, render, url
from purveyor.jetstream.server.disk_limit import Limit, Space, Verdict, judge, size_of
from purveyor.jetstream.server.files import Files, PortFile
from purveyor.jetstream.server.process import ServerProcess
from purveyor.jetstream.server.readiness import free_port, not_ready, port_is_free, stored_bytes
from purveyor.jetstream.server.restart_policy import GiveUp, decide
from purveyor.jetstream.server.store_lock import Claim, address_of
from purveyor.jetstream.server.users import render_users
from purveyor.model.errors import PurveyorError, ServerFailed, SetupError

logger = logging.getLogger(__name__)
_WATCH_SECONDS = 0.1
_PROBE_SECONDS = 0.02
_PORT_ATTEMPTS = 5
_STORE_LOOK_SECONDS = 5.0


class EventKind(Enum):
    """What happened to the server."""

    STARTED = "started"
    DIED = "died"
    RESTARTED = "restarted"
    FULL = "full"
    """Its disk, or its store, is full: publishers are refused until there is room."""
    ROOM_AGAIN = "room again"
    """There is room again, and the server restarts to use it."""
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """Something that happened to the server, for people to read. `pid` is the server's."""

    kind: EventKind
    detail: str
    pid: int | None = None


Listener = Callable[[ServerEvent], None]


@dataclass(frozen=True, slots=True)
class _Death:
    """How one life of the server ended without our asking."""

    reason: str
    answered: bool
    log: str


@dataclass(frozen=True, slots=True)
class _Renewal:
    """One life of the server was ended by us: it has to start again at once."""


class Run:
    """A supervised server. Made by `EmbeddedServer.start`, which has taken the store already."""

    def __init__(
        self, files: Files, options: ServerOptions, claim: Claim, binary: ServerBinary, listener: Listener | None
    ) -> None:
        self.started = False
        self.restarts = 0
        self.pid: int | None = None
        self.failure: PurveyorError | None = None
        self.settled = threading.Event()
        """The first start came to an end, good or bad."""
        self._files = files
        self._options = options
        self._claim = claim
        self._binary = binary
        self._listener = listener
        self._identity = _identity(files, options)
        self._port = self._choose_port()
        self._limit = Limit(0)
        self._stop = threading.Event()
        # A daemon, so that a program that forgets to stop can still exit; the server then goes with its parent.
        self._thread = threading.Thread(target=self._main, name="nats-server", daemon=True)

    @property
    def address(self) -> Address:
        """Where the server is. It does not change once the first start is over."""
        return address_of(self._ports(0), None, self._identity.password)

    def begin(self) -> None:
        """Start the thread, and with it the server."""
        self._thread.start()

    def end(self) -> None:
        """Ask the thread to stop the server and wait until it has. From a listener: only ask."""
        self._stop.set()
        if self._thread.ident is None:  # it never began
            self._claim.release()
        elif threading.current_thread() is not self._thread:
            self._thread.join()

    def _main(self) -> None:
        try:
            self._supervise()
        except PurveyorError as error:
            self.failure = error
        except Exception as error:
            logger.exception("the supervisor of %s broke", self._files.directory)
            self.failure = ServerFailed(f"the supervisor of {self._files.directory} broke: {error!r}")
        finally:
            self._files.forget_pid()
            self._claim.release()
            self._tell_end()
            self.settled.set()

    def _supervise(self) -> None:
        deaths = deque[float](maxlen=self._options.restart.max_deaths)
        attempts = _PORT_ATTEMPTS
        self._configure()
        while (death := self._live()) is not None:
            if isinstance(death, _Renewal):
                self._reconfigure()
                continue
            if not self.started:
                attempts -= 1
                self._another_port(death, attempts)
                continue
            deaths.append(time.monotonic())
            self._tell(EventKind.DIED, death.reason)
            decision = decide(self._options.restart, deaths)
            if isinstance(decision, GiveUp):
                raise self._gave_up(decision.deaths, death)
            if self._stop.wait(decision.pause_seconds):
                return
            self._reconfigure()

    def _live(self) -> _Death | _Renewal | None:
        """One life of the server: from its start to its death, or to None when it was stopped as asked."""
        if self._stop.is_set():
            return None
        since = self._files.log_size()
        try:
            child = ServerProcess.start(self._binary.path, self._files, self._claim.fd)
        except SetupError as error:  # the disk is full, the binary is gone: as much a death as any other
            return _Death(error.message, answered=False, log="")
        try:
            missing = self._await_answer(child)
            if missing is None and not self._stop.is_set():
                self._answers(child)
                if self._watch(child):
                    return _Renewal()
            if self._stop.is_set():
                return None
            reason = child.ended() or f"did not answer within {self._options.start_seconds:g} s ({missing})"
            return _Death(reason, answered=missing is None, log=self._files.log_tail(since))
        finally:
            child.end(self._options.stop_seconds)
            self.pid = None

    def _watch(self, child: ServerProcess) -> bool:
        """Watch a server that runs, until it ends or a stop is asked for; True if it has to start again for its disk.

        A stream whose write failed for want of space takes nothing until the server restarts, and a limit of the store
        is set at the start (see `disk`). Clients see a restart as a short pause.
        """
        disk_was_full, told, stored, look_at = False, False, None, 0.0
        while not self._stop.wait(_WATCH_SECONDS) and child.ended() is None:
            self._files.trim_log()
            if time.monotonic() >= look_at:
                stored = stored_bytes(self._options.host, self._port, self._identity, self._tls)
                look_at = time.monotonic() + _STORE_LOOK_SECONDS
            try:
                space = Space.of(self._files.directory)
            except OSError as error:
                logger.warning("the disk of %s cannot be looked at: %s", self._files.directory, error)
                continue
            look = judge(space, stored, self._limit, disk_was_full=disk_was_full)
            disk_was_full = look.disk_was_full
            if look.verdict is Verdict.ROOM_AGAIN:
                self._tell(EventKind.ROOM_AGAIN, f"{look.detail}; the server starts again")
                return True
            if look.verdict is Verdict.FULL and not told:
                self._tell(EventKind.FULL, f"{look.detail}; nothing more is stored until there is room")
            told = look.verdict is Verdict.FULL
        return False

    def _await_answer(self, child: ServerProcess) -> str | None:
        """Wait until the server answers (None); or what was missing when it died, time was over or a stop came."""
        deadline = time.monotonic() + self._options.start_seconds
        pause = _PROBE_SECONDS
        while missing := not_ready(self._options.host, self._port, self._identity, self._tls):
            if child.ended() is not None or time.monotonic() >= deadline or self._stop.wait(pause):
                return missing
            pause = min(pause * 1.5, _WATCH_SECONDS)
        return None

    def _answers(self, child: ServerProcess) -> None:
        self.pid = child.pid
        first = not self.started
        self._publish_port(child.pid, first=first)
        what = f"nats-server {self._binary.release}, {url(self._options.host, self._port)}, process {child.pid}"
        if first:
            self.started = True
            self._tell(EventKind.STARTED, what)
            self.settled.set()
        else:
            self.restarts += 1
            self._tell(EventKind.RESTARTED, what)

    def _publish_port(self, pid: int, *, first: bool) -> None:
        try:
            self._files.write_ports(self._ports(pid))
        except SetupError as error:
            if first:
                raise
            # The file of the first start is right but for the pid; a server that answers is worth more than that.
            logger.warning("the port file is out of date: %s", error)

    def _ports(self, pid: int) -> PortFile:
        owner, tls = self._claim.owner, self._tls
        return PortFile(
            url=url(self._options.host, self._port),
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
        host, wish = self._options.host, self._options.port
        if wish is not None:
            if not port_is_free(host, wish):
                raise ServerFailed(f"port {wish} on {host} is taken by another program", fix="choose another port")
            return wish
        last = self._files.last_port()
        return last if last is not None and port_is_free(host, last) else free_port(host)

    def _another_port(self, death: _Death, attempts: int) -> None:
        """After a failed first start: go on with another port if somebody else took ours meanwhile, else raise."""
        taken = self._options.port is None and not port_is_free(self._options.host, self._port)
        if not taken or attempts <= 0:
            raise self._did_not_start(death)
        self._port = free_port(self._options.host)
        self._configure()

    def _configure(self) -> None:
        options, directory = self._options, self._files.directory
        if options.max_file_store is not None:
            self._limit = Limit(options.max_file_store, chosen=True)
        else:
            self._limit = Limit(Space.of(directory).limit_bytes(size_of(self._files.store)))
        options = replace(options, max_file_store=self._limit.size_bytes)
        self._files.write_config(render(options, self._port, directory, self._identity))

    def _reconfigure(self) -> None:
        """Write the configuration again before another start: the limit of the store follows the disk."""
        try:
            self._configure()
        except (SetupError, OSError) as error:  # a full disk: the file of the start before serves as well
            logger.warning("the configuration of the server is the one of its last start: %s", error)

    def _did_not_start(self, death: _Death) -> ServerFailed:
        return ServerFailed(
            f"{self._binary.path} ({self._binary.release}) did not start on {self._files.directory}: "
            f"{death.reason}{_last_lines(death)}",
            fix=f"see {self._files.log}",
        )

    def _gave_up(self, deaths: int, death: _Death) -> ServerFailed:
        return ServerFailed(
            f"nats-server on {self._files.directory} died {deaths} times within "
            f"{self._options.restart.window_seconds:g} s, the last time: {death.reason}"
            f"{'' if death.answered else _last_lines(death)}",
            fix=f"see {self._files.log}, then start it again",
        )

    def _tell_end(self) -> None:
        if self.failure is not None:
            self._tell(EventKind.FAILED, str(self.failure))
        else:
            self._tell(EventKind.STOPPED, f"nats-server on {self._files.directory} is stopped")

    def _tell(self, kind: EventKind, detail: str) -> None:
        if self._listener is None:
            return
        try:
            self._listener(ServerEvent(kind, detail, self.pid))
        except Exception:
            logger.exception(
                "a listener failed on the event %r", kind.value
            )  # the server matters more than the listener


def _identity(files: Files, options: ServerOptions) -> Identity:
    """A name for this run, and the users with their passwords, made where they are missing."""
    passwords = {each.user: quote("password", files.ensure_password(each.user)) for each in options.users}
    others = render_users(options.users, passwords)
    return Identity(f"purveyor-{secrets.token_hex(4)}", USER, files.ensure_password(), others)


def _last_lines(death: _Death) -> str:
    return f"\n{death.log.rstrip()}" if death.log else ""


__all__ = ["EventKind", "Listener", "Run", "ServerEvent"]

"""The supervisor of all parts: it starts them in the order of their dependencies, and stops them in reverse.

`ManagedProcess` starts the process of one part, reports the events that it prints, restarts it when it dies, and stops
it. The process cannot outlive this one: on Linux the kernel signals it when its parent dies, also by kill -9.

A lock file allows one `purveyor up` for a data directory.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from purveyor.jetstream.server.process import describe_exit, tie_to_parent
from purveyor.model.errors import ServerFailed, SetupError, StoreInUse
from purveyor.model.file_lock import FileLock, LockOwner
from purveyor.model.retries import GiveUp, RestartPolicy, Restarts, RunEnd

PROGRAM: Final = (sys.executable, "-c", "from purveyor.app.cli import main; main()")
"""The command of this program."""
NATS: Final = "NATS"
PIPELINE: Final = "pipeline"
STANDBY: Final = "standby"
"""The second process of the pipeline. Which of the two runs the parts, and which one stands by, changes over time."""
API: Final = "API"
PUSH: Final = "push"
LDAP: Final = "LDAP"
_MAX_LINE_BYTES: Final = 1 << 20
_KEPT_ERROR_LINES: Final = 20
RESTART_POLICY: Final = RestartPolicy(max_deaths=None, first_pause_seconds=0.5, max_pause_seconds=30.0)
_PARTNER_PAUSE_SECONDS: Final = 5.0
"""The process that is started again becomes the standby. Its start must not slow down the one that is taking over."""
LOG: Final = "log"
"""The event of a log line in JSON, which `up` passes on unchanged."""
_READY: Final = "ready"
_STANDING_BY: Final = "standby"
"""The event of a process that has started, and waits to take over from another one."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part: its command line, and how long it may take to stop."""

    name: str
    command: tuple[str, ...]
    grace_seconds: float
    must_be_ready: bool = False
    """Whether the supervisor starts the later parts only when this one is ready."""
    inherited: tuple[int, ...] = ()
    """File descriptors that the process inherits."""
    starts_last: bool = False
    """Whether the supervisor starts it only when all others are ready, and waits for nothing of it."""
    has_partner: bool = False
    """Whether it is one of two processes of which one works and the other one stands by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """The flags of the parts; `options` stand before the command of every part."""

    options: tuple[str, ...] = ()
    with_nats: bool = True
    with_ldap: bool = False
    with_standby: bool = False
    pipeline: tuple[str, ...] = ()
    push: tuple[str, ...] = ()
    api: tuple[str, ...] = ()
    nats: tuple[str, ...] = ()
    ldap: tuple[str, ...] = ()


def make_parts(options: UpOptions) -> tuple[Part, ...]:
    """Return the parts in the order of their start; clients come after their servers, and stop before them.

    >>> [part.name for part in make_parts(UpOptions())]
    ['NATS', 'pipeline', 'push', 'API']
    >>> [part.name for part in make_parts(UpOptions(with_ldap=True))]
    ['NATS', 'pipeline', 'LDAP', 'push', 'API']
    >>> [part.name for part in make_parts(UpOptions(with_standby=True))]
    ['NATS', 'pipeline', 'standby', 'push', 'API']
    """

    def command(name: str, *flags: str) -> tuple[str, ...]:
        return (*PROGRAM, *options.options, "serve", name, "--json", *flags)

    nats = Part(NATS, command("nats", *options.nats), grace_seconds=20, must_be_ready=True)
    run_pipeline = command("pipeline", *options.pipeline)
    pipeline = Part(PIPELINE, run_pipeline, grace_seconds=60, has_partner=options.with_standby)
    return (
        *((nats,) if options.with_nats else ()),
        pipeline,
        *((replace(pipeline, name=STANDBY, starts_last=True),) if options.with_standby else ()),
        *((Part(LDAP, command("ldap", *options.ldap), grace_seconds=20),) if options.with_ldap else ()),
        Part(PUSH, command("push", *options.push), grace_seconds=20),
        Part(API, command("api", *options.api), grace_seconds=20),
    )


@dataclass(frozen=True, slots=True)
class PartEvent:
    """An event of a part, with the other fields that the part printed."""

    part: str
    event: str
    detail: str
    fields: Mapping[str, Any] = field(default_factory=dict)


OnEvent = Callable[[PartEvent], None]


class ManagedProcess:
    """Runs the process of one part from `run` to `stop`. Create it in the main thread, which starts processes."""

    def __init__(
        self,
        part: Part,
        on_event: OnEvent,
        *,
        restart_policy: RestartPolicy = RESTART_POLICY,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.part = part
        self.ready = asyncio.Event()
        """Set when the part was ready once."""
        self.is_active = False
        """Whether its process is ready, and does not stand by."""
        self._on_event = on_event
        self._restart_policy = (
            replace(restart_policy, first_pause_seconds=max(restart_policy.first_pause_seconds, _PARTNER_PAUSE_SECONDS))
            if part.has_partner
            else restart_policy
        )
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._was_ready = False
        self._error_lines: deque[str] = deque(maxlen=_KEPT_ERROR_LINES)
        self._last_errors: dict[str, str] = {}

    @property
    def pid(self) -> int | None:
        """Return the id of the process; None if none runs now."""
        process = self._process
        return None if process is None or process.returncode is not None else process.pid

    async def run(self) -> None:
        """Run until `stop`; raise ServerFailed with the error of the part if it cannot start at all."""
        restarts = Restarts(self._restart_policy)
        while not self._stopping.is_set():
            code, end = await self._run_once()
            if self._stopping.is_set():
                break
            decision = restarts.decide(end, time.monotonic())
            reason = self._error_text() or describe_exit(code)
            if isinstance(decision, GiveUp):
                raise ServerFailed(f"{self.part.name} did not start: {reason}", fix=self._fix())
            self._report("died", f"{reason}; starting again in {decision.pause_seconds:g} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), decision.pause_seconds)

    async def stop(self) -> None:
        """Stop the process; kill it with its children if it does not end within its grace period."""
        self._stopping.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), self.part.grace_seconds)
        except TimeoutError:
            self._report("killed", f"it did not stop within {self.part.grace_seconds:g} s")
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """Kill the process at once, with its children, which are in its session."""
        self._stopping.set()
        if self._process is not None and self._process.returncode is None:
            _kill_group(self._process.pid)

    async def _run_once(self) -> tuple[int, RunEnd]:
        """Start the process, and wait until it ends."""
        self._was_ready = False
        self.is_active = False
        self._error_lines.clear()
        began = time.monotonic()
        process = self._process = await asyncio.create_subprocess_exec(
            *tie_to_parent(self.part.command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self._environment,
            start_new_session=True,  # Ctrl-C in a terminal is for `up`, which stops the parts in order
            limit=_MAX_LINE_BYTES,
            pass_fds=self.part.inherited,
        )
        if self._stopping.is_set():  # `stop` came while the process was being created, and did not see it
            _kill_group(process.pid)
        assert process.stdout is not None
        assert process.stderr is not None
        readers = [
            asyncio.create_task(_read_lines(process.stdout, self._read_output)),
            asyncio.create_task(_read_lines(process.stderr, self._read_error_line)),
        ]
        code = await process.wait()
        _kill_group(process.pid)  # its children, such as a JVM, would work on for a moment
        await asyncio.wait(readers, timeout=1)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        ran_seconds = time.monotonic() - began
        # The others work without a part that starts last, so an error of its start does not end them.
        was_ready = self._was_ready or self.part.starts_last
        return code, RunEnd(ran_seconds=ran_seconds, was_ready=was_ready, exit_code=code)

    def _read_output(self, line: str) -> None:
        try:
            fields = dict(json.loads(line))
            event = str(fields.pop("event"))
        except (ValueError, TypeError, KeyError):
            self._report("output", line)
            return
        if event == "progress":
            self._progress(fields)
            return
        if event in (_READY, _STANDING_BY):
            self._was_ready = True
            self.is_active = event == _READY
            self.ready.set()
        self._report(event, str(fields.pop("detail", "")), fields)

    def _progress(self, fields: Mapping[str, Any]) -> None:
        """Report a progress line of the pipeline only if it has a new error, or if the part runs without one again."""
        name, error = str(fields.get("part")), str(fields.get("error") or "")
        last_error = self._last_errors.get(name, "")
        if error:
            if error != last_error:
                self._report("problem", f"{name} {fields.get('state')}: {error}", fields)
            self._last_errors[name] = error
        elif last_error and fields.get("state") == "running":
            self._report("recovered", f"{name} runs without an error again", fields)
            self._last_errors[name] = ""

    def _read_error_line(self, line: str) -> None:
        if line.startswith('{"'):
            self._report(LOG, line)
            return
        self._error_lines.append(line)
        if not line.startswith(("error: ", "fix: ")):
            self._report("note", line)

    def _error_text(self) -> str:
        """Return the error message with which the process ended."""
        return next((line.removeprefix("error: ") for line in self._error_lines if line.startswith("error: ")), "")

    def _fix(self) -> str | None:
        return next((line.removeprefix("fix: ") for line in self._error_lines if line.startswith("fix: ")), None)

    def _report(self, event: str, detail: str, fields: Mapping[str, Any] | None = None) -> None:
        self._on_event(PartEvent(self.part.name, event, detail, fields or {}))


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


async def _read_lines(stream: asyncio.StreamReader, on_line: Callable[[str], None]) -> None:
    while True:
        try:
            line = await stream.readline()
        except ValueError:  # longer than any line of Purveyor: the rest comes as the next line
            continue
        if not line:
            return
        on_line(line.decode(errors="replace").rstrip("\r\n"))


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
                if not process.part.starts_last:
                    await self._start(process)
            for process, _ in self._running:
                await self._wait_until_ready(process)
            for process in self._processes:
                if process.part.starts_last:
                    await self._start(process)
            yield
        finally:
            await self._stop_all()

    async def _start(self, process: ManagedProcess) -> None:
        if self._stop_requested.is_set():
            return
        self._running.append((process, asyncio.create_task(process.run())))
        if process.part.must_be_ready:
            await self._wait_until_ready(process)

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
        """Stop the parts one after another, clients before their servers.

        A process that stands by comes first: else it would take over.
        """
        place = {process: number for number, process in enumerate(self._processes)}
        while self._running:
            self._running.sort(key=lambda each: (each[0].part.has_partner and not each[0].is_active, place[each[0]]))
            process, task = self._running.pop()
            await process.stop()
            await asyncio.gather(task, return_exceptions=True)


LOCK_FILE_NAME = "up.lock"


@contextlib.contextmanager
def hold_data_dir(data_dir: Path) -> Iterator[None]:
    """Lock the directory during the block; raise StoreInUse with the process that holds the lock."""
    lock = FileLock(data_dir / LOCK_FILE_NAME)
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        is_ours = lock.try_lock()
    except OSError as error:
        raise SetupError(
            f"{data_dir} cannot be used for data: {error.strerror}", fix="choose another with --data-dir"
        ) from error
    if not is_ours:
        raise _in_use(data_dir, lock.owner())
    try:
        lock.write_owner()
        yield
    finally:
        lock.release()


def _in_use(data_dir: Path, owner: LockOwner | None) -> StoreInUse:
    if owner is None:
        return StoreInUse(
            f"`purveyor up` already runs on {data_dir}, in an unknown process",
            fix=f"find it with: fuser {data_dir / LOCK_FILE_NAME}",
        )
    return StoreInUse(
        f"`purveyor up` already runs on {data_dir}: process {owner.pid}, since {owner.started_at}",
        fix=f"use that one, or stop it with: kill {owner.pid}; or choose another --data-dir",
    )

"""The embedded NATS server: `purveyor up`, `purveyor serve nats` and the tests start it when no server is given."""

import atexit
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from purveyor.jetstream.address import Address
from purveyor.jetstream.server.config import ServerOptions
from purveyor.jetstream.server.files import Files, lock_store
from purveyor.jetstream.server.process import find_server
from purveyor.jetstream.server.supervisor import Listener, Supervisor
from purveyor.model.errors import PurveyorError, ServerFailed, ServerMissing

_DEFAULTS = ServerOptions()


class EmbeddedServer:
    """A nats-server with JetStream as a child of this process, on its own store directory.

    It is restarted when it dies, stopped with this process (on Linux also when that is killed), and the only server on
    its store. Calls block; from asyncio use `asyncio.to_thread(server.start)`. `on_event` is called in the thread that
    watches the server.

        with EmbeddedServer(Path("data/nats")) as server:
            connect(server.address)
    """

    def __init__(
        self, directory: Path, options: ServerOptions = _DEFAULTS, *, on_event: Listener | None = None
    ) -> None:
        self.directory = Path(directory).absolute()
        self.options = options
        self._on_event = on_event
        self._supervisor: Supervisor | None = None
        self._pid = os.getpid()
        self._starting = threading.Lock()

    def start(self) -> Self:
        """Start the server and wait until its JetStream answers.

        Raises StoreInUse if the store has an owner (this object included), ServerMissing or ServerTooOld without a
        usable binary, SetupError if directory, host or port cannot be used, and ServerFailed, with the last lines of
        its log, if the server does not start.
        """
        with self._starting:
            binary = find_server()
            files = Files(self.directory)
            files.prepare()
            held = lock_store(files)
            try:
                supervisor = Supervisor(files, self.options, held, binary, self._on_event)
            except BaseException:
                held.release()
                raise
            self._supervisor, self._pid = supervisor, os.getpid()
            atexit.register(self.stop)
            try:
                supervisor.start()
                supervisor.settled.wait()
            except BaseException:  # Ctrl-C while waiting
                self.stop()
                raise
        if supervisor.failure is not None and not supervisor.started:
            self.stop()
            raise supervisor.failure
        if not supervisor.started:
            raise ServerFailed(f"the server on {self.directory} was stopped before it had started")
        return self

    def stop(self) -> None:
        """Stop the server cleanly and release the store; do nothing if it is not running."""
        if self._supervisor is None or self._pid != os.getpid():  # only the process that started the server may stop it
            return
        self._supervisor.stop()
        atexit.unregister(self.stop)

    @property
    def address(self) -> Address:
        """The address with user and password. Restarts do not change it; after `stop` it is the last one."""
        if self._supervisor is None:
            raise ServerMissing(f"the server on {self.directory} was not started", fix="call start() first")
        return self._supervisor.address

    @property
    def pid(self) -> int | None:
        """The process id of the running server, as the supervisor knows it; None if none runs.

        The supervisor checks several times a second. Right after a death this is still the id of the dead process, and
        right after a restart it is None although a client may already be connected: wait for `restarts` to grow, or
        use `on_event`.
        """
        return self._supervisor.pid if self._supervisor is not None else None

    @property
    def restarts(self) -> int:
        """How often it was restarted after it died."""
        return self._supervisor.restarts if self._supervisor is not None else 0

    @property
    def failure(self) -> PurveyorError | None:
        """Why it is down for good: it did not start, or died too often. `start` tries again."""
        return self._supervisor.failure if self._supervisor is not None else None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = f"failed: {self.failure.message}" if self.failure else f"pid {self.pid}" if self.pid else "not running"
        return f"<EmbeddedServer {self.directory} {state}>"


__all__ = ["EmbeddedServer"]

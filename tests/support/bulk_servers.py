"""A nats-server with any configuration, and a proxy that cuts connections."""

import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk.net.connection import BulkConnection
from purveyor.jetstream.bulk.net.pool import RetryDeadline, close_idle, connect
from purveyor.jetstream.server.server_checks import free_port
from tests.support.waiting import PATIENCE_SECONDS, wait_until


def binary() -> str:
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    assert found, "no nats-server"
    return found


@dataclass
class Server:
    directory: Path
    config: str = ""
    process: subprocess.Popen[bytes] | None = None
    port: int = 0

    def start(self) -> "Server":
        """Start the server, on the same port and store as before if it ran before.

        The port is one that no outgoing connection takes while the server is down.
        """
        while not self._starts(self.port or free_port("127.0.0.1")):
            taken = "address already in use" in self._log()
            assert (taken, self.port) == (True, 0), self._log()  # on a first start another port does as well
        return self

    def _starts(self, port: int) -> bool:
        """Return whether the server has started on this port."""
        for left in self.directory.glob("*.ports"):
            left.unlink()
        text = f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{self.directory}/store" }}\n'
        path = self.directory / "server.conf"
        path.write_text(f'{text}ports_file_dir: "{self.directory}"\n{self.config}')
        with (self.directory / "log").open("ab") as log:
            process = subprocess.Popen([binary(), "-c", str(path)], stderr=log, stdout=log)
        written = self.directory / f"nats-server_{process.pid}.ports"
        wait_until(lambda: process.poll() is not None or (written.exists() and written.read_text().strip()))
        if process.poll() is not None:
            return False
        self.process, self.port = process, port
        return True

    def _log(self) -> str:
        return (self.directory / "log").read_text()

    def stop(self, *, kill: bool = False) -> None:
        if self.process is not None:
            (self.process.kill if kill else self.process.terminate)()
            self.process.wait(PATIENCE_SECONDS)
            self.process = None

    @property
    def address(self) -> Address:
        return Address((f"nats://127.0.0.1:{self.port}",))


@contextmanager
def serving(directory: Path, config: str = "") -> Iterator[Server]:
    server = Server(directory, config).start()
    try:
        yield server
    finally:
        close_idle()
        server.stop()


@contextmanager
def connected(address: Address) -> Iterator[BulkConnection]:
    connection = connect(address, RetryDeadline(60))
    try:
        yield connection
    finally:
        connection.close()


def request_api(address: Address, subject: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    with connected(address) as connection:
        return connection.request_api(subject, body)


def make_stream(address: Address, name: str, subjects: list[str] | None = None, **config: Any) -> None:
    base = {"name": name, "subjects": subjects or [f"{name}.>"], "allow_direct": True, "storage": "file"}
    request_api(address, f"STREAM.CREATE.{name}", {**base, **config})


def state(address: Address, name: str) -> dict[str, Any]:
    found: dict[str, Any] = request_api(address, f"STREAM.INFO.{name}")["state"]
    return found


@dataclass
class Proxy:
    """A TCP proxy that can cut connections after a number of bytes, and refuse them."""

    target: int
    port: int = 0
    down: bool = False
    cut_after_up: int | None = None
    cut_after_down: int | None = None
    """Bytes to or from the server after which the proxy cuts the connection once; then it is down if `stay_down`."""
    stay_down: bool = False
    cuts: int = 0
    refused: int = 0
    """Connections that the proxy closed at once while it was down."""
    _pairs: list[tuple[socket.socket, socket.socket]] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self.down = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS)

    @property
    def address(self) -> Address:
        return Address((f"nats://127.0.0.1:{self.port}",))

    def cut(self) -> None:
        for pair in list(self._pairs):
            for sock in pair:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.down:
                self.refused += 1
                client.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                client.close()
                continue
            self._pairs.append((client, server))
            for source, sink, up in ((client, server, True), (server, client, False)):
                thread = threading.Thread(target=self._forward, args=(source, sink, up), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _forward(self, source: socket.socket, sink: socket.socket, up: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                left = self.cut_after_up if up else self.cut_after_down
                if left is not None:
                    left -= len(data)
                    if left <= 0:
                        # Half of what was allowed still goes through, so that a frame is cut in the middle.
                        sink.sendall(data[: max(0, left + len(data)) // 2])
                        self.cut_after_up = self.cut_after_down = None
                        self.down = self.stay_down
                        self.cuts += 1
                        self.cut()
                        break
                    if up:
                        self.cut_after_up = left
                    else:
                        self.cut_after_down = left
                sink.sendall(data)
        for sock in (source, sink):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        if not up:
            source.close()
            with suppress(OSError):
                sink.close()

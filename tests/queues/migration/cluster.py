"""Three NATS servers on this machine as one cluster; each can be killed."""

import contextlib
import json
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from purveyor.queues.address import Address
from purveyor.queues.server import find_server

NODES = 3
_UP_SECONDS = 60


class Cluster:
    """The servers n0, n1 and n2."""

    def __init__(self, directory: Path, jetstream: str = "") -> None:
        self._directory = directory
        self._jetstream = jetstream
        ports = _free_ports(2 * NODES)
        self._clients, self._routes = ports[:NODES], ports[NODES:]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def address(self) -> Address:
        """All of them."""
        return Address.parse(",".join(f"nats://127.0.0.1:{port}" for port in self._clients))

    def start(self) -> None:
        """Start those that do not run."""
        binary = find_server().path
        routes = json.dumps([f"nats://127.0.0.1:{port}" for port in self._routes])
        for number in range(NODES):
            name = f"n{number}"
            if name in self._processes and self._processes[name].poll() is None:
                continue
            config = self._directory / f"{name}.conf"
            config.write_text(
                f"server_name: {name}\nlisten: 127.0.0.1:{self._clients[number]}\n"
                f'jetstream {{ store_dir: "{self._directory / name}", sync_interval: "2m", {self._jetstream} }}\n'
                f"cluster {{ name: tests, listen: 127.0.0.1:{self._routes[number]}, routes: {routes} }}\n"
            )
            with (self._directory / f"{name}.log").open("ab") as log:
                self._processes[name] = subprocess.Popen([binary, "-c", str(config)], stdout=log, stderr=log)
        for port in self._clients:
            _wait_for(port)

    def kill(self, name: str) -> None:
        """kill -9."""
        self._processes[name].send_signal(signal.SIGKILL)
        self._processes[name].wait()

    def stop(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


@contextlib.contextmanager
def cluster(directory: Path, jetstream: str = "") -> Iterator[Cluster]:
    """A cluster for the length of a block, perhaps with more settings of JetStream."""
    made = Cluster(directory, jetstream)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + _UP_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            assert time.monotonic() < deadline, "the server did not come up"
            time.sleep(0.05)
        else:
            return

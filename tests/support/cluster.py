"""A cluster of three NATS servers on this machine; a test can kill each."""

import contextlib
import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from purveyor.jetstream.address import Address
from purveyor.jetstream.server import find_server
from purveyor.jetstream.server.server_checks import free_port
from tests.support.waiting import wait_until

NODES = 3


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
        """Return the address with all servers."""
        return Address.parse(",".join(f"nats://127.0.0.1:{port}" for port in self._clients))

    def start(self) -> None:
        """Start the servers that do not run."""
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
            wait_until(lambda port=port: _takes_connections(port), what=f"a server on port {port}")  # type: ignore[misc]

    def kill(self, name: str) -> None:
        """Kill a server with SIGKILL."""
        self._processes[name].send_signal(signal.SIGKILL)
        self._processes[name].wait()

    def stop(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


@contextlib.contextmanager
def cluster(directory: Path, jetstream: str = "") -> Iterator[Cluster]:
    """Run a cluster during a block, with optional JetStream settings."""
    made = Cluster(directory, jetstream)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def _free_ports(count: int) -> list[int]:
    """Choose ports that no outgoing connection takes while a server is down."""
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port("127.0.0.1"))
    return list(found)


def _takes_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 10).close()
    except OSError:
        return False
    return True

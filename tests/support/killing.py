"""Kill the embedded server in a test, whatever its supervisor is doing at that moment."""

import os
import signal
from pathlib import Path

from purveyor.jetstream.server import EmbeddedServer
from tests.support.waiting import wait_until


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill_server(server: EmbeddedServer, how: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to the server process; wait for the process if the supervisor is still starting it.

    A client may reach a restarted server before its supervisor does: `server.pid` is still None then, or for a moment
    the id of the process that died.
    """

    def killed() -> bool:
        pid = server.pid
        if pid is None or not alive(pid):
            return False
        os.kill(pid, how)
        if how is signal.SIGKILL:  # else the next call may find the process that is dying
            wait_until(lambda: not alive(pid))
        return True

    wait_until(killed, what="a running nats-server to kill", ignoring=(ProcessLookupError,))


def restart_server(server: EmbeddedServer, how: signal.Signals = signal.SIGKILL) -> None:
    """Kill the server process and wait until the supervisor has started another one."""
    before = server.restarts
    kill_server(server, how)
    wait_until(lambda: server.restarts > before and server.pid, what="a restarted nats-server")


__all__ = ["alive", "kill_server", "restart_server"]

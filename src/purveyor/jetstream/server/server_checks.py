"""Checks of the embedded server: whether its port is free, whether it is ready, and how much disk its store may use.

Probes look at the server from outside. The rules for the disk say when the server has to restart because of it. Two
facts about nats-server make these rules necessary. It takes 75 % of the space that is free at its start as its limit,
and does not count its stored messages: a restart on a disk that is two thirds full would refuse every message. And a
stream whose write has failed for lack of space refuses all later writes until the server restarts, even if there is
space again. So the supervisor sets the limit at each start, and checks the disk while the server runs.

The limit leaves a reserve for other data on the disk: the archive, checkpoints, logs.
"""

import errno
import json
import os
import shutil
import socket
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from random import SystemRandom
from typing import Any, BinaryIO, Final

from purveyor.jetstream.address import Tls
from purveyor.jetstream.server.config import Identity, local_address
from purveyor.model.errors import SetupError

_REPLY_SUBJECT = b"_REPLY_SUBJECT.purveyor.start"
_TIMEOUT_SECONDS = 1.0
_SERVER_PORTS = range(20_000, 32_768)
"""Below the ports of outgoing connections, which begin at 32768 on Linux and 49152 elsewhere."""
_ATTEMPTS = 100
_RANDOM = SystemRandom()
_MAX_LINE_BYTES = 64 * 1024


def is_port_free(host: str, port: int) -> bool:
    """Return whether a server could listen there now."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # As the server does: connections of the last run in TIME_WAIT do not occupy the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        raise SetupError(
            f"no server can listen on {host}:{port}: {error.strerror or error}",
            fix="use an address of this machine, such as 127.0.0.1, and a port above 1023",
        ) from error
    return True


def free_port(host: str) -> int:
    """Return a port that is free now, and that the system uses for no outgoing connection.

    The server would sometimes lose a port of the system's own range while it is down for a moment: to any outgoing
    connection, even to a client that tries to reach the server and is connected to itself (TCP allows that).
    """
    for port in _RANDOM.sample(_SERVER_PORTS, _ATTEMPTS):
        if is_port_free(host, port):
            return port
    raise SetupError(f"no free port on {host}", fix="see what uses them all with: ss -tan")


def why_not_ready(host: str, port: int, identity: Identity, tls: Tls | None = None) -> str | None:
    """Return what is missing until the server of that name and its JetStream answer; None if both do."""
    answer = _read_account(host, port, identity, tls)
    if isinstance(answer, str):
        return answer
    return f"JetStream answers: {answer['error']}" if "error" in answer else None


def stored_bytes(host: str, port: int, identity: Identity, tls: Tls | None = None) -> int | None:
    """Return how many bytes the server stores in files; None if it does not answer."""
    answer = _read_account(host, port, identity, tls)
    return None if isinstance(answer, str) or "storage" not in answer else int(answer["storage"])


def _read_account(host: str, port: int, identity: Identity, tls: Tls | None) -> dict[str, Any] | str:
    """Return the account information of JetStream, or why there is none.

    The server sends its name first: if another program listens on the port, it never receives the password.
    """
    try:
        with (
            socket.create_connection((local_address(host), port), timeout=_TIMEOUT_SECONDS) as connection,
            connection.makefile("rb") as lines,
        ):
            if connection.getsockname() == connection.getpeername():
                return f"no server listens on {host}:{port}"  # connected to itself; kept open, it would take the port
            info = json.loads(lines.readline(_MAX_LINE_BYTES).removeprefix(b"INFO "))
            if info["server_name"] != identity.name:
                return f"another NATS server listens on {host}:{port}"
            if not info.get("jetstream"):
                return "JetStream is not enabled"
            if tls is None:
                connection.sendall(_info_request(identity))
                return _jetstream_answer(lines)
            with (
                closing(
                    tls.context().wrap_socket(connection, server_hostname=tls.hostname or local_address(host))
                ) as secured,
                secured.makefile("rb") as answers,
            ):
                secured.sendall(_info_request(identity))
                return _jetstream_answer(answers)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"no answer on {host}:{port}: {error}"


def _info_request(identity: Identity) -> bytes:
    credentials = {
        "verbose": False,
        "user": identity.user,
        "pass": identity.password,
        "name": "purveyor start",
        "lang": "python",
        "version": "1",
    }
    return b"CONNECT %b\r\nSUB %b 1\r\nPUB $JS.API.INFO %b 0\r\n\r\n" % (
        json.dumps(credentials).encode(),
        _REPLY_SUBJECT,
        _REPLY_SUBJECT,
    )


def _jetstream_answer(lines: BinaryIO) -> dict[str, Any] | str:
    while line := lines.readline(_MAX_LINE_BYTES):
        if line.startswith(b"-ERR"):
            return f"the server refuses: {line.decode(errors='replace').strip()}"
        if line.startswith(b"MSG "):
            answer: dict[str, Any] = json.loads(lines.read(int(line.split()[-1])))
            return answer
    return "the server closed the connection"


_MIB: Final = 1024 * 1024
_RESERVE_BYTES: Final = 1024 * _MIB
_FLOOR_BYTES: Final = 64 * _MIB
"""More than a fast disk writes between two checks of the supervisor."""
_NEARLY_FULL_SHARE: Final = 0.9
"""The share of its limit from which a store counts as full: a large message may not fit any more."""
_WORTHWHILE_FACTOR: Final = 1.1
"""A restart for a larger limit must raise it by at least this factor."""


@dataclass(frozen=True, slots=True)
class Space:
    """The file system of a store."""

    total_bytes: int
    free_bytes: int

    @classmethod
    def read(cls, directory: Path) -> "Space":
        """Read the disk usage from the system."""
        usage = shutil.disk_usage(directory)
        return cls(usage.total, usage.free)

    @property
    def floor_bytes(self) -> int:
        """With less free space than this, writes may have failed already."""
        return min(self.total_bytes // 20, _FLOOR_BYTES)

    def limit_bytes(self, stored_bytes: int) -> int:
        """Return the limit for a store of this size.

        >>> Space(total_bytes=400_000, free_bytes=100_000).limit_bytes(250_000)
        330000
        """
        reserve = min(self.total_bytes // 20, _RESERVE_BYTES, self.free_bytes // 4)
        return max(stored_bytes + self.free_bytes - reserve, 1)


@dataclass(frozen=True, slots=True)
class Limit:
    """The limit of a store, and whether the user chose it: the server never raises a chosen limit."""

    size_bytes: int
    chosen: bool = False


class DiskStatus(Enum):
    """The result of a check of the disk."""

    FINE = "fine"
    FULL = "full"
    """The server refuses publishers, or will do so soon."""
    ROOM_AGAIN = "room again"
    """The server has to restart to use the free space."""


@dataclass(frozen=True, slots=True)
class DiskCheck:
    """The result of a check, its explanation, and whether the disk has been full since the server started."""

    status: DiskStatus
    detail: str = ""
    disk_was_full: bool = False


def check_disk(space: Space, stored_bytes: int | None, limit: Limit, *, disk_was_full: bool) -> DiskCheck:
    """Evaluate the disk usage. Pure. `stored_bytes` is None if it is unknown."""
    if space.free_bytes < space.floor_bytes:
        return DiskCheck(DiskStatus.FULL, f"the disk is full: {_mib(space.free_bytes)} are free", disk_was_full=True)
    if disk_was_full:
        if space.free_bytes < 2 * space.floor_bytes:
            return DiskCheck(
                DiskStatus.FULL, f"the disk is nearly full: {_mib(space.free_bytes)} are free", disk_was_full=True
            )
        return DiskCheck(DiskStatus.ROOM_AGAIN, f"the disk was full, {_mib(space.free_bytes)} are free again")
    if stored_bytes is None or stored_bytes < _NEARLY_FULL_SHARE * limit.size_bytes:
        return DiskCheck(DiskStatus.FINE)
    was, reachable = _mib(limit.size_bytes), space.limit_bytes(stored_bytes)
    if reachable >= _WORTHWHILE_FACTOR * limit.size_bytes and not limit.chosen:
        return DiskCheck(DiskStatus.ROOM_AGAIN, f"the limit of the store rises from {was} to {_mib(reachable)}")
    return DiskCheck(DiskStatus.FULL, f"the store holds {_mib(stored_bytes)}, and its limit is {was}")


def size_of(directory: Path) -> int:
    """Return the size of all files below a directory. Files that vanish in the meantime do not count."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_size  # noqa: PTH116, PTH118 - thousands of files
            except OSError:
                continue
    return total


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:,.0f} MiB"


__all__ = [
    "DiskCheck",
    "DiskStatus",
    "Limit",
    "Space",
    "check_disk",
    "free_port",
    "is_port_free",
    "size_of",
    "stored_bytes",
    "why_not_ready",
]

"""Probes of a server from outside: whether its port is free, whether it is ready, and how much it stores."""

import errno
import json
import socket
from contextlib import closing
from random import SystemRandom
from typing import Any, BinaryIO

from purveyor.jetstream.address import Tls
from purveyor.jetstream.server.config import Identity, local_address
from purveyor.model.errors import SetupError

_REPLY_SUBJECT = b"_REPLY_SUBJECT.purveyor.start"
_TIMEOUT_SECONDS = 1.0
_SERVER_PORTS = range(20_000, 32_768)
"""Below the ports of outgoing connections, which begin at 32768 on Linux and 49152 elsewhere."""
_ATTEMPTS = 100
_RANDOM = SystemRandom()
_LONGEST_LINE = 64 * 1024


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
            info = json.loads(lines.readline(_LONGEST_LINE).removeprefix(b"INFO "))
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
    while line := lines.readline(_LONGEST_LINE):
        if line.startswith(b"-ERR"):
            return f"the server refuses: {line.decode(errors='replace').strip()}"
        if line.startswith(b"MSG "):
            answer: dict[str, Any] = json.loads(lines.read(int(line.split()[-1])))
            return answer
    return "the server closed the connection"


__all__ = ["free_port", "is_port_free", "stored_bytes", "why_not_ready"]

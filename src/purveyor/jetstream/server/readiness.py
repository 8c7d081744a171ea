"""What can be told about a server from outside: whether a port is free for it, and whether it answers as itself."""

import errno
import json
import socket
from contextlib import closing
from random import SystemRandom
from typing import Any, BinaryIO

from purveyor.jetstream.address import Tls
from purveyor.jetstream.server.config import Identity, reachable
from purveyor.model.errors import SetupError

_INBOX = b"_INBOX.purveyor.start"
_TIMEOUT_SECONDS = 1.0
_QUIET_PORTS = range(20_000, 32_768)
"""Below what systems take for outgoing connections: from 32768 on Linux, from 49152 elsewhere."""
_ATTEMPTS = 100
_RANDOM = SystemRandom()
_LONGEST_LINE = 64 * 1024


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # As the server does: connections of the last run that linger in TIME_WAIT do not occupy the port.
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
    """A port that nothing listens on at this moment, and that the system gives to no outgoing connection.

    One from the system's own range would be lost now and then, when the server is down for a moment: to any outgoing
    connection, even to a client that tries to reach the server and is connected with itself (TCP allows that).
    """
    for port in _RANDOM.sample(_QUIET_PORTS, _ATTEMPTS):
        if port_is_free(host, port):
            return port
    raise SetupError(f"no free port on {host}", fix="see what uses them all with: ss -tan")


def not_ready(host: str, port: int, identity: Identity, tls: Tls | None = None) -> str | None:
    """None if the server of that name answers there and its JetStream does too, else what is still missing."""
    answer = _account(host, port, identity, tls)
    if isinstance(answer, str):
        return answer
    return f"JetStream answers: {answer['error']}" if "error" in answer else None


def stored_bytes(host: str, port: int, identity: Identity, tls: Tls | None = None) -> int | None:
    """How much the server stores in files; None if it does not say."""
    answer = _account(host, port, identity, tls)
    return None if isinstance(answer, str) or "storage" not in answer else int(answer["storage"])


def _account(host: str, port: int, identity: Identity, tls: Tls | None) -> dict[str, Any] | str:
    """What JetStream says of its account, or why it says nothing.

    The name of the server comes first: if another program listens on the port, it never sees the password.
    """
    try:
        with (
            socket.create_connection((reachable(host), port), timeout=_TIMEOUT_SECONDS) as connection,
            connection.makefile("rb") as lines,
        ):
            if connection.getsockname() == connection.getpeername():
                return f"nobody listens on {host}:{port}"  # connected with itself; held on to, it would take the port
            info = json.loads(lines.readline(_LONGEST_LINE).removeprefix(b"INFO "))
            if info["server_name"] != identity.name:
                return f"another NATS server listens on {host}:{port}"
            if not info.get("jetstream"):
                return "JetStream is not enabled"
            if tls is None:
                connection.sendall(_ask(identity))
                return _jetstream_answer(lines)
            with (
                closing(tls.context().wrap_socket(connection, server_hostname=tls.hostname or reachable(host))) as safe,
                safe.makefile("rb") as answers,
            ):
                safe.sendall(_ask(identity))
                return _jetstream_answer(answers)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"no answer on {host}:{port}: {error}"


def _ask(identity: Identity) -> bytes:
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
        _INBOX,
        _INBOX,
    )


def _jetstream_answer(lines: BinaryIO) -> dict[str, Any] | str:
    while line := lines.readline(_LONGEST_LINE):
        if line.startswith(b"-ERR"):
            return f"the server refuses: {line.decode(errors='replace').strip()}"
        if line.startswith(b"MSG "):
            answer: dict[str, Any] = json.loads(lines.read(int(line.split()[-1])))
            return answer
    return "the server closed the connection"


__all__ = ["free_port", "not_ready", "port_is_free", "stored_bytes"]

"""Making a connection: TCP, TLS, the greeting, and the proof of who we are. One attempt, to one server."""

import json
import socket
import ssl
import time
from dataclasses import dataclass
from typing import Any, Final

from purveyor.jetstream.address import Address, Tls
from purveyor.jetstream.bulk.net.auth import prove
from purveyor.jetstream.bulk.net.connection import Link, LinkLost, ServerInfo, explain
from purveyor.model.errors import AuthenticationFailed, ServerTooOld, SetupError

OLDEST_SERVER: Final = (2, 14)
_LONGEST_LINE: Final = 1 << 20
_SOCKET_BUFFER: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Server:
    """One server to try. `tls_name` is what its certificate must say."""

    host: str
    port: int
    tls_name: str

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def servers(address: Address, discovered: tuple[str, ...] = ()) -> list[Server]:
    """Those of the address first, then what the cluster told about itself (which may be bare IP numbers)."""
    given = address.hosts()
    forced = address.tls.hostname if address.tls else None
    known = [Server(host, port, forced or host) for host, port in given]
    for other in discovered:
        host, _, port = other.rpartition(":")
        host = host.strip("[]")
        if host and port.isdigit() and (host, int(port)) not in given:
            known.append(Server(host, int(port), forced or given[0][0]))
    return known


def dial(address: Address, server: Server, timeout: float) -> Link:
    """Connect, or say why not: `LinkLost` for what may pass, `SetupError` and its kind for what will not."""
    try:
        sock = socket.create_connection((server.host, server.port), timeout=timeout)
    except (OSError, UnicodeError) as error:
        raise LinkLost(f"cannot reach {server}: {error}") from error
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER)
        return _Handshake(address, server, sock, time.monotonic() + timeout).run()
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError):
            raise LinkLost(f"cannot talk to {server}: {error}") from error
        raise


class _Handshake:
    """The talk before a link is one."""

    def __init__(self, address: Address, server: Server, sock: socket.socket, deadline: float) -> None:
        self._address = address
        self._server = server
        self._socket = sock
        self._deadline = deadline
        self._received = b""

    def run(self) -> Link:
        try:
            return self._run()
        except BaseException:
            self._socket.close()  # after TLS it is another object than the one that dial made
            raise

    def _run(self) -> Link:
        tls = self._address.tls
        if tls and tls.first:
            self._encrypt(tls)
        line = self._line()
        if not line.startswith(b"INFO "):
            raise SetupError(f"{self._server} is no NATS server", fix="check host and port")
        info: dict[str, Any] = json.loads(line[5:])
        check_version(str(info.get("version", "")), self._server)
        wants = bool(info.get("tls_required")) or tls is not None
        if wants and not (tls and tls.first):
            if not (info.get("tls_required") or info.get("tls_available")):
                raise SetupError(
                    f"{self._server} offers no TLS", fix="use nats:// instead of tls://, or set TLS up there"
                )
            if self._received:
                raise SetupError(f"{self._server} sent something between its greeting and TLS", fix="check the network")
            self._encrypt(tls or Tls())
        self._socket.sendall(b"CONNECT " + json.dumps(self._connect_fields(info)).encode() + b"\r\nPING\r\n")
        while (line := self._line()) != b"PONG":
            if line.startswith(b"-ERR"):
                raise explain(line[4:].decode("utf-8", "replace").strip().strip("'"))
        return Link(self._socket, ServerInfo.parse(info), self._received, inbox=self._address.inbox)

    def _connect_fields(self, info: dict[str, Any]) -> dict[str, Any]:
        nonce = info.get("nonce")
        return {
            "verbose": False,
            "pedantic": False,
            "lang": "python",
            "version": "purveyor",
            "name": "purveyor-bulk",
            "protocol": 1,
            "headers": True,
            "no_responders": True,
            "tls_required": isinstance(self._socket, ssl.SSLSocket),
            **prove(self._address, str(nonce) if nonce else None),
        }

    def _encrypt(self, tls: Tls) -> None:
        try:
            self._socket = tls.context().wrap_socket(self._socket, server_hostname=self._server.tls_name)
        except ssl.SSLCertVerificationError as error:
            raise SetupError(
                f"the certificate of {self._server} is not trusted: {error.verify_message}",
                fix="give the authority (CA) that signed it, and the host name it was made for",
            ) from error

    def _line(self) -> bytes:
        while b"\r\n" not in self._received:
            left = self._deadline - time.monotonic()
            if left <= 0 or len(self._received) > _LONGEST_LINE:
                raise LinkLost(f"{self._server} does not greet as a NATS server does")
            self._socket.settimeout(left)
            try:
                more = self._socket.recv(65536)
            except ssl.SSLError as error:
                raise self._tls_refused(error) from error
            if not more:
                raise LinkLost(f"{self._server} closed the connection while it was being made")
            self._received += more
        line, _, self._received = self._received.partition(b"\r\n")
        return line

    def _tls_refused(self, error: ssl.SSLError) -> Exception:
        # With TLS 1.3 a client certificate is judged after the handshake, so its refusal shows at the first read.
        if error.reason and "CERTIFICATE" in error.reason:
            return AuthenticationFailed(
                f"{self._server} does not accept the client certificate", fix="give one that its authority signed"
            )
        return LinkLost(f"TLS with {self._server} failed: {error.reason}")


def check_version(version: str, server: Server) -> None:
    """Refuse a server without the features that Purveyor stands on (batched direct get, atomic batches, reset)."""
    numbers = tuple(int("".join(ch for ch in part if ch.isdigit()) or 0) for part in version.split(".")[:2])
    if numbers < OLDEST_SERVER:
        raise ServerTooOld(
            f"the NATS server at {server} is version {version or 'unknown'}",
            fix="Purveyor needs 2.14 or newer",
        )

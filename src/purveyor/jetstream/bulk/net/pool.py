"""A pool of bulk connections: reuse an idle one, or open a new one within a retry deadline. Requests to the API on it.

To open a connection means TCP, TLS, the greeting and authentication: one attempt, to one server. Secrets leave this
module only in the CONNECT line, never in an error.

Spark reuses Python workers for the next task, so idle connections are kept per process and address. A connection is
never shared: the caller owns it until `release`. A forked child does not see the connections of its parent.
"""

import atexit
import base64
import json
import os
import re
import socket
import ssl
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import nkeys

from purveyor.jetstream.address import Address, Tls
from purveyor.jetstream.api import MIN_SERVER_VERSION
from purveyor.jetstream.bulk.net.connection import (
    REPLY_TIMEOUT_SECONDS,
    BulkConnection,
    ConnectionLost,
    ServerInfo,
    parse_server_error,
)
from purveyor.model.errors import (
    AuthenticationFailed,
    NoAnswer,
    PurveyorError,
    ServerTooOld,
    ServerUnavailable,
    SetupError,
)
from purveyor.model.retries import Backoff, RetryDelays, random_jitter

_MAX_LINE_BYTES: Final = 1 << 20
_SOCKET_BUFFER_BYTES: Final = 4 << 20
_JWT = re.compile(rb"-+BEGIN NATS USER JWT-+\s+([^\s-][^\s]*)\s+-+END NATS USER JWT-+")
_SEED = re.compile(rb"-+BEGIN USER NKEY SEED-+\s+([A-Z2-7]+)\s+-+END USER NKEY SEED-+")
_BARE_SEED = re.compile(rb"^\s*(SU[A-Z2-7]{56})\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class KeyFile:
    """The content of a credentials file: always a seed, and in a `.creds` file a JWT."""

    seed: bytes = field(repr=False)
    jwt: str | None = field(default=None, repr=False)

    def sign(self, nonce: str | None) -> dict[str, str]:
        """Return the CONNECT fields that prove possession of the seed by signing the server's nonce."""
        if not nonce:
            raise AuthenticationFailed(
                "the server asks for no signature, but the credentials are a key",
                fix="use the credentials that this server is set up for",
            )
        pair: Any = nkeys.from_seed(bytearray(self.seed))
        try:
            signature = base64.urlsafe_b64encode(pair.sign(nonce.encode())).rstrip(b"=").decode()
            who = {"jwt": self.jwt} if self.jwt else {"nkey": pair.public_key.decode()}
        finally:
            pair.wipe()
        return {**who, "sig": signature}


def parse_key_file(content: bytes, path: Path) -> KeyFile:
    """Parse a `.creds` file (JWT and seed between their markers) or a file that holds only an nkey seed."""
    jwt, seed = _JWT.search(content), _SEED.search(content)
    bare = _BARE_SEED.search(content)
    if jwt and seed:
        found = KeyFile(seed.group(1), jwt.group(1).decode())
    elif bare and not jwt:
        found = KeyFile(bare.group(1))
    else:
        raise SetupError(
            f"credentials file {path} holds neither a JWT with its seed nor an nkey seed of a user",
            fix="give a .creds file, or a file with a seed that starts with SU",
        )
    try:
        raw = base64.b32decode(found.seed + b"=" * (-len(found.seed) % 8))
        if nkeys.crc16(raw[:-2]) != int.from_bytes(raw[-2:], "little"):
            raise ValueError("checksum")  # nkeys does not check it
        nkeys.from_seed(bytearray(found.seed))
    except (nkeys.NkeysError, ValueError):
        # Without a cause: it would carry pieces of the seed.
        raise SetupError(f"the seed in {path} is damaged", fix="export the credentials again") from None
    return found


def authentication_fields(address: Address, nonce: str | None) -> dict[str, str]:
    """Return the CONNECT fields for the credentials of an address."""
    if address.credentials is not None:
        try:
            content = address.credentials.read_bytes()
        except OSError as error:
            raise SetupError(
                f"credentials file {address.credentials} cannot be read: {error.strerror}", fix="check path and rights"
            ) from error
        return parse_key_file(content, address.credentials).sign(nonce)
    if address.token is not None:
        return {"auth_token": address.token}
    if address.user is not None:
        return {"user": address.user, "pass": address.password or ""}
    return {}


@dataclass(frozen=True, slots=True)
class Server:
    """One server to try. `tls_name` is the host name that its certificate must have."""

    host: str
    port: int
    tls_name: str

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def list_servers(address: Address, discovered: tuple[str, ...] = ()) -> list[Server]:
    """Return the servers of the address, then those that the cluster reported (which may be IP addresses)."""
    given = address.hosts()
    forced = address.tls.hostname if address.tls else None
    known = [Server(host, port, forced or host) for host, port in given]
    for other in discovered:
        host, _, port = other.rpartition(":")
        host = host.strip("[]")
        if host and port.isdigit() and (host, int(port)) not in given:
            known.append(Server(host, int(port), forced or given[0][0]))
    return known


def open_connection(address: Address, server: Server, timeout: float) -> BulkConnection:
    """Connect; raise `ConnectionLost` for a failure that may pass, `SetupError` for one that will not."""
    try:
        sock = socket.create_connection((server.host, server.port), timeout=timeout)
    except (OSError, UnicodeError) as error:
        raise ConnectionLost(f"cannot reach {server}: {error}") from error
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)
        return _Handshake(address, server, sock, time.monotonic() + timeout).run()
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError):
            raise ConnectionLost(f"cannot talk to {server}: {error}") from error
        raise


class _Handshake:
    """The handshake of a new connection."""

    def __init__(self, address: Address, server: Server, sock: socket.socket, deadline: float) -> None:
        self._address = address
        self._server = server
        self._socket = sock
        self._deadline = deadline
        self._received = b""

    def run(self) -> BulkConnection:
        try:
            return self._run()
        except BaseException:
            self._socket.close()  # after TLS it is another object than the one that open_connection made
            raise

    def _run(self) -> BulkConnection:
        tls = self._address.tls
        if tls and tls.first:
            self._start_tls(tls)
        line = self._read_line()
        if not line.startswith(b"INFO "):
            raise SetupError(f"{self._server} is not a NATS server", fix="check host and port")
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
            self._start_tls(tls or Tls())
        self._socket.sendall(b"CONNECT " + json.dumps(self._connect_fields(info)).encode() + b"\r\nPING\r\n")
        while (line := self._read_line()) != b"PONG":
            if line.startswith(b"-ERR"):
                raise parse_server_error(line[4:].decode("utf-8", "replace").strip().strip("'"))
        return BulkConnection(self._socket, ServerInfo.parse(info), self._received, inbox=self._address.inbox)

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
            **authentication_fields(self._address, str(nonce) if nonce else None),
        }

    def _start_tls(self, tls: Tls) -> None:
        try:
            self._socket = tls.context().wrap_socket(self._socket, server_hostname=self._server.tls_name)
        except ssl.SSLCertVerificationError as error:
            raise SetupError(
                f"the certificate of {self._server} is not trusted: {error.verify_message}",
                fix="give the authority (CA) that signed it, and the host name it was made for",
            ) from error

    def _read_line(self) -> bytes:
        while b"\r\n" not in self._received:
            left = self._deadline - time.monotonic()
            if left <= 0 or len(self._received) > _MAX_LINE_BYTES:
                raise ConnectionLost(f"{self._server} does not greet like a NATS server")
            self._socket.settimeout(left)
            try:
                more = self._socket.recv(65536)
            except ssl.SSLError as error:
                raise self._tls_error(error) from error
            if not more:
                raise ConnectionLost(f"{self._server} closed the connection during the handshake")
            self._received += more
        line, _, self._received = self._received.partition(b"\r\n")
        return line

    def _tls_error(self, error: ssl.SSLError) -> Exception:
        # With TLS 1.3 the server checks a client certificate after the handshake: the first read reports a refusal.
        if error.reason and "CERTIFICATE" in error.reason:
            return AuthenticationFailed(
                f"{self._server} does not accept the client certificate", fix="give one that its authority signed"
            )
        return ConnectionLost(f"TLS with {self._server} failed: {error.reason}")


def check_version(version: str, server: Server) -> None:
    """Raise ServerTooOld for a server without batched direct get, atomic batches and consumer reset."""
    numbers = tuple(int("".join(ch for ch in part if ch.isdigit()) or 0) for part in version.split(".")[:2])
    if numbers < MIN_SERVER_VERSION:
        raise ServerTooOld(
            f"the NATS server at {server} is version {version or 'unknown'}",
            fix=f"Purveyor needs {'.'.join(map(str, MIN_SERVER_VERSION))} or newer",
        )


_MAX_IDLE_CONNECTIONS: Final = 4
_CONNECT_TIMEOUT_SECONDS: Final = 5.0
_CONNECT_BACKOFF: Final = Backoff(0.05, 2.0)

_lock = threading.Lock()
_idle: dict[tuple[int, Address], list[BulkConnection]] = {}
_discovered: dict[Address, tuple[str, ...]] = {}


class RetryDeadlineExceeded(ServerUnavailable):
    """The retry deadline has passed."""


class RetryDeadline:
    """The time to retry for, counted from the first failure after the last progress."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: float | None = None
        self._delays = RetryDelays(_CONNECT_BACKOFF)

    def progress(self) -> None:
        """Reset the deadline: the next failure starts it again."""
        self._since = None
        self._delays.reset()

    def pause_or_raise(self, error: PurveyorError) -> None:
        """Pause before the next attempt, longer each time; raise RetryDeadlineExceeded after the deadline."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        left = self._since + self._seconds - now
        if left <= 0:
            raise RetryDeadlineExceeded(
                f"gave up after {self._seconds:g} s: {error.message}", fix=error.fix or "is the server up?"
            ) from error
        time.sleep(min(left, self._delays.next_seconds(jitter=random_jitter())))

    def attempt_seconds(self) -> float:
        """Return the timeout of a single attempt."""
        return min(_CONNECT_TIMEOUT_SECONDS, max(self._seconds, 0.1))


def connect(address: Address, retry_deadline: RetryDeadline) -> BulkConnection:
    """Return a working connection; raise at once for wrong credentials or an unsuitable server."""
    connection = _take_idle(address)
    while connection is None:
        try:
            connection = _connect_any(address, retry_deadline.attempt_seconds())
        except ServerUnavailable as error:
            retry_deadline.pause_or_raise(error)
    return connection


def release(address: Address, connection: BulkConnection) -> None:
    """Return a connection to the pool. No request may be in flight on it."""
    with _lock:
        kept = _idle.setdefault((os.getpid(), address), [])
        if len(kept) < _MAX_IDLE_CONNECTIONS:
            kept.append(connection)
            return
    connection.close()


def close_idle() -> None:
    """Close all idle connections of this process."""
    with _lock:
        own_keys = [key for key in _idle if key[0] == os.getpid()]
        connections = [connection for key in own_keys for connection in _idle.pop(key)]
    for connection in connections:
        connection.close()


def _take_idle(address: Address) -> BulkConnection | None:
    while True:
        with _lock:
            kept = _idle.get((os.getpid(), address))
            if not kept:
                return None
            connection = kept.pop()
        try:
            # Handle what arrived while the connection was idle: a PING, or the end of the connection.
            while connection.pump(0.0):
                connection.receive()
            connection.receive()
        except PurveyorError:
            connection.close()
            continue
        return connection


def _connect_any(address: Address, timeout: float) -> BulkConnection:
    """Try each known server once, beginning with the one that worked last."""
    known = list_servers(address, _discovered.get(address, ()))
    failures: list[str] = []
    for server in _order_servers(address, known):
        try:
            connection = open_connection(address, server, timeout)
        except ConnectionLost as error:
            failures.append(error.message)
            continue
        _discovered[address] = connection.info.others
        _last_good[address] = server
        return connection
    raise ServerUnavailable("; ".join(failures), fix="is the server up, and is this its address?")


_last_good: dict[Address, Server] = {}


def _order_servers(address: Address, known: list[Server]) -> list[Server]:
    last = _last_good.get(address)
    if last in known:
        start = known.index(last)
        return known[start:] + known[:start]
    return known


atexit.register(close_idle)


def request_api(
    address: Address,
    subject: str,
    body: dict[str, Any] | None = None,
    *,
    patience_seconds: float = 60.0,
    answer_seconds: float = REPLY_TIMEOUT_SECONDS,
) -> dict[str, Any]:
    """Send a request to the JetStream API over a pooled connection; return the JSON of the reply.

    For a program without an event loop, such as the driver of a Spark query. It waits for a lost server up to
    `patience_seconds` and repeats the request if no reply comes within `answer_seconds`: use it only for requests that
    may be repeated.
    """
    retry_deadline = RetryDeadline(patience_seconds)
    while True:
        connection = connect(address, retry_deadline)
        try:
            reply = connection.request_api(subject, body, timeout=answer_seconds)
        except RetryDeadlineExceeded:
            raise
        except (ConnectionLost, NoAnswer, ServerUnavailable) as error:
            connection.close()
            retry_deadline.pause_or_raise(error)
            continue
        except BaseException:
            release(address, connection) if connection.is_usable else connection.close()
            raise
        release(address, connection)
        return reply

"""Limits for connections to the API, the count of open connections, and the TLS listener that respects both.

Every limit holds before a login: an unknown client costs a bounded amount of memory for a bounded time.
`request_limits` applies the limits to the requests of a connection.
"""

import asyncio
import contextlib
import ipaddress
import logging
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from purveyor.app.settings import DEFAULT_CONNECTIONS
from purveyor.delivery.push.egress_policy import Network, is_listed

_SPARE_CONNECTIONS: Final = 128
"""Connections beyond the limit that the API answers before it closes them. It closes any further ones at once."""
_OTHER_FILES: Final = 256
"""File descriptors that the process needs for everything else: NATS, logs, libraries."""
_IPV6_PREFIX: Final = 64
"""A provider gives each customer at least such a network, so its addresses count as one."""
_ACCEPT_RETRY_SECONDS: Final = 1.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits for one client. Bytes and seconds are for one request, unless their name says otherwise."""

    connections: int = DEFAULT_CONNECTIONS
    """Open connections of this process. One address that is no trusted proxy may have half of them."""
    header_bytes: int = 32 << 10
    """The request line and all headers together, trailers too."""
    headers: int = 100
    header_seconds: float = 10.0
    """From the first byte of a request, or from the connect, until the headers are complete."""
    body_seconds: float = 20.0
    """Until the body is complete. Each `bytes_per_second` that arrived add one second."""
    bytes_per_second: int = 8 << 10
    """The minimum speed at which a client sends a body, or reads an answer that is larger than the buffers."""
    pipelined: int = 16
    """Requests that wait on one connection for the answer to an earlier one."""
    idle_seconds: int = 75
    """An open connection without a request."""
    linger_seconds: float = 1.0
    """How long the API discards input after a refusal, so that the client can read the answer before the close."""

    def body_deadline_seconds(self, received_bytes: int) -> float:
        """Return the total time that a body may take after `received_bytes` of it have arrived.

        >>> ConnectionLimits().body_deadline_seconds(16 << 10)
        22.0
        """
        return self.body_seconds + received_bytes / self.bytes_per_second


class Admission(Enum):
    """The decision about a new connection."""

    SERVED = auto()
    REFUSED = auto()
    """The API answers 503 and closes it."""
    DROPPED = auto()
    """The API closes it without an answer."""


class Connections:
    """Counts open connections by address."""

    def __init__(self, limits: ConnectionLimits, trusted: Sequence[Network] = ()) -> None:
        self.limits = limits
        self.handshakes = 0
        """The number of TLS handshakes in progress."""
        self._trusted = trusted
        self._by_address: Counter[str] = Counter()

    def admit(self, address: str, total: int) -> Admission:
        """Count a new connection and decide about it. `total` is the number of open connections with this one."""
        group = address_group(address)
        self._by_address[group] += 1
        limit = self.limits.connections
        if total > limit + _SPARE_CONNECTIONS:
            return Admission.DROPPED
        is_address_full = self._by_address[group] > max(limit // 2, 1) and not self._is_proxy(address)
        return Admission.REFUSED if total > limit or is_address_full else Admission.SERVED

    def release(self, address: str) -> None:
        """Uncount a closed connection."""
        group = address_group(address)
        self._by_address[group] -= 1
        if self._by_address[group] <= 0:
            del self._by_address[group]

    def _is_proxy(self, address: str) -> bool:
        try:
            return is_listed(ipaddress.ip_address(address), self._trusted)
        except ValueError:
            return False


def address_group(address: str) -> str:
    """Return the key under which limits count a client: an IPv4 address, or the network of an IPv6 address.

    >>> address_group("192.0.2.7"), address_group("::ffff:192.0.2.7"), address_group("2001:db8::1:2:3:4")
    ('192.0.2.7', '192.0.2.7', '2001:db8::/64')
    """
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((found, _IPV6_PREFIX), strict=False))


def add_mapped_networks(networks: Sequence[Network]) -> tuple[Network, ...]:
    """Return networks, and for each IPv4 network the mapped one that a dual-stack IPv6 socket sees.

    >>> [network.exploded for network in add_mapped_networks([ipaddress.ip_network("10.0.0.0/8")])]
    ['10.0.0.0/8', '0000:0000:0000:0000:0000:ffff:0a00:0000/104']
    """
    mapped = (
        ipaddress.IPv6Network(f"::ffff:{each.network_address}/{96 + each.prefixlen}")
        for each in networks
        if isinstance(each, ipaddress.IPv4Network)
    )
    return (*networks, *mapped)


def raise_file_limit(connections: int) -> int:
    """Raise the open file limit of this process as far as needed and possible; return how many connections fit."""
    needed = connections + _SPARE_CONNECTIONS + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return connections
    return max(min(connections, soft - _SPARE_CONNECTIONS - _OTHER_FILES), 1)


class Handshake:
    """One TLS handshake, counted as a connection while it is in progress."""

    def __init__(self, connections: Connections, address: str, others: int) -> None:
        self._connections = connections
        self._address = address
        self._in_progress = True
        connections.handshakes += 1
        self.admission = connections.admit(address, others + connections.handshakes)

    def end(self) -> None:
        """Uncount the handshake. Further calls do nothing."""
        if self._in_progress:
            self._in_progress = False
            self._connections.handshakes -= 1
            self._connections.release(self._address)


MakeProtocol = Callable[[Handshake], asyncio.Protocol]


class TlsListener:
    """Accepts connections and performs their handshakes, within the limits of connections.

    A handshake takes memory, and uvicorn counts a connection only after it. `others` are the connections whose
    handshake is done. The listener closes a connection beyond the limits without an answer: before the handshake
    there is no way to send one.
    """

    def __init__(
        self, connections: Connections, others: Sized, context: ssl.SSLContext, make_protocol: MakeProtocol
    ) -> None:
        self._connections = connections
        self._others = others
        self._context = context
        self._make_protocol = make_protocol
        self._handshakes: set[asyncio.Task[None]] = set()

    async def run(self, listener: socket.socket) -> None:
        """Accept until cancelled. Cancelling also ends the handshakes in progress."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    accepted, peer = await loop.sock_accept(listener)
                except OSError as error:  # for example: no file descriptor is left
                    _log.warning("cannot accept a connection now: %s", error)
                    await asyncio.sleep(_ACCEPT_RETRY_SECONDS)
                    continue
                handshake = Handshake(self._connections, str(peer[0]), len(self._others))
                if handshake.admission is not Admission.SERVED:
                    handshake.end()
                    accepted.close()
                    continue
                task = loop.create_task(self._serve(accepted, handshake))
                self._handshakes.add(task)
                task.add_done_callback(self._handshakes.discard)
        finally:
            for task in self._handshakes:
                task.cancel()
            await asyncio.gather(*self._handshakes, return_exceptions=True)

    async def _serve(self, accepted: socket.socket, handshake: Handshake) -> None:
        limits = self._connections.limits
        try:
            with contextlib.suppress(OSError, TimeoutError):  # TLS errors are OSErrors
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: self._make_protocol(handshake),
                    accepted,
                    ssl=self._context,
                    ssl_handshake_timeout=limits.header_seconds,
                    ssl_shutdown_timeout=limits.linger_seconds,
                )
        finally:
            handshake.end()

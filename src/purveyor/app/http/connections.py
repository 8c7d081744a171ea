"""The limits of connections to the API, and the count of those that are open. `bounded` holds clients to them.

Every limit holds before a login: a client that nobody knows costs a bounded amount of memory for a bounded time.
"""

import ipaddress
import resource
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from purveyor.app.settings import DEFAULT_CONNECTIONS
from purveyor.delivery.push.egress_policy import Network, is_listed

_SPARE_CONNECTIONS: Final = 128
"""Connections beyond the limit that get an answer before they are closed; those beyond are closed at once."""
_OTHER_FILES: Final = 256
"""File descriptors that the process needs for everything else: NATS, logs, libraries."""
_IPV6_PREFIX: Final = 64
"""A provider gives each customer at least such a network, so its addresses count as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """What a client may take. Bytes and seconds are for one request, unless their name says otherwise."""

    connections: int = DEFAULT_CONNECTIONS
    """Open connections of this process; one address that is no trusted proxy may have half of them."""
    header_bytes: int = 32 << 10
    """The request line and all headers together, trailers too."""
    headers: int = 100
    header_seconds: float = 10.0
    """From the first byte of a request, or from the connect, until the headers are complete."""
    body_seconds: float = 20.0
    """Until the body is complete; each `bytes_per_second` that arrived add one second."""
    bytes_per_second: int = 8 << 10
    """The least speed at which a client sends a body, or reads an answer that is larger than the buffers."""
    pipelined: int = 16
    """Requests that wait on one connection for the answer to an earlier one."""
    idle_seconds: int = 75
    """An open connection without a request."""
    linger_seconds: float = 1.0
    """After a refusal: how long input is thrown away, so that the client can read the answer before the close."""

    def body_deadline_seconds(self, received_bytes: int) -> float:
        """Return the time that a body may take in all, of which so many bytes have arrived.

        >>> ConnectionLimits().body_deadline_seconds(16 << 10)
        22.0
        """
        return self.body_seconds + received_bytes / self.bytes_per_second


class Admission(Enum):
    """What becomes of a new connection."""

    SERVED = auto()
    REFUSED = auto()
    """It is answered with 503."""
    DROPPED = auto()


class Connections:
    """Counts open connections by address."""

    def __init__(self, limits: ConnectionLimits, trusted: Sequence[Network] = ()) -> None:
        self.limits = limits
        self.handshakes = 0
        """TLS handshakes under way."""
        self._trusted = trusted
        self._by_address: Counter[str] = Counter()

    def admit(self, address: str, total: int) -> Admission:
        """Count a new connection, `total` with it, and decide what becomes of it."""
        group = address_group(address)
        self._by_address[group] += 1
        most = self.limits.connections
        if total > most + _SPARE_CONNECTIONS:
            return Admission.DROPPED
        crowded = self._by_address[group] > max(most // 2, 1) and not self._is_proxy(address)
        return Admission.REFUSED if total > most or crowded else Admission.SERVED

    def leave(self, address: str) -> None:
        """Count a connection that is closed."""
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
    """Return what limits count as one client: an IPv4 address, or the network of an IPv6 address.

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


def with_mapped(networks: Sequence[Network]) -> tuple[Network, ...]:
    """Return networks, and those of IPv4 as a socket that listens on IPv6 as well sees them.

    >>> [network.exploded for network in with_mapped([ipaddress.ip_network("10.0.0.0/8")])]
    ['10.0.0.0/8', '0000:0000:0000:0000:0000:ffff:0a00:0000/104']
    """
    mapped = (
        ipaddress.IPv6Network(f"::ffff:{each.network_address}/{96 + each.prefixlen}")
        for each in networks
        if isinstance(each, ipaddress.IPv4Network)
    )
    return (*networks, *mapped)


def allow_files(connections: int) -> int:
    """Raise the limit of open files of this process as far as needed and possible; return how many connections fit."""
    needed = connections + _SPARE_CONNECTIONS + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return connections
    return max(min(connections, soft - _SPARE_CONNECTIONS - _OTHER_FILES), 1)

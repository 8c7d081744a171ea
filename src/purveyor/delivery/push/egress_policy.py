"""Which addresses push may reach: public ones, and those that the settings allow.

A host name is resolved once, all its addresses are checked, and the connection goes to one of them: a name that
resolves to another address a moment later (DNS rebinding) has no effect. Without TLS push reaches only addresses that
the settings allow.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from purveyor.model.delivery_policy import Endpoint
from purveyor.model.errors import InvalidConfig, InvalidInput, Refused, Unavailable

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def parse_ranges(texts: Iterable[str]) -> tuple[Network, ...]:
    """Parse address ranges such as `10.0.0.0/8`, or single addresses; raise InvalidConfig for an invalid one.

    >>> parse_ranges(["127.0.0.1", "10.1.0.0/16"])
    (IPv4Network('127.0.0.1/32'), IPv4Network('10.1.0.0/16'))
    """
    found = []
    for text in texts:
        try:
            found.append(ipaddress.ip_network(text.strip(), strict=False))
        except ValueError:
            raise InvalidConfig(
                f"invalid address range {text!r}", fix="write 10.0.0.0/8, 127.0.0.1 or fd00::/8"
            ) from None
    return tuple(found)


def is_public(address: Address) -> bool:
    """Return whether an address is public: not private, loopback, link-local or otherwise special.

    An IPv6 address that embeds an IPv4 address is checked by that one.

    >>> [is_public(ipaddress.ip_address(text)) for text in ("93.184.216.34", "10.0.0.1", "169.254.169.254", "::1")]
    [True, False, False, False]
    >>> is_public(ipaddress.ip_address("::ffff:127.0.0.1"))
    False
    """
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
    return address.is_global and not address.is_multicast and not address.is_reserved and not address.is_unspecified


def is_listed(address: Address, allowed: Sequence[Network]) -> bool:
    """Return whether the settings allow an address."""
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return any(each in network for network in allowed for each in (address, mapped) if each is not None)


def check_address(endpoint: Endpoint, address: Address, allowed: Sequence[Network]) -> None:
    """Raise `Refused` for an address that push must not reach."""
    listed = is_listed(address, allowed)
    if not listed and not is_public(address):
        is_literal = _literal(endpoint.host) is not None
        raise Refused(
            f"{endpoint.host} is {'' if is_literal else f'{address}, which is '}not a public address",
            fix="list it in PURVEYOR_PUSH_ALLOW if push may reach it",
        )
    if not listed and endpoint.scheme != "https":
        raise Refused(f"{endpoint.url} is not encrypted", fix=f"use https, or list {address} in PURVEYOR_PUSH_ALLOW")


def check_endpoint(url: str, allowed: Sequence[Network]) -> None:
    """Raise InvalidInput for a URL that push would refuse. Host names are resolved only when push connects."""
    endpoint = Endpoint.parse(url)
    address = _literal(endpoint.host)
    try:
        if address is not None:
            check_address(endpoint, address, allowed)
        elif endpoint.scheme != "https" and not allowed:
            raise Refused(f"{url} is not encrypted", fix="use https, or list its address in PURVEYOR_PUSH_ALLOW")
    except Refused as error:
        raise InvalidInput(error.message, fix=error.fix) from None


async def resolve(endpoint: Endpoint, allowed: Sequence[Network]) -> list[Address]:
    """Return the addresses of an endpoint. Raise `Refused` if one is not allowed, `Unavailable` if there are none."""
    literal = _literal(endpoint.host)
    if literal is not None:
        found: list[Address] = [literal]
    else:
        loop = asyncio.get_running_loop()
        try:
            answers = await loop.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise Unavailable(f"{endpoint.host} cannot be resolved: {error}", fix="check the host name") from None
        found = [ipaddress.ip_address(str(answer[4][0]).partition("%")[0]) for answer in answers]
    for address in found:
        check_address(endpoint, address, allowed)
    return list(dict.fromkeys(found))


def _literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None

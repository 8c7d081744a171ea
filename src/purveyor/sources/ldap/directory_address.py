"""Where a directory is, how to log in, and how long to wait for it."""

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from purveyor.model.errors import InvalidConfig, describe

_PORTS: Final = {"ldap": 389, "ldaps": 636}


@dataclass(frozen=True, slots=True)
class DirectoryAddress:
    """Where a directory is, and how to log in. InvalidConfig names what makes no sense."""

    uri: str
    """`ldap://host[:port]` or `ldaps://host[:port]`."""
    bind_dn: str = ""
    """The account; empty: anonymous."""
    password: str = field(default="", repr=False)
    tls_ca: Path | None = None
    """A PEM file with the authorities to trust, instead of those of the system."""
    start_tls: bool = False
    connect_seconds: float = 10.0
    """For the connection, TLS and bind, together."""
    response_seconds: float = 60.0
    """The longest silence of the server in a search."""
    refresh_seconds: float = 600.0
    """The longest silence in a refresh: a server may look through a large directory before it answers."""
    max_message_bytes: int = 256 << 20
    """The largest message that is accepted, which is the largest entry."""

    def __post_init__(self) -> None:
        scheme, _, _ = self.host_and_port()
        if self.start_tls and scheme == "ldaps":
            raise InvalidConfig(f"StartTLS with {self.uri}", fix="use ldap:// with StartTLS, or ldaps:// without it")
        if self.bind_dn and not self.password:
            raise InvalidConfig(
                f"no password for {self.bind_dn}", fix="set a password: a bind without one is anonymous to the server"
            )

    def host_and_port(self) -> tuple[str, str, int]:
        """Return scheme, host and port of the URI."""
        try:
            parts = urlsplit(self.uri)
            scheme, host, port = parts.scheme.lower(), parts.hostname, parts.port
        except ValueError as error:
            raise InvalidConfig(f"invalid LDAP URI {self.uri!r}: {error}", fix="write ldap://host:389") from None
        if scheme not in _PORTS or not host or parts.path not in {"", "/"} or parts.query or parts.username is not None:
            raise InvalidConfig(
                f"invalid LDAP URI {_without_userinfo(self.uri)!r}", fix="write ldap://host:389 or ldaps://host:636"
            )
        return scheme, host, port or _PORTS[scheme]

    def tls_context(self) -> ssl.SSLContext:
        """Return the context that checks the server's certificate."""
        try:
            return ssl.create_default_context(cafile=self.tls_ca)
        except (OSError, ssl.SSLError) as error:
            raise InvalidConfig(
                f"the authorities in {self.tls_ca} cannot be read: {describe(error)}", fix="name a PEM file"
            ) from error


def _without_userinfo(uri: str) -> str:
    """Return a URI without what stands before `@`: it may hold a password."""
    scheme, separator, rest = uri.partition("://")
    return scheme + separator + rest.rpartition("@")[2]

"""A directory to follow: where it is, how to log in, what to read of it, and the source name of its records."""

import ssl
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from purveyor.model.errors import InvalidConfig, describe
from purveyor.sources.ldap.search_filter import FilterError, encode_filter
from purveyor.sources.ldif.records import source_subject

DEFAULT_SOURCE: Final = "ldap"
DEFAULT_FILTER: Final = "(objectClass=*)"
DEFAULT_ACCESSLOG_BASE: Final = "cn=accesslog"
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
        return _parse_uri(self.uri)

    def tls_context(self) -> ssl.SSLContext:
        """Return the context that checks the server's certificate."""
        try:
            return ssl.create_default_context(cafile=self.tls_ca)
        except (OSError, ssl.SSLError) as error:
            raise InvalidConfig(
                f"the authorities in {self.tls_ca} cannot be read: {describe(error)}", fix="name a PEM file"
            ) from error


class Mode(Enum):
    """How changes are read."""

    AUTO = "auto"
    """By the accesslog if the server has it and the filter selects every entry, else by syncrepl."""
    ACCESSLOG = "accesslog"
    """Every operation in order."""
    SYNCREPL = "syncrepl"
    """The state after each change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """A directory to follow."""

    uri: str
    base: str
    source: str = DEFAULT_SOURCE
    bind_dn: str | None = None
    password: str | None = field(default=None, repr=False)
    filter: str = DEFAULT_FILTER
    mode: Mode = Mode.AUTO
    accesslog_base: str = DEFAULT_ACCESSLOG_BASE
    tls_ca: Path | None = None
    starttls: bool = False

    @property
    def subject(self) -> str:
        """The subject of its records."""
        return source_subject(self.source)

    @property
    def address(self) -> DirectoryAddress:
        """Where the server is, and how to log in."""
        return DirectoryAddress(
            self.uri,
            bind_dn=self.bind_dn or "",
            password=self.password or "",
            tls_ca=self.tls_ca,
            start_tls=self.starttls,
        )


def check_uri(uri: str) -> None:
    """Check the URI of a server."""
    _parse_uri(uri)


def _parse_uri(uri: str) -> tuple[str, str, int]:
    """Return scheme, host and port. An error about a URI with a user does not contain it: it may hold a password."""
    if "@" in unquote(uri):
        raise InvalidConfig(
            "invalid LDAP URI: it names a user", fix="leave the user out; set the bind DN and the password"
        )
    wrong = InvalidConfig(f"invalid LDAP URI {uri!r}", fix="use ldap://host:port or ldaps://host:port")
    try:
        parts = urlsplit(uri)
        scheme, host, port = parts.scheme, parts.hostname, parts.port
    except ValueError:  # unbalanced brackets, or a port that is not a number
        raise wrong from None
    if scheme not in _PORTS or not host or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise wrong
    return scheme, host, port or _PORTS[scheme]


def check_source_name(name: str) -> None:
    """Check the name of a source."""
    source_subject(name)


def check_base(base: str) -> None:
    """Check that a text looks like a distinguished name."""
    if "=" not in base or not base.isprintable():
        raise InvalidConfig(f"{base!r} is not a distinguished name", fix="give one such as dc=example,dc=org")


def check_filter(text: str) -> None:
    """Check that a text is a search filter."""
    if not text.startswith("("):
        raise InvalidConfig(f"{text!r} is not an LDAP filter", fix="write it in parentheses: (objectClass=person)")
    try:
        encode_filter(text)
    except FilterError as error:
        raise InvalidConfig(error.message, fix=f"correct it: {error.message}") from None

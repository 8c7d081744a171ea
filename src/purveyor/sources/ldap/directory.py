"""A directory to follow: where it is, what to read of it, and under which name its records are stored."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from purveyor.model.errors import InvalidConfig
from purveyor.sources.ldap.directory_address import DirectoryAddress
from purveyor.sources.ldap.search_filter import FilterError, encode_filter
from purveyor.sources.ldif.records import source_subject

DEFAULT_SOURCE: Final = "ldap"
DEFAULT_FILTER: Final = "(objectClass=*)"
DEFAULT_ACCESSLOG_BASE: Final = "cn=accesslog"
_PORTS: Final = {"ldap": 389, "ldaps": 636}


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
    """Check the URI of a server. The error does not contain the URI, which may hold a password."""
    wrong = InvalidConfig("not the URI of a directory", fix="use ldap://host:port or ldaps://host:port")
    try:
        parts = urlsplit(uri)
        host, _ = parts.hostname, parts.port
    except ValueError:  # unbalanced brackets, or a port that is not a number
        raise wrong from None
    if "@" in unquote(parts.netloc):
        raise InvalidConfig("a URI with a user", fix="leave the user out; set the bind DN and the password")
    if parts.scheme not in _PORTS or not host or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise wrong


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

"""The addresses of NATS servers, with credentials and TLS. Plain data, sent to executors; its repr hides secrets."""

import ssl
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from purveyor.model.errors import InvalidConfig, SetupError
from purveyor.model.name_rules import check_subject

DEFAULT_PORT = 4222
DEFAULT_INBOX = "_INBOX"
_SCHEMES = ("nats", "tls")


@dataclass(frozen=True, slots=True)
class Tls:
    """Files for TLS: the trusted authorities (default: those of the system) and an optional client certificate."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    hostname: str | None = None
    first: bool = False
    """Start TLS before the server's greeting (`handshake_first` in its configuration)."""

    def context(self) -> ssl.SSLContext:
        """Return the context for a connection; raise SetupError for a missing or invalid file."""
        for path in (self.ca, self.certificate, self.key):
            if path is not None and not path.is_file():
                raise SetupError(f"TLS file {path} does not exist", fix="check the path")
        try:
            context = ssl.create_default_context(cafile=str(self.ca) if self.ca else None)
            if self.certificate:
                context.load_cert_chain(str(self.certificate), str(self.key) if self.key else None)
        except ssl.SSLError as error:
            raise SetupError(
                f"TLS files cannot be used: {error}", fix="give PEM files, and the key of the certificate"
            ) from error
        return context


@dataclass(frozen=True, slots=True)
class Address:
    """One server or a cluster, with credentials: a user and password, a token, a `.creds` file or an nkey seed file.

    >>> Address.parse("nats://ada:s3cret@127.0.0.1:4222")
    Address(urls=('nats://127.0.0.1:4222',), user='ada', credentials=None, tls=None)
    """

    urls: tuple[str, ...]
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)
    credentials: Path | None = None
    tls: Tls | None = None
    inbox: str = field(default=DEFAULT_INBOX, repr=False)
    """The prefix of the subjects for replies. A user with restricted permissions has its own prefix."""

    def __post_init__(self) -> None:
        check_subject(self.inbox)

    @classmethod
    def parse(
        cls,
        urls: str,
        *,
        credentials: str | Path | None = None,
        tls: Tls | None = None,
        inbox: str = DEFAULT_INBOX,
    ) -> "Address":
        """Parse `nats://[user:password@]host[:port][,...]`; `tls://` means TLS with the system's authorities."""
        clean: list[str] = []
        user = password = token = None
        for part in (piece.strip() for piece in urls.split(",")):
            try:
                split = urlsplit(part if "://" in part else f"nats://{part}")
                host, port = split.hostname, split.port or DEFAULT_PORT
            except ValueError:  # unbalanced brackets, or a port that is not a number
                split, host, port = urlsplit(""), None, 0
            if split.scheme not in _SCHEMES or not host:
                shown = part.partition("://")[0] + "://" if "://" in part else ""
                shown += part.rpartition("://")[2].rpartition("@")[2]
                raise InvalidConfig(f"invalid NATS address {shown!r}", fix="write nats://host:4222 or tls://host:4222")
            if split.scheme == "tls" and tls is None:
                tls = Tls()
            clean.append(f"{split.scheme}://{f'[{host}]' if ':' in host else host}:{port}")
            if split.username and split.password is not None:
                user, password = unquote(split.username), unquote(split.password)
            elif split.username:
                token = unquote(split.username)
        path = Path(credentials) if credentials else None
        if path is not None and not path.is_file():
            raise SetupError(f"credentials file {path} does not exist", fix="check PURVEYOR_NATS_CREDENTIALS")
        return cls(tuple(clean), user=user, password=password, token=token, credentials=path, tls=tls, inbox=inbox)

    def hosts(self) -> list[tuple[str, int]]:
        """Return host and port of each server, in the given order."""
        return [(split.hostname or "", split.port or DEFAULT_PORT) for split in map(urlsplit, self.urls)]

    def with_password(self, user: str, password: str) -> "Address":
        """Return the same servers with another user."""
        return replace(self, user=user, password=password, token=None, credentials=None)

    def __str__(self) -> str:
        return ",".join(self.urls)


__all__ = ["DEFAULT_INBOX", "DEFAULT_PORT", "Address", "Tls"]

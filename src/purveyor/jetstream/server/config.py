"""What can be chosen about the embedded server, and the pure rendering of it into nats-server's configuration file."""

import json
import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from purveyor.jetstream.address import Tls
from purveyor.jetstream.server.restart_policy import RestartPolicy
from purveyor.jetstream.server.users import Permissions
from purveyor.model.errors import InvalidConfig

USER = "purveyor"
SYNC_ALWAYS = "always"
MAX_PAYLOAD_LIMIT = 64 * 1024 * 1024
"""nats-server buffers no more than this for a client, so no message can be larger."""

_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h))+")
_WILDCARD_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared with, not bound to
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    """The certificate that the server shows, and how clients on this machine judge it.

    They trust `ca`, or else this very certificate; `hostname` is for one that was not made for the address that they
    connect to.
    """

    certificate: Path
    key: Path
    ca: Path | None = None
    hostname: str | None = None

    def __post_init__(self) -> None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(self.certificate, self.key)
        except OSError as error:  # that of TLS is one as well
            raise InvalidConfig(
                f"the certificate {self.certificate} and the key {self.key} are no good for the NATS server: {error}",
                fix="both must be PEM, the key matching",
            ) from None

    @property
    def client(self) -> Tls:
        """For a client on this machine."""
        return Tls(ca=(self.ca or self.certificate).absolute(), hostname=self.hostname)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How the embedded server runs. The defaults are the safe choice: loopback only, every write synced to disk.

    `port` None takes the port of the last run if it is still free, else any free one. `sync` is "always", or how long
    acknowledged messages may stay only in the system's memory ("2m": faster, and lost if the machine loses power).
    `max_file_store` limits the disk used, in bytes. The server has `users` beside the one that may do everything.
    """

    port: int | None = None
    host: str = "127.0.0.1"
    sync: str = SYNC_ALWAYS
    max_payload: int = 8 * 1024 * 1024
    max_file_store: int | None = None
    tls: ServerTls | None = None
    users: tuple[Permissions, ...] = ()
    start_seconds: float = 120.0
    """How long a start may take: a large store is read through first."""
    stop_seconds: float = 10.0
    """How long a clean stop may take before the server is killed."""
    restart: RestartPolicy = field(default_factory=RestartPolicy)

    def __post_init__(self) -> None:
        if self.port is not None and not 1 <= self.port <= 65535:
            raise InvalidConfig(f"invalid port {self.port}", fix="use 1 to 65535, or none for a free one")
        if not self.host or _CONTROL.search(self.host) or " " in self.host:
            raise InvalidConfig(f"invalid host {self.host!r}", fix="use an address of this machine, such as 127.0.0.1")
        check_sync(self.sync)
        if not 1024 <= self.max_payload <= MAX_PAYLOAD_LIMIT:
            raise InvalidConfig(f"invalid max_payload {self.max_payload}", fix="use 1 KB to 64 MB, in bytes")
        if self.max_file_store is not None and self.max_file_store < 1:
            raise InvalidConfig(f"invalid max_file_store {self.max_file_store}", fix="use a number of bytes, or none")
        if self.start_seconds <= 0 or self.stop_seconds <= 0:
            raise InvalidConfig(
                "start_seconds and stop_seconds must be positive", fix="leave them out for the defaults"
            )


@dataclass(frozen=True, slots=True)
class Identity:
    """Who the server is and who may speak with it: one that may do everything, and `others` as their configuration."""

    name: str
    user: str
    password: str = field(repr=False)
    others: str = field(default="", repr=False)


def check_sync(sync: str) -> str:
    """`always`, or a duration above zero such as 500ms, 10s or 2m.

    >>> check_sync("1m30s")
    '1m30s'
    """
    if sync == SYNC_ALWAYS:
        return sync
    if not _DURATION.fullmatch(sync) or not re.search(r"[1-9]", sync):
        raise InvalidConfig(f"invalid sync {sync!r}", fix='use "always", or a duration such as "500ms", "10s" or "2m"')
    return sync


def url(host: str, port: int) -> str:
    """Where a client on this machine reaches a server that listens on this host and port.

    >>> url("0.0.0.0", 4222), url("::1", 4222)
    ('nats://127.0.0.1:4222', 'nats://[::1]:4222')
    """
    near = reachable(host)
    return f"nats://[{near}]:{port}" if ":" in near else f"nats://{near}:{port}"


def reachable(host: str) -> str:
    """The host to connect to on this machine when the server listens on `host`."""
    return _WILDCARD_HOSTS.get(host, host)


def render(options: ServerOptions, port: int, directory: Path, identity: Identity) -> str:
    """The text of nats.conf. It holds the passwords, so the file is for its owner only."""
    jetstream = [
        f"store_dir: {quote('store directory', str(directory))}",
        f"sync_interval: {quote('sync', options.sync)}",
    ]
    if options.max_file_store is not None:
        jetstream.append(f"max_file_store: {options.max_file_store}")
    return "\n".join(
        [
            "# Written at every start of the server; changes made here are lost.",
            f"server_name: {quote('name', identity.name)}",
            f"host: {quote('host', options.host)}",
            f"port: {port}",
            f"max_payload: {options.max_payload}",
            *_tls(options.tls),
            "authorization {",
            "  users: [",
            f"    {{ user: {quote('user', identity.user)}, password: {quote('password', identity.password)} }}",
            *(f"    {line}" for line in identity.others.splitlines()),
            "  ]",
            "}",
            "jetstream {",
            *(f"  {line}" for line in jetstream),
            "}",
            "",
        ]
    )


def _tls(tls: ServerTls | None) -> list[str]:
    if tls is None:
        return []
    files = (("cert_file", tls.certificate), ("key_file", tls.key))
    return ["tls {", *(f"  {name}: {quote(name, str(path.absolute()))}" for name, path in files), "}"]


def quote(what: str, text: str) -> str:
    """A quoted string of nats.conf."""
    # A quoted string of nats.conf knows the escapes \" and \\ of JSON, but not \u: other characters stay as they are.
    # The text itself is not shown in errors: it may be the password.
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidConfig(f"the {what} is not valid UTF-8, as nats.conf must be", fix="rename it") from None
    if _CONTROL.search(text):
        raise InvalidConfig(f"the {what} has control characters, which nats.conf cannot hold", fix="leave them out")
    return json.dumps(text, ensure_ascii=False)


__all__ = [
    "MAX_PAYLOAD_LIMIT",
    "SYNC_ALWAYS",
    "USER",
    "Identity",
    "ServerOptions",
    "ServerTls",
    "check_sync",
    "quote",
    "reachable",
    "render",
    "url",
]

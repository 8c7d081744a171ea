"""The options and users of the embedded server, and the text of the nats-server configuration file. Pure."""

import json
import re
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from purveyor.jetstream.address import DEFAULT_INBOX, Tls
from purveyor.model.errors import InvalidConfig
from purveyor.model.retries import RestartPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
    """A user and its permissions. A denied subject is denied even if another entry allows it."""

    user: str
    purpose: str
    publish: tuple[str, ...]
    publish_denied: tuple[str, ...] = ()
    listen: tuple[str, ...] = ()
    """The subjects that it may subscribe to, besides its inbox."""

    @property
    def inbox(self) -> str:
        """The prefix of its reply subjects."""
        return f"{DEFAULT_INBOX}.{self.user}"

    @property
    def subscribe(self) -> tuple[str, ...]:
        """All subjects that it may subscribe to."""
        return (f"{self.inbox}.>", *self.listen)

    def to_json(self) -> dict[str, object]:
        """Return the permissions as JSON."""
        return {
            "user": self.user,
            "purpose": self.purpose,
            "inbox": self.inbox,
            "publish": {"allow": list(self.publish), "deny": list(self.publish_denied)},
            "subscribe": {"allow": list(self.subscribe)},
        }


def render_users(users: Iterable[Permissions], passwords: Mapping[str, str]) -> str:
    """Return the users in the format of nats.conf, for the list `users` of `authorization`.

    `passwords` are values of that file: quoted, or a `$VARIABLE`.
    """
    lines: list[str] = []
    for each in users:
        lines += [
            f"# {each.purpose}; answers come to {each.inbox}",
            f"{{ user: {_quoted(each.user)}, password: {passwords[each.user]}, permissions: {{",
            *_list("publish", each.publish, each.publish_denied),
            *_list("subscribe", each.subscribe),
            "} }",
        ]
    return "\n".join(lines)


def _list(what: str, allowed: Iterable[str], denied: Iterable[str] = ()) -> list[str]:
    lines = [f"  {what}: {{"]
    for key, subjects in (("allow", tuple(allowed)), ("deny", tuple(denied))):
        if subjects:
            lines += [f"    {key}: [", *(f"      {_quoted(subject)}" for subject in subjects), "    ]"]
    return [*lines, "  }"]


def _quoted(text: str) -> str:
    return json.dumps(text)


USER = "purveyor"
SYNC_ALWAYS = "always"
MAX_PAYLOAD_LIMIT = 64 * 1024 * 1024
"""nats-server buffers no more than this for a client, so no message can be larger."""

_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:ms|s|m|h))+")
_WILDCARD_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - compared with, not bound to
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    """The certificate of the server, and how clients on this machine verify it.

    They trust `ca`, or else this certificate; `hostname` is the name in a certificate that was not issued for the
    address that they connect to.
    """

    certificate: Path
    key: Path
    ca: Path | None = None
    hostname: str | None = None

    def __post_init__(self) -> None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(self.certificate, self.key)
        except OSError as error:  # ssl.SSLError is one too
            raise InvalidConfig(
                f"the NATS server cannot use the certificate {self.certificate} and the key {self.key}: {error}",
                fix="both must be PEM, the key matching",
            ) from None

    @property
    def client(self) -> Tls:
        """The TLS settings of a client on this machine."""
        return Tls(ca=(self.ca or self.certificate).absolute(), hostname=self.hostname)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How the embedded server runs. The defaults are the safe choice: loopback only, every write synced to disk.

    `port` None takes the port of the last run if it is still free, else any free one. `sync` is "always", or how long
    acknowledged messages may stay only in the system's memory ("2m": faster, and lost if the machine loses power).
    `max_file_store` limits the disk used, in bytes. The server has `users` besides the administrator.
    """

    port: int | None = None
    host: str = "127.0.0.1"
    sync: str = SYNC_ALWAYS
    max_payload: int = 16 * 1024 * 1024
    max_file_store: int | None = None
    tls: ServerTls | None = None
    users: tuple[Permissions, ...] = ()
    start_seconds: float = 120.0
    """How long a start may take: the server first reads its store."""
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
    """The name of the server, its administrator, and the configuration text of the other users."""

    name: str
    user: str
    password: str = field(repr=False)
    others: str = field(default="", repr=False)


def check_sync(sync: str) -> str:
    """Check a sync setting: `always`, or a duration above zero such as 500ms, 10s or 2m.

    >>> check_sync("1m30s")
    '1m30s'
    """
    if sync == SYNC_ALWAYS:
        return sync
    if not _DURATION.fullmatch(sync) or not re.search(r"[1-9]", sync):
        raise InvalidConfig(f"invalid sync {sync!r}", fix='use "always", or a duration such as "500ms", "10s" or "2m"')
    return sync


def client_url(host: str, port: int) -> str:
    """Return the URL for clients on this machine of a server that listens on this host and port.

    >>> client_url("0.0.0.0", 4222), client_url("::1", 4222)
    ('nats://127.0.0.1:4222', 'nats://[::1]:4222')
    """
    address = local_address(host)
    return f"nats://[{address}]:{port}" if ":" in address else f"nats://{address}:{port}"


def local_address(host: str) -> str:
    """Return the host that clients on this machine connect to if the server listens on `host`."""
    return _WILDCARD_HOSTS.get(host, host)


def render(options: ServerOptions, port: int, directory: Path, identity: Identity) -> str:
    """Return the text of nats.conf. It contains the passwords, so only the owner may read the file."""
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
    """Return a quoted string of nats.conf."""
    # A quoted string of nats.conf has the escapes \" and \\ of JSON, but not \u: other characters stay unchanged.
    # Errors do not show the text: it may be the password.
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
    "client_url",
    "local_address",
    "quote",
    "render",
]

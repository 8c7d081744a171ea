"""The API on a socket: uvicorn, with a stop that does not wait for long polls."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import uvicorn

from purveyor.app.http.application import Api, create_app
from purveyor.app.http.connections import (
    ConnectionLimits,
    Connections,
    Handshake,
    TlsListener,
    add_mapped_networks,
    raise_file_limit,
)
from purveyor.app.http.request_limits import LimitedProtocol
from purveyor.app.http.uvicorn_adapter import SocketServer
from purveyor.delivery.push.egress_policy import Network
from purveyor.model.errors import InvalidConfig, SetupError

_SHUTDOWN_GRACE_SECONDS: Final = 10
_BACKLOG: Final = 2048
_log = logging.getLogger(__name__)


class ApiServer(SocketServer):
    """Serves one `Api`. Call `stop` from the event loop, or from a signal handler of the loop.

    The address of a client is that of its connection, unless that is one of `trusted_proxies`: then it is the last
    address in `X-Forwarded-For` that is no trusted proxy.
    """

    def __init__(
        self,
        api: Api,
        *,
        tls: tuple[Path, Path] | None = None,
        limits: ConnectionLimits | None = None,
        trusted_proxies: Sequence[Network] = (),
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        limits = _fit_file_limit(limits or ConnectionLimits())
        self._connection_counts = Connections(limits, trusted_proxies)
        self._tls = None if tls is None else _tls_context(*tls)
        self._accepting: list[asyncio.Task[None]] = []
        self.app = create_app(api)
        protocol: Any = partial(LimitedProtocol, self._connection_counts)
        super().__init__(
            uvicorn.Config(
                self.app,
                http=protocol,
                ws="none" if api.console is None else "websockets-sansio",
                lifespan="on",
                log_config=None,
                access_log=logging.getLogger().isEnabledFor(logging.DEBUG),
                proxy_headers=bool(trusted_proxies),
                forwarded_allow_ips=[*map(str, add_mapped_networks(trusted_proxies))],
                server_header=False,
                backlog=_BACKLOG,
                timeout_graceful_shutdown=_SHUTDOWN_GRACE_SECONDS,
                timeout_keep_alive=limits.idle_seconds,
            )
        )
        self._api = api
        self._on_ready = on_ready
        self.accepts_connections_itself = self._tls is not None

    def after_startup(self, sockets: Sequence[socket.socket]) -> None:
        """Accept TLS connections if there is a certificate, and report that the API listens."""
        if self._tls is not None:
            listener = TlsListener(self._connection_counts, self.connections, self._tls, self._make_protocol)
            for each in sockets:
                each.listen(_BACKLOG)
                self._accepting.append(asyncio.create_task(listener.run(each)))
        if self._on_ready is not None:
            self._on_ready()

    async def before_shutdown(self) -> None:
        """Stop accepting TLS connections."""
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)

    def _make_protocol(self, handshake: Handshake) -> asyncio.Protocol:
        return LimitedProtocol(self._connection_counts, handshake, **self.protocol_arguments())

    def stop(self) -> None:
        """Stop: answer requests in progress, and long polls at once. A second call does not wait for them."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self._api.stopping.set()


def _fit_file_limit(limits: ConnectionLimits) -> ConnectionLimits:
    """Return limits that the open file limit of the process allows."""
    possible = raise_file_limit(limits.connections)
    if possible < limits.connections:
        _log.warning("the API serves at most %d connections: the open file limit allows no more", possible)
    return replace(limits, connections=possible)


def listen(host: str, port: int) -> socket.socket:
    """Return a bound socket. Binding first reports an occupied port before anything else starts."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InvalidConfig(f"the API cannot listen at {host!r}: {error.strerror}", fix="check api_host") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(where)
    except OSError as error:
        bound.close()
        raise SetupError(
            f"the API cannot listen at {host} port {port}: {error.strerror}",
            fix="stop the program that uses it, or choose another with --port or PURVEYOR_API_PORT; 0 is a free one",
        ) from None
    bound.setblocking(False)
    return bound


def check_tls(cert: Path | None, key: Path | None) -> tuple[Path, Path] | None:
    """Return the certificate and its key; None if neither is set. Raise InvalidConfig if they do not fit together."""
    if (cert is None) != (key is None):
        raise InvalidConfig("a certificate without its key, or a key without its certificate", fix="give both")
    if cert is None or key is None:
        return None
    try:
        _tls_context(cert, key)
    except OSError as error:  # TLS errors are OSErrors
        raise InvalidConfig(
            f"the certificate {cert} and the key {key} cannot be used: {error}", fix="check both files"
        ) from None
    return cert, key


def _tls_context(cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    return context

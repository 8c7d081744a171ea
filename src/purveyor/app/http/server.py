"""The API on a socket: uvicorn, with a stop that does not wait for long polls."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import uvicorn

from purveyor.app.http.application import Api, create_app
from purveyor.app.http.connections import ConnectionLimits, Connections, allow_files, with_mapped
from purveyor.app.http.request_limits import BoundedProtocol
from purveyor.app.http.tls import Handshake, TlsListener
from purveyor.delivery.push.egress_policy import Network
from purveyor.model.errors import InvalidConfig, SetupError

_GRACE_SECONDS: Final = 10
_BACKLOG: Final = 2048
_log = logging.getLogger(__name__)


class ApiServer(uvicorn.Server):
    """Serves one `Api`. `stop` may be called from the event loop, or by a signal handler of the loop.

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
        limits = _within_files(limits or ConnectionLimits())
        self._connections = Connections(limits, trusted_proxies)
        self._tls = None if tls is None else _context(*tls)
        self._accepting: list[asyncio.Task[None]] = []
        protocol: Any = partial(BoundedProtocol, self._connections)
        super().__init__(
            uvicorn.Config(
                create_app(api),
                http=protocol,
                ws="none" if api.console is None else "websockets-sansio",
                lifespan="on",
                log_config=None,
                access_log=logging.getLogger().isEnabledFor(logging.DEBUG),
                proxy_headers=bool(trusted_proxies),
                forwarded_allow_ips=[*map(str, with_mapped(trusted_proxies))],
                server_header=False,
                backlog=_BACKLOG,
                timeout_graceful_shutdown=_GRACE_SECONDS,
                timeout_keep_alive=limits.idle_seconds,
            )
        )
        self._api = api
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and say so."""
        if self._tls is None:
            await super().startup(sockets)
        else:
            await super().startup([])
            listener = TlsListener(self._connections, self.server_state.connections, self._tls, self._protocol)
            for each in sockets or ():
                each.listen(_BACKLOG)
                self._accepting.append(asyncio.create_task(listener.run(each)))
        if self._on_ready is not None and not self.should_exit:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more, then end what is there."""
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        await super().shutdown(sockets)

    def _protocol(self, handshake: Handshake) -> asyncio.Protocol:
        return BoundedProtocol(
            self._connections,
            handshake,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )

    def stop(self) -> None:
        """Take no more requests, answer those under way, long polls at once; asked twice, do not even do that."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self._api.stopping.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are for the program."""
        yield


def _within_files(limits: ConnectionLimits) -> ConnectionLimits:
    """Return limits that the number of open files allows."""
    possible = allow_files(limits.connections)
    if possible < limits.connections:
        _log.warning("at most %d connections are served: the limit of open files allows no more", possible)
    return replace(limits, connections=possible)


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound: a port that is taken is told before anything else is started."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InvalidConfig(f"{host!r} is no address to listen at: {error.strerror}", fix="check api_host") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(where)
    except OSError as error:
        bound.close()
        raise SetupError(
            f"the API cannot listen at {host} port {port}: {error.strerror}", fix="choose another port; 0 is a free one"
        ) from None
    bound.setblocking(False)
    return bound


def check_tls(cert: Path | None, key: Path | None) -> tuple[Path, Path] | None:
    """The certificate and its key, if they fit together; None if there are none."""
    if (cert is None) != (key is None):
        raise InvalidConfig("a certificate without its key, or a key without its certificate", fix="give both")
    if cert is None or key is None:
        return None
    try:
        _context(cert, key)
    except OSError as error:  # that of TLS is one as well
        raise InvalidConfig(
            f"the certificate {cert} and the key {key} are no good: {error}", fix="check both"
        ) from None
    return cert, key


def _context(cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    return context

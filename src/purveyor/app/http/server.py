"""The API on a socket: uvicorn, with a stop that does not wait for long polls."""

import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import uvicorn

from purveyor.app.http.application import Api, create_app
from purveyor.app.http.wire import JoiningProtocol
from purveyor.model.errors import InvalidConfig, SetupError

_GRACE_SECONDS: Final = 10
_BACKLOG: Final = 2048
_KEEP_SECONDS: Final = 75
"""So long a connection may rest: a consumer that works for longer than that comes back with a new one."""


class ApiServer(uvicorn.Server):
    """Serves one `Api`. `stop` may be called from the event loop, or by a signal handler of the loop."""

    def __init__(
        self, api: Api, *, tls: tuple[Path, Path] | None = None, on_ready: Callable[[], None] | None = None
    ) -> None:
        cert, key = tls or (None, None)
        super().__init__(
            uvicorn.Config(
                create_app(api),
                http=JoiningProtocol,
                ws="none" if api.console is None else "websockets-sansio",
                lifespan="on",
                log_config=None,
                access_log=logging.getLogger().isEnabledFor(logging.DEBUG),
                proxy_headers=False,  # what a client says of its address is not believed
                server_header=False,
                backlog=_BACKLOG,
                timeout_graceful_shutdown=_GRACE_SECONDS,
                timeout_keep_alive=_KEEP_SECONDS,
                ssl_certfile=cert,
                ssl_keyfile=key,
            )
        )
        self._api = api
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and say so."""
        await super().startup(sockets)
        if self._on_ready is not None and not self.should_exit:
            self._on_ready()

    def stop(self) -> None:
        """Take no more requests, answer those under way, long polls at once; asked twice, do not even do that."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self._api.stopping.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are for the program."""
        yield


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
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key)
    except OSError as error:  # that of TLS is one as well
        raise InvalidConfig(
            f"the certificate {cert} and the key {key} are no good: {error}", fix="check both"
        ) from None
    return cert, key

"""TLS within the limits of connections: a handshake takes memory too, and uvicorn counts a connection only after it."""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable, Sized
from typing import Final

from purveyor.app.http.connections import Admission, Connections

_AGAIN_SECONDS: Final = 1.0
_log = logging.getLogger(__name__)


class Handshake:
    """The count of one handshake."""

    def __init__(self, connections: Connections, address: str, others: int) -> None:
        self._connections = connections
        self._address = address
        self._under_way = True
        connections.handshakes += 1
        self.admission = connections.admit(address, others + connections.handshakes)

    def end(self) -> None:
        """Count it no more, however often this is called."""
        if self._under_way:
            self._under_way = False
            self._connections.handshakes -= 1
            self._connections.leave(self._address)


MakeProtocol = Callable[[Handshake], asyncio.Protocol]


class TlsListener:
    """Accepts connections, and does their handshakes.

    `others` are the connections whose handshake is done. A connection beyond the limits is closed without an answer:
    before the handshake there is no way to send one.
    """

    def __init__(
        self, connections: Connections, others: Sized, context: ssl.SSLContext, make_protocol: MakeProtocol
    ) -> None:
        self._connections = connections
        self._others = others
        self._context = context
        self._make_protocol = make_protocol
        self._handshakes: set[asyncio.Task[None]] = set()

    async def run(self, listener: socket.socket) -> None:
        """Accept until cancelled. The handshakes under way end with it."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                try:
                    accepted, peer = await loop.sock_accept(listener)
                except OSError as error:  # no file descriptor is left, say
                    _log.warning("no connection can be accepted at present: %s", error)
                    await asyncio.sleep(_AGAIN_SECONDS)
                    continue
                handshake = Handshake(self._connections, str(peer[0]), len(self._others))
                if handshake.admission is not Admission.SERVED:
                    handshake.end()
                    accepted.close()
                    continue
                task = loop.create_task(self._serve(accepted, handshake))
                self._handshakes.add(task)
                task.add_done_callback(self._handshakes.discard)
        finally:
            for task in self._handshakes:
                task.cancel()
            await asyncio.gather(*self._handshakes, return_exceptions=True)

    async def _serve(self, accepted: socket.socket, handshake: Handshake) -> None:
        limits = self._connections.limits
        try:
            with contextlib.suppress(OSError, TimeoutError):  # errors of TLS are OSErrors as well
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: self._make_protocol(handshake),
                    accepted,
                    ssl=self._context,
                    ssl_handshake_timeout=limits.header_seconds,
                    ssl_shutdown_timeout=limits.linger_seconds,
                )
        finally:
            handshake.end()

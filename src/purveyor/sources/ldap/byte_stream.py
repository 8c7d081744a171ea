"""A TCP or TLS connection as a buffer of received bytes, which grows only while its owner reads."""

import asyncio
import socket
import ssl
import sys
from typing import Final, cast

from purveyor.sources.ldap.ber import measure_element

_PAUSE_AT_BYTES: Final = 1 << 20
"""How much is received ahead of the reader."""
_CLOSE_SECONDS: Final = 2.0
_KEEPALIVE_IDLE_SECONDS: Final = 30
_KEEPALIVE_INTERVAL_SECONDS: Final = 10
_KEEPALIVE_PROBES: Final = 3


class ByteStream(asyncio.Protocol):
    """One connection. A single task reads; OSError when the connection is lost, EOFError when the peer closed it."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._at = 0
        self._transport: asyncio.Transport | None = None
        self._received = asyncio.Event()
        self._lost = asyncio.Event()
        self._paused = False
        self._wanted = 0
        self._end: Exception | None = None

    @classmethod
    async def connect(cls, host: str, port: int, *, tls: ssl.SSLContext | None) -> "ByteStream":
        """Connect, and set up TLS at once if a context is given."""
        loop = asyncio.get_running_loop()
        _, stream = await loop.create_connection(cls, host, port, ssl=tls, server_hostname=host if tls else None)
        return stream

    @property
    def has_unread(self) -> bool:
        """Whether bytes are there that no call has taken."""
        return self._at < len(self._buffer)

    async def start_tls(self, tls: ssl.SSLContext, host: str) -> None:
        """Encrypt an open connection."""
        if self._end is not None:
            raise self._end
        assert self._transport is not None
        upgraded = await asyncio.get_running_loop().start_tls(self._transport, self, tls, server_hostname=host)
        if upgraded is None:
            raise ConnectionResetError("the server closed the connection in the TLS handshake")
        self._transport = upgraded

    def take_element(self, *, tag: int, max_bytes: int) -> bytes | None:
        """Return the next complete BER element without waiting, or None; BerError if the bytes are none."""
        size = measure_element(self._buffer, self._at, tag=tag, max_bytes=max_bytes)
        if size is None or len(self._buffer) - self._at < size:
            self._wanted = size or 0
            return None
        start, self._at = self._at, self._at + size
        return bytes(memoryview(self._buffer)[start : self._at])

    async def read_more(self) -> None:
        """Wait until more bytes are there."""
        del self._buffer[: self._at]
        self._at = 0
        self._received.clear()
        if self._end is not None:
            raise self._end
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        await self._received.wait()

    def write(self, data: bytes) -> None:
        """Send a request. Requests are small and few, so no limit is needed."""
        if self._end is not None or self._transport is None:
            raise self._end or ConnectionError("not connected")
        self._transport.write(data)

    async def close(self, last: bytes = b"") -> None:
        """Send the last bytes if that is possible, and close the connection."""
        if self._transport is None:
            return
        if not self._transport.is_closing():
            self._transport.write(last)
            self._transport.close()
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._lost.wait()
        except TimeoutError:
            self._transport.abort()

    def abort(self) -> None:
        """Close the connection without waiting for what is not sent yet."""
        if self._transport is not None:
            self._transport.abort()

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)  # those of uvloop are no subclass
        _detect_dead_peer(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        """Keep the bytes, and stop receiving when there are enough."""
        self._buffer += data
        self._received.set()
        waiting = len(self._buffer) - self._at
        if waiting > max(_PAUSE_AT_BYTES, self._wanted) and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def eof_received(self) -> None:
        """Note that the peer closed the connection."""
        self._finish(EOFError("the server closed the connection"))

    def connection_lost(self, error: Exception | None) -> None:
        """Note the end of the connection."""
        self._lost.set()
        self._finish(error or EOFError("the connection was closed"))

    def _finish(self, error: Exception) -> None:
        self._end = self._end or error
        self._received.set()


def _detect_dead_peer(connection: socket.socket | None) -> None:
    """Let the system probe an idle connection, so that a peer that vanished ends it within about a minute."""
    if connection is None:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)
        silence = _KEEPALIVE_IDLE_SECONDS + _KEEPALIVE_INTERVAL_SECONDS * _KEEPALIVE_PROBES
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silence * 1000)

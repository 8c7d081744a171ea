"""The only module that uses members of uvicorn which uvicorn does not document.

uvicorn has no public way to limit headers, slow clients and pipelined requests, to count a connection during its TLS
handshake, to send head and body of an answer in one packet, or to leave signals to the program. So this module
subclasses uvicorn's HTTP protocol and server, and gives our names to the members that we need. The subclasses in
`request_limits` and `server` use these names only. `REQUIRED_MEMBERS` lists what we rely on; a test compares it with
the installed uvicorn, so that an upgrade that renames a member fails there and not in production.
"""

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Sequence, Sized
from typing import Any, Final, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

REQUIRED_MEMBERS: Final[dict[type, tuple[str, ...]]] = {
    HttpToolsProtocol: (
        "_unset_keepalive_if_required",
        "connection_lost",
        "connection_made",
        "data_received",
        "handle_websocket_upgrade",
        "on_body",
        "on_header",
        "on_headers_complete",
        "on_message_begin",
        "on_message_complete",
        "on_response_complete",
        "on_url",
        "pause_writing",
        "resume_writing",
        "send_400_response",
        "timeout_keep_alive_handler",
    ),
    uvicorn.Server: ("capture_signals", "serve", "shutdown", "startup"),
}
"""Methods that this module and its subclasses override or call, by class."""
PROTOCOL_ATTRIBUTES: Final = (
    "client",
    "connections",
    "cycle",
    "flow",
    "loop",
    "pipeline",
    "timeout_keep_alive",
    "timeout_keep_alive_task",
    "transport",
)
"""Attributes that `HttpToolsProtocol.__init__` sets."""
REQUEST_ATTRIBUTES: Final = ("body", "disconnected", "message_event", "response_complete", "response_started")
"""Attributes that `RequestResponseCycle.__init__` sets: one request and its answer."""
_STATUS_LINE_PREFIX: Final = b"HTTP/1.1 "


class JoinedWrites:
    """A transport that holds the head of an answer back until its body, or until the end of this loop iteration.

    uvicorn writes head and body one after the other: two packets, which wake the client twice for each request.
    """

    __slots__ = ("_head", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""

    def write(self, data: bytes) -> None:
        """Send data together with the head that was held back."""
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(_STATUS_LINE_PREFIX):
            self._head = data
            self._loop.call_soon(self._send_head)
            return
        self._transport.write(data)

    def write_eof(self) -> None:
        """Send the head that was held back, then the end of the stream."""
        self._send_head()
        self._transport.write_eof()

    def close(self) -> None:
        """Close the connection when everything is sent."""
        self._send_head()
        self._transport.close()

    def _send_head(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)

    def __getattr__(self, name: str) -> Any:
        """Return any other member of the transport."""
        return getattr(self._transport, name)


class HttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol for one connection, with joined writes and public names for its state.

    The `on_*` methods up to `on_message_complete` are callbacks of httptools. Subclasses override them, and the hooks
    `refuse_malformed`, `before_websocket` and `after_response`.
    """

    cycle: RequestResponseCycle
    """The newest request of the connection and its answer; None before the first request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin the connection on a transport that joins writes."""
        super().connection_made(cast("asyncio.Transport", JoinedWrites(transport, self.loop)))

    @property
    def client_address(self) -> str:
        """The address of the client, or an empty text if the transport does not know it."""
        return self.client[0] if self.client else ""

    @property
    def open_connections(self) -> int:
        """The number of connections that the server has open, with this one."""
        return len(self.connections)

    @property
    def queued_requests(self) -> int:
        """The number of pipelined requests that wait for the answer to an earlier one."""
        return len(self.pipeline)

    @property
    def owes_response(self) -> bool:
        """Whether the newest request has no complete answer. False before the first request."""
        return not getattr(self.cycle, "response_complete", True)

    @property
    def has_started_response(self) -> bool:
        """Whether the answer to the newest request has begun."""
        return self.cycle.response_started

    @property
    def is_reading_paused(self) -> bool:
        """Whether the server stopped reading because its buffers are full."""
        return self.flow.read_paused

    def abandon_request(self) -> None:
        """Inform the application that the client of the newest request is gone."""
        self.cycle.disconnected = True
        self.cycle.message_event.set()

    def start_idle_timer(self) -> None:
        """Close the connection if no request comes within the keep-alive time, unless that timer already runs."""
        if self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def stop_idle_timer(self) -> None:
        """Stop the timer of `start_idle_timer`, which uvicorn starts after each answer as well."""
        self._unset_keepalive_if_required()

    def refuse_malformed(self) -> None:
        """Answer bytes that the parser, or an exception in one of its callbacks, refused."""
        raise NotImplementedError

    def before_websocket(self) -> None:
        """Release what this protocol holds before the connection becomes a WebSocket."""

    def after_response(self) -> None:
        """Act after the answer to the newest request is complete."""

    def send_400_response(self, msg: str) -> None:
        """Answer a malformed request."""
        self.refuse_malformed()

    def handle_websocket_upgrade(self) -> None:
        """Give the connection to the WebSocket protocol."""
        self.before_websocket()
        super().handle_websocket_upgrade()

    def on_response_complete(self) -> None:
        """Free the body that was received, and start the next pipelined request."""
        is_newest = self.cycle.response_complete  # an earlier one was answered if this is False
        if is_newest:
            self.cycle.body.clear()
        super().on_response_complete()
        if is_newest:
            self.after_response()


class SocketServer(uvicorn.Server):
    """uvicorn's server that leaves signals to the program and can let a subclass accept connections."""

    accepts_connections_itself = False
    """True: the subclass accepts connections in `after_startup`, and uvicorn does not listen."""

    @property
    def connections(self) -> Sized:
        """The connections that are open now."""
        return self.server_state.connections

    def protocol_arguments(self) -> dict[str, Any]:
        """Return the arguments that uvicorn passes to the protocol of a new connection."""
        return {"config": self.config, "server_state": self.server_state, "app_state": self.lifespan.state}

    def after_startup(self, sockets: Sequence[socket.socket]) -> None:
        """Act when the application has started and, unless `accepts_connections_itself`, uvicorn listens."""

    async def before_shutdown(self) -> None:
        """Stop accepting connections."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application and listen."""
        await super().startup([] if self.accepts_connections_itself else sockets)
        if not self.should_exit:
            self.after_startup(sockets or [])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections, then end the open ones."""
        await self.before_shutdown()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: the program has its own."""
        yield

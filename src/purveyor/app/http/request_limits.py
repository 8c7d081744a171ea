"""The HTTP protocol of the API with limits: uvicorn's own has none for headers, slow clients and pipelined requests.

The API answers a request that breaks a limit with a problem document and closes its connection:

    431   the headers are too large, or too many
    408   the headers or the body take too long
    503   too many connections are open
    400   the bytes are not HTTP

Where the client could take the answer for that of another request, the API closes the connection without one.
"""

import asyncio
from enum import Enum, auto
from http import HTTPStatus
from typing import Any

from purveyor.app.http.connections import Admission, Connections, Handshake
from purveyor.app.http.problems import encode_response
from purveyor.app.http.uvicorn_adapter import HttpProtocol
from purveyor.model.metrics import HTTP_REQUESTS


class _Phase(Enum):
    """The next thing that the server expects from the client."""

    HEADERS = auto()
    BODY = auto()
    NOTHING = auto()
    """The request is complete, or none has begun."""


class _LimitExceeded(Exception):
    """The headers break a limit. It ends the parsing and never leaves this module."""


class LimitedProtocol(HttpProtocol):
    """One connection. All connections of a server share `connections`; `handshake` is set after a TLS handshake."""

    def __init__(self, connections: Connections, handshake: Handshake | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._shared = connections
        self._handshake = handshake
        self._limits = connections.limits
        self._address = ""
        self._is_over = False
        """The protocol discards input: the connection is refused, closed, or a WebSocket."""
        self._phase = _Phase.HEADERS
        self._requests = 0
        self._header_bytes = 0
        self._header_count = 0
        self._body_bytes = 0
        self._unparsed_bytes = 0
        """Bytes that arrived since the last callback of the parser, which keeps them in memory."""
        self._timed: tuple[int, _Phase] | None = None
        """The request and the phase that the read timer runs for."""
        self._timer_started_at = 0.0
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, and refuse it if too many are open."""
        super().connection_made(transport)
        self._address = self.client_address
        if self._handshake is not None:
            self._handshake.end()
        match self._shared.admit(self._address, self.open_connections):
            case Admission.DROPPED:
                self._drop()
            case Admission.REFUSED:
                self._refuse(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    "too many connections are open",
                    "close connections that you do not need, try again later, or raise PURVEYOR_API_CONNECTIONS",
                )
            case Admission.SERVED:
                self._set_read_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the connection."""
        self._end()
        self._shared.release(self._address)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse data while the limits hold."""
        if not self._is_over:
            self._read(data)

    def _read(self, data: bytes) -> None:
        if self._phase is _Phase.NOTHING:
            self._begin_request()
        self._unparsed_bytes += len(data)
        super().data_received(data)
        if self._is_over:
            return
        if self._unparsed_bytes > self._limits.header_bytes:
            self._refuse_headers()
        else:
            self._set_read_timer()

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        if self._phase is not _Phase.HEADERS:  # a pipelined request that came with the last bytes of the previous one
            self._begin_request()

    def on_url(self, url: bytes) -> None:
        """Add a part of the URL."""
        self._count_header(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header or a trailer."""
        self._header_count += 1
        self._count_header(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the application for this request."""
        if self.queued_requests >= self._limits.pipelined:
            raise _LimitExceeded
        self._phase, self._body_bytes, self._unparsed_bytes = _Phase.BODY, 0, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Add a part of the body."""
        self._body_bytes += len(body)
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request."""
        self._phase, self._unparsed_bytes = _Phase.NOTHING, 0
        super().on_message_complete()

    def refuse_malformed(self) -> None:
        """Answer a request that is not HTTP or breaks a limit of headers."""
        if self._header_bytes > self._limits.header_bytes or self._header_count > self._limits.headers:
            self._refuse_headers()
        else:
            self._refuse(
                HTTPStatus.BAD_REQUEST,
                "the request is not valid HTTP/1.1",
                "send HTTP/1.1, and TLS only to an API that has a certificate",
            )

    def before_websocket(self) -> None:
        """Stop the timers and release the connection: only a console session keeps a WebSocket open."""
        self._end()
        self._shared.release(self._address)

    def after_response(self) -> None:
        """Limit the time for the rest of a body whose request is already answered."""
        if self._phase is _Phase.BODY and not self._is_over:
            self._start_read_timer(self._limits.body_seconds)

    def _begin_request(self) -> None:
        self._phase = _Phase.HEADERS
        self._requests += 1
        self._header_bytes = self._header_count = self._unparsed_bytes = 0

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        self._unparsed_bytes = 0
        if self._header_bytes > self._limits.header_bytes or self._header_count > self._limits.headers:
            raise _LimitExceeded

    # Timers.

    def _set_read_timer(self) -> None:
        """Run the read timer for what the client has to send now. A request that comes in one piece needs none."""
        wanted = (self._requests, self._phase)
        if wanted == self._timed:
            return
        self._timed = wanted
        if self._phase is _Phase.NOTHING:
            self._stop_read_timer()
            if not self.owes_response:  # the last bytes of the request may come after its answer
                self.start_idle_timer()
        else:
            is_header = self._phase is _Phase.HEADERS
            self._start_read_timer(self._limits.header_seconds if is_header else self._limits.body_seconds)

    def _start_read_timer(self, seconds: float) -> None:
        self._stop_read_timer()
        self._timer_started_at = self.loop.time()
        self._read_timer = self.loop.call_later(seconds, self._handle_slow_client)

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _handle_slow_client(self) -> None:
        """Refuse a client that did not send everything in time, or give it more time."""
        self._read_timer = None
        if self._phase is _Phase.HEADERS:
            if not self._requests and not self._unparsed_bytes and not self._header_bytes:
                self._drop()  # browsers connect in advance and would take an answer for that of a later request
            else:
                self._refuse_slow("headers", f"within {self._limits.header_seconds:g} seconds")
            return
        if not self.owes_response:
            self._drop()
            return
        if self.is_reading_paused:  # the server does not read now, so the client cannot send
            self._start_read_timer(self._limits.body_seconds)
            return
        left = self._timer_started_at + self._limits.body_deadline_seconds(self._body_bytes) - self.loop.time()
        if left > 0:
            self._read_timer = self.loop.call_later(left, self._handle_slow_client)
        else:
            self._refuse_slow("body", f"at {self._limits.bytes_per_second} bytes a second or faster")

    def pause_writing(self) -> None:
        """Measure the speed of a client that reads slowly."""
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Continue to write."""
        super().resume_writing()
        self._stop_watching_reader()

    def _watch_reader(self, unsent_bytes: int) -> None:
        self._stop_watching_reader()
        self._write_timer = self.loop.call_later(self._limits.body_seconds, self._check_reader, unsent_bytes)

    def _check_reader(self, unsent_before: int) -> None:
        """Close the connection of a client that reads slower than the limit."""
        unsent = self.transport.get_write_buffer_size()
        if unsent_before - unsent < self._limits.bytes_per_second * self._limits.body_seconds:
            self._drop()
        else:
            self._watch_reader(unsent)

    def _stop_watching_reader(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    # Refusals.

    def _refuse_headers(self) -> None:
        limits = self._limits
        self._refuse(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"the request line and headers have more than {limits.header_bytes} bytes or {limits.headers} headers",
            "send fewer or shorter headers",
        )

    def _refuse_slow(self, what: str, how: str) -> None:
        self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"the {what} of the request arrived too slowly", f"send them {how}")

    def _refuse(self, status: HTTPStatus, detail: str, fix: str) -> None:
        """Answer with a problem, and close the connection after the client had time to read it."""
        if self._is_over:
            return
        if not self._may_answer():
            self._drop()
            return
        self._end()
        if self._phase is _Phase.BODY:  # the application waits for the rest of the body, and counts the request
            self.abandon_request()
        else:
            HTTP_REQUESTS.add("other", "other", str(int(status)))
        self.transport.write(encode_response(status, detail, fix))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(self._limits.linger_seconds, self.transport.abort)

    def _may_answer(self) -> bool:
        """Return whether the client would take an answer for that of the request that it sends now."""
        if self._phase is _Phase.BODY:
            return not self.has_started_response and not self.queued_requests
        return not self.owes_response

    def _drop(self) -> None:
        """Close without an answer."""
        self._end()
        self.transport.abort()

    def _end(self) -> None:
        self._is_over = True
        self._stop_read_timer()
        self._stop_watching_reader()
        self.stop_idle_timer()

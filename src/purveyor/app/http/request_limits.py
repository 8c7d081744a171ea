"""The HTTP protocol of the API with limits: uvicorn's own has none for headers, slow clients and pipelined requests.

A request that breaks a limit is answered with a problem document, and its connection is closed:

    431   the headers are too large, or too many
    408   the headers or the body take too long
    503   there are too many connections
    400   it is not HTTP

Where an answer would be taken for that of another request, the connection is only closed.
"""

import asyncio
from enum import Enum, auto
from http import HTTPStatus
from typing import Any

from purveyor.app.http.connections import Admission, Connections
from purveyor.app.http.joined_writes import JoiningProtocol
from purveyor.app.http.problems import written
from purveyor.app.http.request_metrics import count
from purveyor.app.http.tls import Handshake


class _Phase(Enum):
    """What the server waits for from the client."""

    HEADERS = auto()
    BODY = auto()
    NOTHING = auto()
    """The request is complete, or none has begun."""


class _TooLarge(Exception):
    """The headers break a limit. Ends the parsing, and is never seen outside of it."""


class BoundedProtocol(JoiningProtocol):
    """One connection. `connections` is shared by all of a server; `handshake` is that of TLS, if there was one."""

    def __init__(self, connections: Connections, handshake: Handshake | None = None, **given: Any) -> None:
        super().__init__(**given)
        self._shared = connections
        self._handshake = handshake
        self._limits = connections.limits
        self._address = ""
        self._over = False
        """Input is thrown away: the connection is refused, closed, or a WebSocket."""
        self._phase = _Phase.HEADERS
        self._requests = 0
        self._header_bytes = 0
        self._header_count = 0
        self._body_bytes = 0
        self._unparsed_bytes = 0
        """Bytes that came since the parser handed out a part of a request: it keeps them in memory."""
        self._timed: tuple[int, _Phase] | None = None
        """The request and the phase that the timer runs for."""
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, and refuse it if there are too many."""
        super().connection_made(transport)
        self._address = self.client[0] if self.client else ""
        if self._handshake is not None:
            self._handshake.end()
        match self._shared.admit(self._address, len(self.connections)):
            case Admission.DROPPED:
                self._drop()
            case Admission.REFUSED:
                self._refuse(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    "too many connections are open",
                    "close those that are not needed, try again later, or see PURVEYOR_API_CONNECTIONS",
                )
            case Admission.SERVED:
                self._set_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._end()
        self._shared.leave(self._address)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read, as long as the limits hold."""
        if not self._over:
            self._read(data)

    def _read(self, data: bytes) -> None:
        if self._phase is _Phase.NOTHING:
            self._begin_request()
        self._unparsed_bytes += len(data)
        super().data_received(data)
        if self._over:
            return
        if self._unparsed_bytes > self._limits.header_bytes:
            self._refuse_headers()
        else:
            self._set_timer()

    # The parser.

    def on_message_begin(self) -> None:
        """Begin a request."""
        super().on_message_begin()
        if self._phase is not _Phase.HEADERS:  # another one that came with the last bytes of the one before
            self._begin_request()

    def on_url(self, url: bytes) -> None:
        """Take a part of the URL."""
        self._count_header(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, or a trailer."""
        self._header_count += 1
        self._count_header(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to answer."""
        if len(self.pipeline) >= self._limits.pipelined:
            raise _TooLarge
        self._phase, self._body_bytes, self._unparsed_bytes = _Phase.BODY, 0, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body."""
        self._body_bytes += len(body)
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End a request."""
        self._phase, self._unparsed_bytes = _Phase.NOTHING, 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser, or a limit, did not take."""
        if self._header_bytes > self._limits.header_bytes or self._header_count > self._limits.headers:
            self._refuse_headers()
        else:
            self._refuse(
                HTTPStatus.BAD_REQUEST,
                "the request is not valid HTTP/1.1",
                "send HTTP/1.1, and TLS only to an API that has a certificate",
            )

    def handle_websocket_upgrade(self) -> None:
        """Leave the connection to the protocol of WebSockets: only a console session keeps one open."""
        self._end()
        self._shared.leave(self._address)
        super().handle_websocket_upgrade()

    def on_response_complete(self) -> None:
        """Free what was kept of the body, and give the rest of it a last deadline."""
        last = self.cycle.response_complete  # and not an earlier one, to which others wait
        if last:
            self.cycle.body.clear()
        super().on_response_complete()
        if last and self._phase is _Phase.BODY and not self._over:
            self._start_timer(self._limits.body_seconds)

    def _begin_request(self) -> None:
        self._phase = _Phase.HEADERS
        self._requests += 1
        self._header_bytes = self._header_count = self._unparsed_bytes = 0

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        self._unparsed_bytes = 0
        if self._header_bytes > self._limits.header_bytes or self._header_count > self._limits.headers:
            raise _TooLarge

    # Time.

    def _set_timer(self) -> None:
        """Let the timer run for what the client has to send now; not at all for requests that come in one piece."""
        wanted = (self._requests, self._phase)
        if wanted == self._timed:
            return
        self._timed = wanted
        if self._phase is _Phase.NOTHING:
            self._stop_timer()
            self._await_next()
        else:
            is_header = self._phase is _Phase.HEADERS
            self._start_timer(self._limits.header_seconds if is_header else self._limits.body_seconds)

    def _await_next(self) -> None:
        """Limit the time until the next request, also when the last bytes of this one came after its answer."""
        if not self._owes_answer and self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    @property
    def _owes_answer(self) -> bool:
        """Whether there is a request without a complete answer."""
        return not getattr(self.cycle, "response_complete", True)

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._since = self.loop.time()
        self._timer = self.loop.call_later(seconds, self._late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        """Decide about a client that has not sent all in time."""
        self._timer = None
        if self._phase is _Phase.HEADERS:
            if not self._requests and not self._unparsed_bytes and not self._header_bytes:
                self._drop()  # browsers connect in advance, and would take an answer for that of a later request
            else:
                self._refuse_late("headers", f"within {self._limits.header_seconds:g} seconds")
            return
        if self.cycle.response_complete:
            self._drop()
            return
        if self.flow.read_paused:  # the server does not read at present, so the client cannot send
            self._start_timer(self._limits.body_seconds)
            return
        left = self._since + self._limits.body_deadline_seconds(self._body_bytes) - self.loop.time()
        if left > 0:
            self._timer = self.loop.call_later(left, self._late)
        else:
            self._refuse_late("body", f"with {self._limits.bytes_per_second} bytes a second or more")

    def pause_writing(self) -> None:
        """Watch a client that reads slowly."""
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Go on."""
        super().resume_writing()
        self._stop_watching()

    def _watch_reader(self, waiting: int) -> None:
        self._stop_watching()
        self._write_timer = self.loop.call_later(self._limits.body_seconds, self._check_reader, waiting)

    def _check_reader(self, before: int) -> None:
        """Close the connection of a client that reads slower than the limit."""
        waiting = self.transport.get_write_buffer_size()
        if before - waiting < self._limits.bytes_per_second * self._limits.body_seconds:
            self._drop()
        else:
            self._watch_reader(waiting)

    def _stop_watching(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    # The end.

    def _refuse_headers(self) -> None:
        limits = self._limits
        self._refuse(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"the request line and headers have more than {limits.header_bytes} bytes or {limits.headers} headers",
            "send fewer or shorter headers",
        )

    def _refuse_late(self, what: str, how: str) -> None:
        self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"the {what} of the request came too slowly", f"send them {how}")

    def _refuse(self, status: HTTPStatus, detail: str, fix: str) -> None:
        """Answer, and close when the client had time to read it."""
        if self._over:
            return
        if not self._may_answer():
            self._drop()
            return
        self._end()
        if self._phase is _Phase.BODY:  # the application waits for the rest of it, and counts the request
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        else:
            count("other", "other", status)
        self.transport.write(written(status, detail, fix))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(self._limits.linger_seconds, self.transport.abort)

    def _may_answer(self) -> bool:
        """Return whether the client would take an answer for that of the request it sends."""
        if self._phase is _Phase.BODY:
            return not self.cycle.response_started and not self.pipeline
        return not self._owes_answer

    def _drop(self) -> None:
        """Close without an answer."""
        self._end()
        self.transport.abort()

    def _end(self) -> None:
        self._over = True
        self._stop_timer()
        self._stop_watching()
        self._unset_keepalive_if_required()

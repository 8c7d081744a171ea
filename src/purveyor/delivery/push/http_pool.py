"""HTTP/1.1 connections to endpoints: one pool for each host, kept open between requests, behind an awaitable `post`.

A pool opens at most `limit` connections; a request beyond that waits for one. `egress_policy` decides which addresses
push may reach. It decides when a connection is made, and the connection goes to the address that was checked.

httptools (llhttp) parses the responses. Push adds four rules: 102 is a final response; a response counts only
when it is complete; of a long body only the beginning is read; redirects are never followed.
"""

import asyncio
import ssl
import weakref
from collections.abc import Callable, Sequence
from typing import Final, cast

import httptools

from purveyor.delivery.push.egress_policy import Address, Network, resolve
from purveyor.delivery.push.settlement import Outcome
from purveyor.model.delivery_policy import Endpoint
from purveyor.model.errors import PurveyorError, Refused

DEFAULT_CONNECTIONS_PER_HOST: Final = 256
_IDLE_SECONDS: Final = 50.0
"""The pool closes a connection that is idle for this long, before the endpoint does."""
_RESOLVED_SECONDS: Final = 30.0
"""The pool reuses the resolved addresses of a host name for this long."""
_CONNECT_TIMEOUT_SECONDS: Final = 10.0
KEPT_BODY_BYTES: Final = 1000
"""This many bytes of a body are kept for operators to read."""
MAX_RESPONSE_BYTES: Final = 256 << 10
"""A longer response is cut: its status counts, and the connection is closed."""
_MAX_HEADER_BYTES: Final = 64 << 10
_PROCESSING: Final = 102
_SWITCHING_PROTOCOLS: Final = 101


class DeadlineExceeded(Exception):
    """The deadline of a request has passed."""


class HttpConnection(asyncio.Protocol):
    """A connection that carries one request at a time. It calls `on_lost` once, when it is closed by either side."""

    def __init__(self, on_lost: "Callable[[HttpConnection], None]") -> None:
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._outcome: asyncio.Future[Outcome] | None = None
        """The outcome of the request in flight."""
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._closing = False
        self.responses = 0
        """The number of complete responses that this connection has received."""
        self.idle_since = 0.0
        self._reset()

    def _reset(self) -> None:
        self._received = 0
        self._is_final = False
        self._in_body = False
        self._ends_with_connection = True
        self._retry_after: str | None = None
        self._body = b""

    @property
    def has_received(self) -> bool:
        """Whether any byte of a response to the last request arrived."""
        return self._received > 0

    @property
    def is_usable(self) -> bool:
        """Whether another request may be sent."""
        transport = self._transport
        return transport is not None and not self._closing and self._outcome is None and not transport.is_closing()

    async def send(self, request: bytes, deadline: float) -> Outcome:
        """Send one request and return its outcome. Raise `DeadlineExceeded` when the response is late.

        A late response, or cancelling the call, closes the connection.
        """
        self._reset()
        transport = self._transport
        if transport is None or transport.is_closing():  # the endpoint closed it just now
            self._closing = True
            return Outcome(error="no answer: connection lost")
        outcome: asyncio.Future[Outcome] = self._loop.create_future()
        self._outcome = outcome
        transport.write(request)
        self._deadline = deadline
        if self._timer is None or deadline < self._timer_at:
            self._set_timer()
        try:
            return await outcome
        except asyncio.CancelledError:
            self._outcome = None
            self.close()
            raise

    def _set_timer(self) -> None:
        """Check the deadline when it is due. One timer serves many requests: one for each would cost too much."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = self._loop.call_at(self._deadline, self._check_deadline), self._deadline

    def _check_deadline(self) -> None:
        self._timer = None
        outcome = self._outcome
        if outcome is None or self._closing:
            return
        if self._deadline > self._timer_at:  # of a later request
            self._set_timer()
            return
        self._outcome = None
        self.close()
        if not outcome.done():
            outcome.set_exception(DeadlineExceeded())

    def close(self) -> None:
        """Close the connection at once."""
        self._closing = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.abort()

    # Callbacks of asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports do not inherit from it

    def data_received(self, data: bytes) -> None:
        """Parse a piece of the response. Data without a request in flight is a protocol error."""
        if self._outcome is None:
            self.close()
            return
        self._received += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._finish(close=True)
        except (httptools.HttpParserError, ValueError) as error:
            # Data behind a complete response belongs to no request: the response counts, the connection is closed.
            self.close()
            self._fail(f"not an HTTP answer: {error}")
        if self._in_body and self._received > MAX_RESPONSE_BYTES:
            self._finish(close=True)
        elif not self._in_body and self._received > _MAX_HEADER_BYTES:
            self.close()
            self._fail("the headers of the answer have no end")

    def eof_received(self) -> bool:
        """Handle the end of the stream; a response without a length ends this way."""
        self._end()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the request in flight and report that the connection is closed."""
        self._closing = True
        self._end(exc)
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        self._on_lost(self)

    def _end(self, error: Exception | None = None) -> None:
        if self._outcome is None:
            self._closing = True
        elif error is None and self._in_body and self._ends_with_connection:
            self._finish(close=True)
        else:
            lost = "the connection broke before the answer was whole"
            self._fail(lost if self.has_received else "no answer: connection lost")

    # Callbacks of httptools.

    def on_message_begin(self) -> None:
        """Refuse a response that no request asked for."""
        if self._outcome is None:
            raise ValueError("more than one answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note Retry-After, and whether the response says how long it is."""
        lower = name.lower()
        if lower == b"retry-after":
            self._retry_after = value.decode("latin-1").strip()
        elif lower in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        """Decide whether the response is final: other 1xx responses announce one."""
        status = self._parser.get_status_code()
        self._is_final = status >= 200 or status in (_PROCESSING, _SWITCHING_PROTOCOLS)
        self._in_body = self._is_final

    def on_body(self, data: bytes) -> None:
        """Keep the beginning of the body."""
        if len(self._body) < KEPT_BODY_BYTES:
            self._body += data[: KEPT_BODY_BYTES - len(self._body)]

    def on_message_complete(self) -> None:
        """Finish the request if the response is final."""
        if not self._is_final:
            self._retry_after, self._ends_with_connection = None, True
            return
        # After 102 the endpoint may still send the response that other clients wait for: it must not answer our next
        # request.
        self._finish(close=not self._parser.should_keep_alive() or self._parser.get_status_code() < 200)

    def _finish(self, *, close: bool) -> None:
        if self._outcome is None:
            return
        self.responses += 1
        if close:
            self.close()
        status = self._parser.get_status_code()
        self._set(Outcome(status=status, retry_after=self._retry_after, body=self._body))

    def _fail(self, error: str) -> None:
        self._closing = True
        self._set(Outcome(error=error, body=self._body))

    def _set(self, outcome: Outcome) -> None:
        future, self._outcome = self._outcome, None
        if future is not None and not future.done():
            future.set_result(outcome)


class HostPool:
    """The connections to one host and port."""

    def __init__(self, endpoint: Endpoint, allowed: Sequence[Network], *, limit: int, tls: ssl.SSLContext) -> None:
        self._endpoint = endpoint
        self._allowed = allowed
        self._limit = limit
        self._tls = tls if endpoint.scheme == "https" else None
        self._loop = asyncio.get_running_loop()
        self._slots = asyncio.Semaphore(limit)
        """One for each request in flight."""
        self._connections: set[HttpConnection] = set()
        self._idle: list[HttpConnection] = []
        self._addresses: list[Address] = []
        self._resolved_at = float("-inf")
        self._closed = False

    async def post(self, request: bytes, deadline_seconds: float) -> Outcome:
        """Send a request and return its outcome, at the deadline at the latest. Every failure is an outcome."""
        deadline = self._loop.time() + deadline_seconds
        connection: HttpConnection | None = None
        try:
            await self._acquire_slot(deadline)
            try:
                if self._closed:
                    return Outcome(error="this process is about to end", sent=False)
                connection = self._pop_idle() or await self._connect(deadline)
                outcome = await connection.send(request, deadline)
                if outcome.status is None and connection.responses and not connection.has_received:
                    # The endpoint closed an idle connection just as it was used again: the request was not answered.
                    connection = None
                    connection = await self._connect(deadline)
                    outcome = await connection.send(request, deadline)
                if connection.is_usable:
                    connection.idle_since = self._loop.time()
                    self._idle.append(connection)
                return outcome
            finally:
                self._slots.release()
        except DeadlineExceeded:
            return self._late_outcome(connection, deadline_seconds)
        except Exception as error:  # noqa: BLE001 - the caller gets any error as an outcome
            is_refused = isinstance(error, Refused)
            return Outcome(error=describe_connect_error(error), sent=not is_refused, refused=is_refused)

    async def probe(self) -> None:
        """Make sure that a connection can be made, without a request. Raise `PurveyorError` or OSError if not."""
        if not any(connection.is_usable for connection in self._idle):
            self._idle.append(await self._connect(None))

    def close_idle(self, now: float) -> None:
        """Close connections that are idle for too long."""
        kept = []
        for connection in self._idle:
            if connection.is_usable and now - connection.idle_since < _IDLE_SECONDS:
                kept.append(connection)
            else:
                connection.close()
        self._idle = kept

    def close(self) -> None:
        """Close all connections; requests in flight fail, and requests that wait are not sent."""
        self._closed = True
        for connection in [*self._connections]:
            connection.close()

    def _pop_idle(self) -> HttpConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
        return None

    async def _acquire_slot(self, deadline: float) -> None:
        if not self._slots.locked():
            await self._slots.acquire()
            return
        try:
            async with asyncio.timeout_at(deadline):
                await self._slots.acquire()
        except TimeoutError:
            raise DeadlineExceeded from None

    def _late_outcome(self, connection: HttpConnection | None, seconds: float) -> Outcome:
        if connection is not None:
            what = "the answer was not whole" if connection.has_received else "no answer"
            return Outcome(error=f"{what} within {seconds:.3g} s")
        is_full = len(self._connections) >= self._limit
        return Outcome(error=f"no connection within {seconds:.3g} s", sent=not is_full)

    async def _connect(self, deadline: float | None) -> HttpConnection:
        request_timeout = asyncio.timeout_at(deadline)
        try:
            async with request_timeout, asyncio.timeout(_CONNECT_TIMEOUT_SECONDS):
                return await self._open()
        except TimeoutError:
            if request_timeout.expired():
                raise DeadlineExceeded from None
            raise

    async def _open(self) -> HttpConnection:
        if self._idle and len(self._connections) >= self._limit:
            unused = self._idle.pop(0)
            self._connections.discard(unused)
            unused.close()
        problem: OSError | None = None
        for address in await self._resolve():
            try:
                _, connection = await self._loop.create_connection(
                    lambda: HttpConnection(self._forget),
                    str(address),
                    self._endpoint.port,
                    ssl=self._tls,
                    server_hostname=self._endpoint.host if self._tls is not None else None,
                )
            except OSError as error:
                problem = error
                continue
            self._connections.add(connection)
            return connection
        assert problem is not None
        self._resolved_at = float("-inf")  # the host may have another address by now
        raise problem

    async def _resolve(self) -> list[Address]:
        now = self._loop.time()
        if now - self._resolved_at >= _RESOLVED_SECONDS:
            self._addresses = await resolve(self._endpoint, self._allowed)
            self._resolved_at = now
        return self._addresses

    def _forget(self, connection: HttpConnection) -> None:
        """Remove a connection that is closed."""
        self._connections.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)


class HttpPool:
    """The pools of all hosts that this process pushes to."""

    def __init__(self, allowed: Sequence[Network] = (), *, per_host: int = DEFAULT_CONNECTIONS_PER_HOST) -> None:
        self._allowed = allowed
        self._per_host = per_host
        self._tls = ssl.create_default_context()
        self._hosts: weakref.WeakValueDictionary[tuple[str, str, int], HostPool] = weakref.WeakValueDictionary()
        """A pool lives as long as an endpoint uses it."""

    def host(self, endpoint: Endpoint) -> HostPool:
        """Return the pool for the host of an endpoint."""
        key = (endpoint.scheme, endpoint.host, endpoint.port)
        found = self._hosts.get(key)
        if found is None:
            found = self._hosts[key] = HostPool(endpoint, self._allowed, limit=self._per_host, tls=self._tls)
        return found

    def close_idle(self) -> None:
        """Close connections that are idle for too long."""
        now = asyncio.get_running_loop().time()
        for host in [*self._hosts.values()]:
            host.close_idle(now)

    def close(self) -> None:
        """Close all connections."""
        for host in [*self._hosts.values()]:
            host.close()


def describe_connect_error(error: Exception) -> str:
    """Describe why there is no connection."""
    if isinstance(error, PurveyorError):
        return str(error)
    if isinstance(error, TimeoutError):
        return f"no connection within {_CONNECT_TIMEOUT_SECONDS:g} s"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else error.reason}"
    return f"no connection: {getattr(error, 'strerror', None) or error}"

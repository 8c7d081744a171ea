"""HTTP connections to endpoints: one pool for each host, kept open between requests, behind an awaitable `post`.

A pool opens at most `limit` connections; a request beyond that waits for one. `egress_policy` decides which addresses
push may reach. It decides when a connection is made, and the connection goes to the address that was checked.
"""

import asyncio
import ssl
import weakref
from collections.abc import Sequence
from typing import Final

from purveyor.delivery.push.egress_policy import Address, Network, resolve
from purveyor.delivery.push.http_connection import DeadlineExceeded, HttpConnection
from purveyor.delivery.push.retry_decision import Outcome
from purveyor.model.errors import PurveyorError, Refused
from purveyor.model.push_config import Endpoint

DEFAULT_CONNECTIONS_PER_HOST: Final = 256
_IDLE_SECONDS: Final = 50.0
"""The pool closes a connection that is idle for this long, before the endpoint does."""
_RESOLVED_SECONDS: Final = 30.0
"""The pool reuses the resolved addresses of a host name for this long."""
_CONNECT_TIMEOUT_SECONDS: Final = 10.0


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
        except Exception as error:  # noqa: BLE001 - the caller gets the reason as an outcome, whatever it is
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

"""A pool of bulk connections: reuse an idle one, or open a new one within a retry deadline. Requests to the API on it.

Spark reuses Python workers for the next task, so idle connections are kept per process and address. A connection is
never shared: the caller owns it until `release`. A forked child does not see the connections of its parent.
"""

import atexit
import os
import threading
import time
from typing import Any, Final

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk.net.connect import Server, list_servers, open_connection
from purveyor.jetstream.bulk.net.connection import REPLY_TIMEOUT_SECONDS, BulkConnection, ConnectionLost
from purveyor.model.backoff import Backoff, RetryDelays, random_jitter
from purveyor.model.errors import NoAnswer, PurveyorError, ServerUnavailable

_MAX_IDLE_CONNECTIONS: Final = 4
_CONNECT_TIMEOUT_SECONDS: Final = 5.0
_CONNECT_BACKOFF: Final = Backoff(0.05, 2.0)

_lock = threading.Lock()
_idle: dict[tuple[int, Address], list[BulkConnection]] = {}
_discovered: dict[Address, tuple[str, ...]] = {}


class RetryDeadlineExceeded(ServerUnavailable):
    """The retry deadline has passed."""


class RetryDeadline:
    """The time to retry for, counted from the first failure after the last progress."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: float | None = None
        self._delays = RetryDelays(_CONNECT_BACKOFF)

    def progress(self) -> None:
        """Reset the deadline: the next failure starts it anew."""
        self._since = None
        self._delays.reset()

    def pause_or_raise(self, error: PurveyorError) -> None:
        """Pause before the next attempt, longer each time; raise RetryDeadlineExceeded after the deadline."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        left = self._since + self._seconds - now
        if left <= 0:
            raise RetryDeadlineExceeded(
                f"gave up after {self._seconds:g} s: {error.message}", fix=error.fix or "is the server up?"
            ) from error
        time.sleep(min(left, self._delays.next_seconds(jitter=random_jitter())))

    def attempt_seconds(self) -> float:
        """Return the timeout of a single attempt."""
        return min(_CONNECT_TIMEOUT_SECONDS, max(self._seconds, 0.1))


def connect(address: Address, retry_deadline: RetryDeadline) -> BulkConnection:
    """Return a working connection; raise at once for wrong credentials or an unsuitable server."""
    connection = _take_idle(address)
    while connection is None:
        try:
            connection = _connect_any(address, retry_deadline.attempt_seconds())
        except ServerUnavailable as error:
            retry_deadline.pause_or_raise(error)
    return connection


def release(address: Address, connection: BulkConnection) -> None:
    """Return a connection to the pool. No request may be in flight on it."""
    with _lock:
        kept = _idle.setdefault((os.getpid(), address), [])
        if len(kept) < _MAX_IDLE_CONNECTIONS:
            kept.append(connection)
            return
    connection.close()


def close_idle() -> None:
    """Close all idle connections of this process."""
    with _lock:
        own_keys = [key for key in _idle if key[0] == os.getpid()]
        connections = [connection for key in own_keys for connection in _idle.pop(key)]
    for connection in connections:
        connection.close()


def _take_idle(address: Address) -> BulkConnection | None:
    while True:
        with _lock:
            kept = _idle.get((os.getpid(), address))
            if not kept:
                return None
            connection = kept.pop()
        try:
            # Handle what arrived while the connection was idle: a PING, or the end of the connection.
            while connection.pump(0.0):
                connection.receive()
            connection.receive()
        except PurveyorError:
            connection.close()
            continue
        return connection


def _connect_any(address: Address, timeout: float) -> BulkConnection:
    """Try each known server once, beginning with the one that worked last."""
    known = list_servers(address, _discovered.get(address, ()))
    failures: list[str] = []
    for server in _order_servers(address, known):
        try:
            connection = open_connection(address, server, timeout)
        except ConnectionLost as error:
            failures.append(error.message)
            continue
        _discovered[address] = connection.info.others
        _last_good[address] = server
        return connection
    raise ServerUnavailable("; ".join(failures), fix="is the server up, and is this its address?")


_last_good: dict[Address, Server] = {}


def _order_servers(address: Address, known: list[Server]) -> list[Server]:
    last = _last_good.get(address)
    if last in known:
        start = known.index(last)
        return known[start:] + known[:start]
    return known


atexit.register(close_idle)


def request_api(
    address: Address,
    subject: str,
    body: dict[str, Any] | None = None,
    *,
    patience_seconds: float = 60.0,
    answer_seconds: float = REPLY_TIMEOUT_SECONDS,
) -> dict[str, Any]:
    """Send a request to the JetStream API over a pooled connection; return the JSON of the reply.

    For a program without an event loop, such as the driver of a Spark query. It waits for a lost server up to
    `patience_seconds` and repeats the request if no reply comes within `answer_seconds`: use it only for requests that
    may be repeated.
    """
    retry_deadline = RetryDeadline(patience_seconds)
    while True:
        connection = connect(address, retry_deadline)
        try:
            reply = connection.request_api(subject, body, timeout=answer_seconds)
        except RetryDeadlineExceeded:
            raise
        except (ConnectionLost, NoAnswer, ServerUnavailable) as error:
            connection.close()
            retry_deadline.pause_or_raise(error)
            continue
        except BaseException:
            release(address, connection) if connection.is_usable else connection.close()
            raise
        release(address, connection)
        return reply

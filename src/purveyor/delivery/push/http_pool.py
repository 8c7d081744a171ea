"""Sends requests to endpoints and hears their answers: one pool of connections per host, kept open between requests.

A host gets so many connections at a time and no more; requests beyond that wait for one. Which addresses may be reached
is decided when a connection is made (`addresses`), and the connection is made to the address that was judged.
"""

import asyncio
import contextlib
import ssl
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from purveyor.delivery.push.egress_policy import Address, Network, resolve
from purveyor.delivery.push.http_connection import Done, Exchange
from purveyor.delivery.push.retry_decision import Outcome
from purveyor.model.errors import PurveyorError, Refused
from purveyor.model.push_config import Endpoint

PER_HOST: Final = 256
_KEEP_SECONDS: Final = 50.0
"""A connection that is not used for so long is closed, before the other side does it."""
_RESOLVED_SECONDS: Final = 30.0
"""So long the addresses of a name are kept."""
_CONNECT_SECONDS: Final = 10.0


@dataclass(slots=True, eq=False)
class _Job:
    """A request until its outcome is known."""

    request: bytes
    done: Done
    began: float
    link: Exchange | None = None
    fresh: bool = False
    """It must not go over a connection that was used before."""
    timer: asyncio.TimerHandle | None = field(default=None)
    over: bool = False

    def end(self, outcome: Outcome) -> None:
        if self.over:
            return
        self.over = True
        if self.timer is not None:
            self.timer.cancel()
        self.done(outcome)


class Host:
    """The connections to one host and port."""

    def __init__(self, endpoint: Endpoint, allowed: Sequence[Network], *, limit: int, tls: ssl.SSLContext) -> None:
        self._endpoint = endpoint
        self._allowed = allowed
        self._limit = limit
        self._tls = tls if endpoint.scheme == "https" else None
        self._loop = asyncio.get_running_loop()
        self._links: set[Exchange] = set()
        self._idle: list[Exchange] = []
        self._waiting: deque[_Job] = deque()
        self._connecting: set[asyncio.Task[None]] = set()
        self._addresses: list[Address] = []
        self._resolved_at = float("-inf")
        self._closed = False

    def post(self, request: bytes, deadline_seconds: float, done: Done) -> None:
        """Send a request; `done` hears the outcome, at the deadline at the latest."""
        now = self._loop.time()
        job = _Job(request, done, now)
        job.timer = self._loop.call_later(deadline_seconds, self._late, job)
        try:
            while self._idle:
                link = self._idle.pop()
                if link.usable:
                    self._send(job, link)
                    return
            self._enqueue(job)
        except Exception as error:  # noqa: BLE001 - `done` is called once, whatever happens
            job.end(Outcome(error=why(error)))

    async def probe(self) -> None:
        """Make sure that a connection can be made, without sending anything. A `PurveyorError` or OSError if not."""
        if not any(link.usable for link in self._idle):
            self._idle.append(await self._connect())

    def sweep(self, now: float) -> None:
        """Close what was not used for long."""
        kept = []
        for link in self._idle:
            if link.usable and now - link.idle_since < _KEEP_SECONDS:
                kept.append(link)
            else:
                link.close()
        self._idle = kept

    async def close(self) -> None:
        """Hang up everywhere."""
        self._closed = True
        for task in self._connecting:
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        for link in [*self._links]:
            link.close()
        while self._waiting:
            self._waiting.popleft().end(Outcome(error="this process is about to end", sent=False))

    def _enqueue(self, job: _Job) -> None:
        self._waiting.append(job)
        if len(self._links) + len(self._connecting) < self._limit and not self._closed:
            task = self._loop.create_task(self._open())
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    def _send(self, job: _Job, link: Exchange) -> None:
        job.link = link
        link.send(job.request, lambda outcome: self._answered(job, link, outcome))

    def _answered(self, job: _Job, link: Exchange, outcome: Outcome) -> None:
        if job.over:
            return
        if outcome.status is None and link.served and not link.heard and not job.fresh:
            # The other side closed a connection that it had kept, just when it was used again: that is no answer.
            job.fresh, job.link = True, None
            self._enqueue(job)
            return
        job.end(outcome)

    def _free(self, link: Exchange) -> None:
        """A connection can take the next request."""
        while self._waiting:
            job = self._waiting.popleft()
            if job.over:
                continue
            if job.fresh and link.served:
                self._waiting.appendleft(job)  # it waits for one that is being made
                break
            self._send(job, link)
            return
        link.idle_since = self._loop.time()
        self._idle.append(link)

    def _gone(self, link: Exchange) -> None:
        self._links.discard(link)
        if link in self._idle:
            self._idle.remove(link)
        if self._waiting and not self._connecting and not self._closed:
            self._enqueue(self._waiting.popleft())

    def _late(self, job: _Job) -> None:
        """The deadline of a request is over."""
        if job.over:
            return
        seconds = self._loop.time() - job.began
        if job.link is not None:
            job.link.abandon()
            what = "the answer was not whole" if job.link.heard else "no answer"
            job.end(Outcome(error=f"{what} within {seconds:.3g} s"))
            return
        with contextlib.suppress(ValueError):
            self._waiting.remove(job)
        crowded = len(self._links) >= self._limit
        job.end(Outcome(error=f"no connection within {seconds:.3g} s", sent=not crowded))

    async def _open(self) -> None:
        """Make a connection for whoever waits; if that fails, the one who has waited longest hears it."""
        try:
            link = await self._connect()
        except Exception as error:  # noqa: BLE001 - a request that waits gets the reason, whatever it is
            while self._waiting:
                job = self._waiting.popleft()
                if not job.over:
                    refused = isinstance(error, Refused)
                    job.end(Outcome(error=why(error), sent=not refused, refused=refused))
                    return
            return
        self._free(link)

    async def _connect(self) -> Exchange:
        async with asyncio.timeout(_CONNECT_SECONDS):
            problem: OSError | None = None
            for address in await self._resolve():
                try:
                    _, link = await self._loop.create_connection(
                        lambda: Exchange(self._free, self._gone),
                        str(address),
                        self._endpoint.port,
                        ssl=self._tls,
                        server_hostname=self._endpoint.host if self._tls is not None else None,
                    )
                except OSError as error:
                    problem = error
                    continue
                self._links.add(link)
                return link
            assert problem is not None
            self._resolved_at = float("-inf")  # perhaps it is elsewhere by now
            raise problem

    async def _resolve(self) -> list[Address]:
        now = self._loop.time()
        if now - self._resolved_at >= _RESOLVED_SECONDS:
            self._addresses = await resolve(self._endpoint, self._allowed)
            self._resolved_at = now
        return self._addresses


class Sender:
    """All hosts that this process pushes to."""

    def __init__(self, allowed: Sequence[Network] = (), *, per_host: int = PER_HOST) -> None:
        self._allowed = allowed
        self._per_host = per_host
        self._tls = ssl.create_default_context()
        self._hosts: weakref.WeakValueDictionary[tuple[str, str, int], Host] = weakref.WeakValueDictionary()
        """As long as somebody pushes there."""

    def host(self, endpoint: Endpoint) -> Host:
        """The connections to the host of an endpoint."""
        key = (endpoint.scheme, endpoint.host, endpoint.port)
        found = self._hosts.get(key)
        if found is None:
            found = self._hosts[key] = Host(endpoint, self._allowed, limit=self._per_host, tls=self._tls)
        return found

    def sweep(self) -> None:
        """Close connections that were not used for long."""
        now = asyncio.get_running_loop().time()
        for host in [*self._hosts.values()]:
            host.sweep(now)

    async def close(self) -> None:
        """Hang up everywhere."""
        await asyncio.gather(*(host.close() for host in [*self._hosts.values()]))


def why(error: Exception) -> str:
    """Why there is no connection, in words."""
    if isinstance(error, PurveyorError):
        return str(error)
    if isinstance(error, TimeoutError):
        return f"no connection within {_CONNECT_SECONDS:g} s"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else error.reason}"
    return f"no connection: {getattr(error, 'strerror', None) or error}"

"""One HTTP/1.1 connection to an endpoint: a request goes out, and its answer comes back whole, or it has failed.

The parser is llhttp (httptools). What is particular to push: 102 is an answer, not a notice that one is on its way; an
answer counts when it is whole; of a long body only the beginning is read; nothing is ever redirected.
"""

import asyncio
from collections.abc import Callable
from typing import Final, cast

import httptools

from purveyor.delivery.push.retry_decision import Outcome

KEPT_BYTES: Final = 1000
"""So much of a body is kept for people to read."""
MOST_BYTES: Final = 256 << 10
"""An answer longer than this is cut: its status counts, and the connection is closed."""
_MOST_HEADER_BYTES: Final = 64 << 10
_PROCESSING: Final = 102
_SWITCHING: Final = 101

Done = Callable[[Outcome], None]


class Exchange(asyncio.Protocol):
    """See the module. `free` is called when it can take another request, `gone` when the connection is over."""

    def __init__(self, free: "Callable[[Exchange], None]", gone: "Callable[[Exchange], None]") -> None:
        self._free = free
        self._gone = gone
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._done: Done | None = None
        self._closing = False
        self.served = 0
        """How many requests were answered here."""
        self.idle_since = 0.0
        self._begin()

    def _begin(self) -> None:
        self._received = 0
        self._final = False
        self._in_body = False
        self._until_end = True
        self._retry_after: str | None = None
        self._body = b""

    @property
    def heard(self) -> bool:
        """Whether anything came back for the request under way."""
        return self._received > 0

    @property
    def usable(self) -> bool:
        """Whether another request may be sent."""
        transport = self._transport
        return transport is not None and not self._closing and self._done is None and not transport.is_closing()

    def send(self, request: bytes, done: Done) -> None:
        """One request; `done` hears the outcome, once. A timeout is the caller's."""
        self._begin()
        self._done = done
        if self._transport is None or self._transport.is_closing():  # just now, and nobody was told yet
            self._fail("no answer: connection lost")
        else:
            self._transport.write(request)

    def abandon(self) -> None:
        """Nobody waits for the answer any more."""
        self._done = None
        self.close()

    def close(self) -> None:
        """Hang up."""
        self._closing = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It stands."""
        self._transport = cast("asyncio.Transport", transport)  # those of uvloop are none by name

    def data_received(self, data: bytes) -> None:
        """A piece of an answer; without a request it is nonsense."""
        if self._done is None:
            self.close()
            return
        self._received += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._finish(close=True)
        except (httptools.HttpParserError, ValueError) as error:
            # What follows a whole answer is nobody's: the answer stands, and the connection is not used again.
            self.close()
            self._fail(f"not an HTTP answer: {error}")
        if self._in_body and self._received > MOST_BYTES:
            self._finish(close=True)
        elif not self._in_body and self._received > _MOST_HEADER_BYTES:
            self.close()
            self._fail("the headers of the answer have no end")

    def eof_received(self) -> bool:
        """The endpoint has nothing more to say; some answers end that way."""
        self._ended()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self._closing = True
        self._ended(exc)
        self._transport = None
        self._gone(self)

    def _ended(self, error: Exception | None = None) -> None:
        if self._done is None:
            self._closing = True
            return
        if error is None and self._in_body and self._until_end:
            self._finish(close=True)
        else:
            self._fail(
                "the connection broke before the answer was whole" if self.heard else "no answer: connection lost"
            )

    def on_message_begin(self) -> None:
        """Of the parser: an answer begins."""
        if self._done is None:
            raise ValueError("more than one answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Of the parser: few headers matter."""
        lower = name.lower()
        if lower == b"retry-after":
            self._retry_after = value.decode("latin-1").strip()
        elif lower in (b"content-length", b"transfer-encoding"):
            self._until_end = False

    def on_headers_complete(self) -> None:
        """Of the parser."""
        status = self._parser.get_status_code()
        self._final = status >= 200 or status in (_PROCESSING, _SWITCHING)
        self._in_body = self._final

    def on_body(self, data: bytes) -> None:
        """Of the parser: the beginning is kept."""
        if len(self._body) < KEPT_BYTES:
            self._body += data[: KEPT_BYTES - len(self._body)]

    def on_message_complete(self) -> None:
        """Of the parser: the answer is whole, or it was a notice that one is on its way."""
        if not self._final:
            self._retry_after, self._until_end = None, True
            return
        # After 102 the endpoint may still send the answer that others would wait for: not on our next request.
        self._finish(close=not self._parser.should_keep_alive() or self._parser.get_status_code() < 200)

    def _finish(self, *, close: bool) -> None:
        done, self._done = self._done, None
        if done is None:
            return
        self.served += 1
        outcome = Outcome(status=self._parser.get_status_code(), retry_after=self._retry_after, body=self._body)
        if close:
            self.close()
        else:
            self._free(self)
        done(outcome)

    def _fail(self, why: str) -> None:
        done, self._done = self._done, None
        self._closing = True
        if done is not None:
            done(Outcome(error=why, body=self._body))

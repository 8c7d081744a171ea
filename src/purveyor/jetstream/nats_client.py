"""The adapter of nats-py: the only module that overrides or uses private members of that library.

nats-py keeps one value of each header name, in both directions, and it passes a reply through two tasks and a queue
before the requester gets it. It has no public way to change either, or to unsubscribe without losing messages. So this
module uses these private members (`tests/jetstream/test_nats_client.py` fails if nats-py changes one of them):

- `Client._process_msg` is overridden: a reply goes from the socket directly to the handler of its request.
- `Client._process_headers` is overridden: received headers keep all their values.
- `Client._send_publish` is overridden, and calls `_send_command`: sent headers keep all their values.
- `Client._flush_pending` is overridden, with `_pending`, `_pending_data_size` and `_transport`: a request is written at
  the end of this turn of the event loop, without the flusher task in between.
- `Client._send_ping` is overridden: nats-py writes a PING before pending data, and its PONG would confirm nothing.
- `Client._connect_to_server` is overridden, with `_transport`: nats-py drops the connection of an attempt that failed,
  without closing it.
- `Client._server_info` is read: the library does not expose whether the server offers JetStream.
- `Client._send_unsubscribe` and `Subscription._id`: the public `unsubscribe` drops messages that are in flight.
- `Subscription._pending_queue` and `_pending_size`: the public `next_msg` costs a task and a timeout per message.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

from nats import errors as nats_errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.protocol import command

from purveyor.jetstream import headers as header_codec
from purveyor.jetstream.headers import HeaderBlock, Headers
from purveyor.model.errors import PurveyorError

_MAX_DIRECT_WRITE_BYTES = 64 << 10
_FLUSH_TIMEOUT_SECONDS = 10
"""How long `NatsSubscription.close` waits for messages that the server has sent before it unsubscribes."""


class RawMessage(NamedTuple):
    """A received message: the reply to a request, or a message of a subscription."""

    subject: str
    data: bytes
    block: HeaderBlock
    reply: str = ""

    @property
    def headers(self) -> Headers:
        """The headers, each with all its values."""
        return self.block.headers

    @property
    def status(self) -> int:
        """The server's status, 0 on ordinary messages."""
        return self.block.status


class HeaderDict(dict[str, str]):
    """The headers as nats-py sees them, with the encoded block to send, or the parsed block that was received."""

    block: bytes = b""
    parsed: HeaderBlock = HeaderBlock()


class NatsClient(Client):
    """The client of nats-py with all values of headers and a direct path for requests and replies."""

    def __init__(self) -> None:
        super().__init__()
        self._inbox = b""
        self._reply_handlers: dict[bytes, Callable[[RawMessage], object]] = {}
        self._request_count = 0
        self._has_inbox = False
        self._write_scheduled = False

    def add_reply_handler(self, handler: Callable[[RawMessage], object]) -> str:
        """Return a new reply subject; `handler` gets each reply to it until `remove_reply_handler`."""
        if not self._inbox:
            self._inbox = f"{self.new_inbox()}.".encode()
        self._request_count += 1
        reply = b"%s%d" % (self._inbox, self._request_count)
        self._reply_handlers[reply] = handler
        return reply.decode()

    def remove_reply_handler(self, reply: str) -> None:
        """Ignore further replies to a reply subject."""
        self._reply_handlers.pop(reply.encode(), None)

    async def send_request(self, subject: str, data: bytes, reply: str, headers: "HeaderDict | None") -> None:
        """Send a request whose replies go to the handler of `reply`."""
        if not self._has_inbox:
            self._has_inbox = True  # set first: no other request overtakes the subscription
            await self.subscribe(f"{self._inbox.decode()}*", cb=_ignore)
        await self.publish(subject, data, reply=reply, headers=headers)

    async def _connect_to_server(self, s: Any) -> None:
        if self._transport is not None:
            self._transport.close()  # type: ignore[no-untyped-call]  # not annotated in nats-py
        await super()._connect_to_server(s)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        handler = self._reply_handlers.get(bytes(subject))
        if handler is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        block = header_codec.decode(bytes(headers)) if headers else HeaderBlock()
        handler(RawMessage(bytes(subject).decode(), bytes(data), block, bytes(reply).decode()))

    @property
    def offers_jetstream(self) -> bool:
        """Whether the connected server reports that JetStream is enabled."""
        return bool(self._server_info.get("jetstream"))

    async def _process_headers(self, headers: bytes | None) -> dict[str, str] | None:
        if not headers:
            return None
        parsed = header_codec.decode(headers)
        seen = HeaderDict({name: values[-1] for name, values in parsed.headers.items()})
        if parsed.status:
            seen["Status"] = str(parsed.status)
            seen["Description"] = parsed.description
        seen.parsed = parsed
        return seen

    async def _send_publish(
        self, subject: str, reply: str, payload: bytes, payload_size: int, headers: dict[str, Any] | None
    ) -> None:
        block = headers.block if isinstance(headers, HeaderDict) else b""
        if not block:
            await super()._send_publish(subject, reply, payload, payload_size, headers)
            return
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += payload_size
        await self._send_command(command.hpub_cmd(subject, reply, block, payload))
        await self._flush_pending()

    async def _flush_pending(self, force_flush: bool = False) -> Any:
        """Write pending data at the end of this turn of the event loop, without a task in between.

        If there is much of it, the flusher task of nats-py writes it, because that task waits for a slow server.
        """
        if force_flush or self._pending_data_size > _MAX_DIRECT_WRITE_BYTES or not self.is_connected:
            return await super()._flush_pending(force_flush)
        if not self._write_scheduled:
            self._write_scheduled = True
            asyncio.get_running_loop().call_soon(self._write_pending)
        return None

    async def _send_ping(self, future: "asyncio.Future[Any] | None" = None) -> None:
        """Write a PING after pending data: nats-py writes it first, and its PONG would then confirm nothing."""
        self._write_pending()
        await super()._send_ping(future)

    def _write_pending(self) -> None:
        self._write_scheduled = False
        if not self._pending or not self.is_connected or self._transport is None:
            return  # the reconnect sends it
        pending, self._pending, self._pending_data_size = self._pending, [], 0
        self._transport.write(b"".join(pending))

    async def unsubscribe_and_flush(self, subscription: Subscription) -> None:
        """Unsubscribe on the server and wait for the messages that it has sent; they stay in the subscription."""
        if self.is_connected:
            await self._send_unsubscribe(subscription._id)  # noqa: SLF001 - the public unsubscribe drops them
            await self.flush(_FLUSH_TIMEOUT_SECONDS)


class NatsSubscription:
    """Messages of one subject as they arrive; survives a reconnect."""

    def __init__(self, client: NatsClient, inner: Subscription, closed_error: Callable[[], PurveyorError]) -> None:
        self._client = client
        self._inner = inner
        self._closed_error = closed_error

    async def next(self, timeout_seconds: float) -> RawMessage | None:
        """Return the next message; None after the timeout."""
        task = asyncio.current_task()
        cancelled = task.cancelling() if task is not None else 0
        try:
            message = to_raw_message(await self._inner.next_msg(timeout=max(timeout_seconds, 0.001)))
            if task is not None and task.cancelling() > cancelled:
                # Before Python 3.12 `asyncio.wait_for` swallows a cancellation that comes together with a message.
                raise asyncio.CancelledError
            return message  # noqa: TRY300 - the errors below are those of the first line
        except nats_errors.TimeoutError:
            return None
        except nats_errors.ConnectionClosedError as error:
            if task is not None and task.cancelling() > cancelled:
                raise asyncio.CancelledError from error  # nats-py reports a cancellation as a closed connection
            raise self._closed_error() from error

    async def __aiter__(self) -> AsyncIterator[RawMessage]:
        while True:
            message = await self.next(3600)
            if message is not None:
                yield message

    def drain(self) -> list[RawMessage]:
        """Return the messages that have arrived and were not taken with `next`."""
        arrived: list[RawMessage] = []
        queue: asyncio.Queue[Msg] = self._inner._pending_queue  # noqa: SLF001 - `next_msg` costs a task per message
        while not queue.empty():
            message = queue.get_nowait()
            self._inner._pending_size -= len(message.data)  # noqa: SLF001 - else nats-py reports a slow consumer
            arrived.append(to_raw_message(message))
        return arrived

    async def close(self, *, in_flight: bool = False) -> None:
        """Unsubscribe. With `in_flight`, messages that the server has sent by then still arrive, for `drain`."""
        if in_flight:
            with contextlib.suppress(nats_errors.Error):
                await self._client.unsubscribe_and_flush(self._inner)
        with contextlib.suppress(nats_errors.Error):
            await self._inner.unsubscribe()


async def _ignore(_message: Msg) -> None:
    """Ignore a message: replies go to their handlers, not to this callback."""


def to_nats_headers(headers: Headers | bytes | None) -> HeaderDict | None:
    """Return headers in the form that nats-py takes."""
    if not headers:
        return None
    result = HeaderDict()
    result.block = encode_headers(headers)
    return result


def encode_headers(headers: Headers | bytes) -> bytes:
    """Return the header block of headers, which may be encoded already."""
    return headers if isinstance(headers, bytes) else header_codec.encode(headers)


def to_raw_message(message: Msg) -> RawMessage:
    """Return a message of nats-py with all values of its headers."""
    parsed = message.headers.parsed if isinstance(message.headers, HeaderDict) else HeaderBlock()
    return RawMessage(message.subject, message.data, parsed, message.reply)

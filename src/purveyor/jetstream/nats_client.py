"""nats-py as the connection of a process uses it: with all values of headers, and with a short way for questions.

It drops all but one value of a header, in both directions. And an answer passes two tasks and a queue before the one
who asked has it; here it goes from the socket straight to him, and a question straight to the socket.
"""

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.protocol import command

from purveyor.jetstream import headers as header_codec
from purveyor.jetstream.headers import HeaderBlock, Headers

_WRITE_AT_ONCE = 64 << 10


class Answer(NamedTuple):
    """A message off the wire: an answer to a request, or one delivered to a subscription."""

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
    """What nats-py sees of the headers, with the block they go out as, or what was read of one that came in."""

    block: bytes = b""
    parsed: HeaderBlock = HeaderBlock()


class NatsClient(Client):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self._inbox = b""
        self._expected: dict[bytes, Callable[[Answer], object]] = {}
        self._asked = 0
        self._listens = False
        self._writes_soon = False

    def expect(self, heard: Callable[[Answer], object]) -> str:
        """Where a question wants its answers, each of which is heard; until `expect_no_more`."""
        if not self._inbox:
            self._inbox = f"{self.new_inbox()}.".encode()
        self._asked += 1
        reply = b"%s%d" % (self._inbox, self._asked)
        self._expected[reply] = heard
        return reply.decode()

    def expect_no_more(self, reply: str) -> None:
        """Nobody waits for that answer now."""
        self._expected.pop(reply.encode(), None)

    async def ask(self, subject: str, data: bytes, reply: str, headers: "HeaderDict | None") -> None:
        """Send a question."""
        if not self._listens:
            self._listens = True  # nothing of what follows lets another question overtake it
            await self.subscribe(f"{self._inbox.decode()}*", cb=_unheard)
        await self.publish(subject, data, reply=reply, headers=headers)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        heard = self._expected.get(bytes(subject))
        if heard is None:
            await super()._process_msg(sid, subject, reply, data, headers)
            return
        block = header_codec.decode(bytes(headers)) if headers else HeaderBlock()
        heard(Answer(bytes(subject).decode(), bytes(data), block, bytes(reply).decode()))

    @property
    def offers_jetstream(self) -> bool:
        """Whether the server connected to says that JetStream is on."""
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
        """Write what is pending at the end of this turn of the loop, without a task in between.

        Unless it is much: then nats-py's task does it, which waits for a slow server.
        """
        if force_flush or self._pending_data_size > _WRITE_AT_ONCE or not self.is_connected:
            return await super()._flush_pending(force_flush)
        if not self._writes_soon:
            self._writes_soon = True
            asyncio.get_running_loop().call_soon(self._write)
        return None

    async def _send_ping(self, future: "asyncio.Future[Any] | None" = None) -> None:
        """Write a PING behind what is pending: nats-py writes it first, and its PONG would then confirm nothing."""
        self._write()
        await super()._send_ping(future)

    def _write(self) -> None:
        self._writes_soon = False
        if not self._pending or not self.is_connected or self._transport is None:
            return  # the reconnect sends it
        pending, self._pending, self._pending_data_size = self._pending, [], 0
        self._transport.write(b"".join(pending))


async def _unheard(_message: Msg) -> None:
    """Answers do not come this way."""


def outgoing(headers: Headers | bytes | None) -> HeaderDict | None:
    """Headers as nats-py is given them."""
    if not headers:
        return None
    result = HeaderDict()
    result.block = block_of(headers)
    return result


def block_of(headers: Headers | bytes) -> bytes:
    """Headers as they go over the wire."""
    return headers if isinstance(headers, bytes) else header_codec.encode(headers)


def answer_of(message: Msg) -> Answer:
    """A message that came by way of nats-py."""
    parsed = message.headers.parsed if isinstance(message.headers, HeaderDict) else HeaderBlock()
    return Answer(message.subject, message.data, parsed, message.reply)

"""The asynchronous connection of a process to the NATS servers: requests, subscriptions, single publishes.

nats-py implements the protocol. This module turns its errors into errors of our tree, waits for a lost server for a
limited time, and raises PermissionDenied for a denied subject instead of a timeout.
"""

import asyncio
import contextlib
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, Self

from nats import errors as nats_errors
from nats.aio.msg import Msg

from purveyor.jetstream.address import Address
from purveyor.jetstream.api import MIN_SERVER_VERSION
from purveyor.jetstream.headers import Headers
from purveyor.jetstream.nats_client import NatsClient, NatsSubscription, RawMessage, encode_headers, to_nats_headers
from purveyor.model.errors import (
    AuthenticationFailed,
    NoAnswer,
    PermissionDenied,
    PublishRefused,
    PurveyorError,
    ServerTooOld,
    ServerUnavailable,
    SetupError,
)

__all__ = ["Connection", "NatsSubscription", "RawMessage"]
_REPLY_TIMEOUT_SECONDS = 5.0
_RECONNECT_INTERVAL_SECONDS = 0.25
_MAX_DENIED_SUBJECTS = 100
_NO_ANSWER_FIX = "try again; if it continues, check that the NATS server runs and its disk has space"
_DENIED = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"', re.IGNORECASE)


class Connection:
    """A connection to NATS. `Connection.open` makes it; `close` or an `async with` block closes it."""

    def __init__(self, address: Address, patience_seconds: float) -> None:
        self.address = address
        self.patience_seconds = patience_seconds
        self._client = NatsClient()
        self._connected = asyncio.Event()
        self._pending_replies: dict[str, set[asyncio.Future[Any]]] = {}
        self._denied: dict[str, PermissionDenied] = {}
        self._inbox_denied: PermissionDenied | None = None
        self._last_error: Exception | None = None
        self._rejected = asyncio.Event()
        self.generation = 1
        """The number of connections made so far: requests sent on an earlier one get no reply."""
        self.on_state: Callable[[str], None] | None = None

    @classmethod
    async def open(cls, address: Address, *, name: str = "purveyor", patience_seconds: float = 60) -> "Connection":
        """Connect; wait at most `patience_seconds` for a server. Raise AuthenticationFailed, ServerTooOld, ..."""
        self = cls(address, patience_seconds)
        connecting = asyncio.create_task(self._client.connect(**self._options(name)))
        rejected = asyncio.create_task(self._rejected.wait())
        try:
            await asyncio.wait((connecting, rejected), timeout=patience_seconds, return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done() or connecting.exception() is not None:
                failure = connecting.exception() if connecting.done() else None
                raise self._connect_error(failure or self._last_error)
        except BaseException:
            await _cancel(connecting)
            with contextlib.suppress(Exception):
                await self._client.close()
            raise
        finally:
            await _cancel(rejected)
        self._connected.set()
        try:
            self._check_server()
        except PurveyorError:
            await self.close()
            raise
        return self

    def _options(self, name: str) -> dict[str, Any]:
        address = self.address
        options: dict[str, Any] = {
            "servers": list(address.urls),
            "name": name,
            "inbox_prefix": address.inbox,
            "error_cb": self._on_error,
            "disconnected_cb": self._on_disconnect,
            "reconnected_cb": self._on_reconnect,
            "max_reconnect_attempts": -1,
            "reconnect_time_wait": _RECONNECT_INTERVAL_SECONDS,
            "connect_timeout": 5,
            "ping_interval": 10,
            "max_outstanding_pings": 2,
            "allow_reconnect": True,
        }
        if address.user is not None:
            options |= {"user": address.user, "password": address.password}
        if address.token is not None:
            options["token"] = address.token
        if address.credentials is not None:
            text = address.credentials.read_text()
            key = "user_credentials" if "BEGIN NATS USER JWT" in text else "nkeys_seed"
            options[key] = str(address.credentials)
        if address.tls is not None:
            options |= {
                "tls": address.tls.context(),
                "tls_hostname": address.tls.hostname or address.hosts()[0][0],
                "tls_handshake_first": address.tls.first,
            }
        return options

    def _connect_error(self, cause: BaseException | None) -> PurveyorError:
        if self._rejected.is_set():
            who = f"user {self.address.user!r}" if self.address.user else "these credentials"
            return AuthenticationFailed(
                f"the NATS server at {self.address} does not accept {who}",
                fix="check PURVEYOR_NATS_URL and PURVEYOR_NATS_CREDENTIALS",
            )
        return ServerUnavailable(
            f"no NATS server answers at {self.address} ({str(cause or '') or 'no answer'})",
            fix="is it running, and is the address right?",
        )

    def _check_server(self) -> None:
        found = self._client.connected_server_version
        if (found.major, found.minor) < MIN_SERVER_VERSION:
            wanted = ".".join(map(str, MIN_SERVER_VERSION))
            raise ServerTooOld(
                f"the NATS server at {self.address} is {self.server_version}, older than {wanted}",
                fix="upgrade nats-server",
            )

    async def _on_error(self, error: Exception) -> None:
        self._last_error = error
        text = str(error)
        if isinstance(error, nats_errors.AuthorizationError) or "authorization violation" in text.lower():
            self._rejected.set()
        found = _DENIED.search(text)
        if not found:
            return
        verb, subject = found.groups()
        publishing = verb.lower() == "publish"
        # nats-py gives the text in lower case. A denied inbox leaves every request without a reply.
        denied = PermissionDenied(
            f"these credentials may not {'publish' if publishing else 'subscribe'} to {subject!r}",
            fix="use other credentials, or have the permission added",
            code=403,
        )
        if publishing:
            if len(self._denied) >= _MAX_DENIED_SUBJECTS:
                self._denied.clear()
            self._denied[subject.lower()] = denied
        elif subject.lower().startswith(f"{self.address.inbox}.".lower()):
            self._inbox_denied = denied
        self._fail_pending(denied, subject.lower() if publishing else None)

    def _fail_pending(self, error: PurveyorError, subject: str | None = None) -> None:
        """Fail the pending requests on one subject, or all."""
        for waited_for, futures in self._pending_replies.items():
            if subject in (None, waited_for):
                for future in futures:
                    if not future.done():
                        future.set_exception(error)

    async def _on_disconnect(self) -> None:
        self._connected.clear()
        self._fail_pending(
            NoAnswer(f"the connection to {self.address} was lost before the reply came", fix="try again")
        )
        if self.on_state:
            self.on_state("disconnected")

    async def _on_reconnect(self) -> None:
        self.generation += 1
        self._inbox_denied = None
        self._connected.set()
        if self.on_state:
            self.on_state("connected")

    @property
    def connected(self) -> bool:
        """Whether the connection is up at this moment."""
        return self._connected.is_set() and self._client.is_connected

    @property
    def server_version(self) -> str:
        """The version of the connected server."""
        found = self._client.connected_server_version
        return f"{found.major}.{found.minor}.{found.patch}"

    @property
    def offers_jetstream(self) -> bool:
        """Whether the connected server offers JetStream."""
        return self._client.offers_jetstream

    @property
    def max_payload(self) -> int:
        """The maximum size of a message (headers and payload) that the server takes."""
        return self._client.max_payload

    def closed_error(self) -> PurveyorError:
        """Return why the connection is closed: by us, or because the server rejected the credentials."""
        if self._rejected.is_set():
            return self._connect_error(None)
        return ServerUnavailable(f"the connection to {self.address} is closed", fix="connect again")

    async def wait_until_connected(self, patience_seconds: float) -> None:
        """Return when the connection is up; raise ServerUnavailable after `patience_seconds`."""
        if self._client.is_closed:
            raise self.closed_error()
        if self._connected.is_set():  # the common case, checked before every request
            return
        try:
            await asyncio.wait_for(self._connected.wait(), None if math.isinf(patience_seconds) else patience_seconds)
        except TimeoutError:
            raise ServerUnavailable(
                f"no NATS server answered at {self.address} for {patience_seconds:g} s", fix="is it running?"
            ) from None

    async def request(
        self,
        subject: str,
        data: bytes = b"",
        *,
        headers: Headers | bytes | None = None,
        timeout_seconds: float | None = None,
    ) -> RawMessage:
        """Send a request and return the reply; raise NoAnswer after the timeout.

        The status 503 means that no program listens on the subject. Headers may be an encoded header block.
        """
        if self._inbox_denied is not None:
            raise self._inbox_denied
        with self._pending_reply(subject) as pending:
            timer = asyncio.get_running_loop().call_later(
                timeout_seconds or _REPLY_TIMEOUT_SECONDS, _set_no_answer, pending, subject
            )
            reply = self._client.add_reply_handler(
                lambda message: None if pending.done() else pending.set_result(message)
            )
            try:
                await self._client.send_request(subject, data, reply, to_nats_headers(headers))
                received: RawMessage = await pending
            except nats_errors.OutboundBufferLimitError as error:
                raise NoAnswer(f"no answer on {subject!r}", fix=_NO_ANSWER_FIX) from error
            except nats_errors.MaxPayloadError as error:
                size = len(data) + (len(encode_headers(headers)) if headers else 0)
                raise SetupError(f"{size} bytes are above the server's limit of {self.max_payload} bytes") from error
            except nats_errors.ConnectionClosedError as error:
                raise self.closed_error() from error
            finally:
                timer.cancel()
                self._client.remove_reply_handler(reply)
            return received

    async def request_many(self, subject: str, data: bytes, is_last: Callable[[RawMessage], bool]) -> list[RawMessage]:
        """Send a request and return all replies up to the last one; raise NoAnswer if that does not come."""
        if self._inbox_denied is not None:
            raise self._inbox_denied
        replies: list[RawMessage] = []
        with self._pending_reply(subject) as pending:

            def collect(reply_message: RawMessage) -> None:
                replies.append(reply_message)
                if is_last(reply_message) and not pending.done():
                    pending.set_result(None)

            timer = asyncio.get_running_loop().call_later(_REPLY_TIMEOUT_SECONDS, _set_no_answer, pending, subject)
            reply = self._client.add_reply_handler(collect)
            try:
                await self._client.send_request(subject, data, reply, None)
                await pending
            except nats_errors.OutboundBufferLimitError as error:
                raise NoAnswer(f"no answer on {subject!r}", fix=_NO_ANSWER_FIX) from error
            except nats_errors.ConnectionClosedError as error:
                raise self.closed_error() from error
            finally:
                timer.cancel()
                self._client.remove_reply_handler(reply)
        return replies

    @contextlib.contextmanager
    def _pending_reply(self, subject: str) -> Iterator["asyncio.Future[Any]"]:
        """Yield a future that fails if the subject is denied or the connection is lost during the block."""
        pending: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        waiting = self._pending_replies.setdefault(subject.lower(), set())
        waiting.add(pending)
        try:
            yield pending
        finally:
            pending.cancel()
            waiting.discard(pending)
            if not waiting:
                self._pending_replies.pop(subject.lower(), None)

    async def publish(
        self, subject: str, data: bytes = b"", *, reply: str = "", headers: Headers | None = None
    ) -> None:
        """Send without waiting for a reply. A caller that misses a reply calls `raise_if_denied`."""
        if self._denied:
            self._denied.pop(subject.lower(), None)
        try:
            await self._client.publish(subject, data, reply=reply, headers=to_nats_headers(headers))
        except nats_errors.MaxPayloadError as error:
            raise PublishRefused(
                f"a message of {len(data)} bytes for {subject!r} is above the server's limit of "
                f"{self.max_payload} bytes",
                fix="send less, or raise max_payload on the server",
                code=400,
            ) from error
        except nats_errors.ConnectionClosedError as error:
            raise self.closed_error() from error

    def raise_if_denied(self, subject: str) -> None:
        """Raise PermissionDenied if the server refused the last publish to a subject."""
        denied = self._denied.pop(subject.lower(), None)
        if denied is not None:
            raise denied

    async def subscribe(self, subject: str, *, queue: str = "", confirm: bool = False) -> NatsSubscription:
        """Subscribe to a subject. With `confirm`, wait for the server; raise PermissionDenied if it refuses."""
        with self._pending_reply(subject) as pending:
            try:
                subscription = NatsSubscription(
                    self._client, await self._client.subscribe(subject, queue=queue), self.closed_error
                )
            except nats_errors.ConnectionClosedError as error:
                raise self.closed_error() from error
            if confirm:
                await self.flush()
                if pending.done():
                    pending.result()
            return subscription

    async def subscribe_once(self, subject: str, on_message: Callable[[], None]) -> NatsSubscription:
        """Call `on_message` at the next message on a subject; the server sends only that one. Survives a reconnect.

        The message was published, but its stream may not have stored it yet.
        """
        message: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        message.add_done_callback(lambda done: None if done.cancelled() else on_message())
        try:
            inner = await self._client.subscribe(subject, future=message)
            await inner.unsubscribe(limit=1)
        except nats_errors.ConnectionClosedError as error:
            raise self.closed_error() from error
        return NatsSubscription(self._client, inner, self.closed_error)

    async def flush(self) -> None:
        """Return when the server has processed everything sent so far."""
        try:
            await self._client.flush(timeout=5)
        except nats_errors.Error as error:
            raise NoAnswer("the server did not confirm the sent messages", fix="try again") from error

    def new_inbox(self) -> str:
        """Return a new unique subject for replies."""
        return self._client.new_inbox()

    async def close(self) -> None:
        """Close the connection; flush it first if it is up."""
        if self.connected:
            with contextlib.suppress(PurveyorError):
                await self.flush()
        # The server is gone: uvloop raises RuntimeError, unsent data ConnectionError, and on Python 3.13 TypeError.
        with contextlib.suppress(RuntimeError, ConnectionError, TypeError):
            await self._client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _set_no_answer(waiting: "asyncio.Future[Any]", subject: str) -> None:
    if not waiting.done():
        waiting.set_exception(NoAnswer(f"no answer on {subject!r}", fix=_NO_ANSWER_FIX))


async def _cancel(task: "asyncio.Task[Any]") -> None:
    if not task.done():
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task

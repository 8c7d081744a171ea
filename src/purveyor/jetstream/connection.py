"""One connection of this process to the NATS servers, for control traffic: requests, subscriptions, single publishes.

nats-py does the protocol; here its errors become ours, a lost server becomes a wait of at most `patience`, a refused
subject becomes PermissionDenied instead of a timeout, and headers keep all their values.
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
from purveyor.jetstream.headers import Headers
from purveyor.jetstream.listener import Subscription
from purveyor.jetstream.nats_client import Answer, NatsClient, block_of, outgoing
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

__all__ = ["Answer", "Connection", "Subscription"]
OLDEST_SERVER = (2, 14)
_ANSWER_SECONDS = 5.0
_RECONNECT_SECONDS = 0.25
_MOST_DENIED = 100
_SILENCE_FIX = "try again; if that lasts, see whether the NATS server runs and its disk has room"
_DENIED = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"', re.IGNORECASE)


class Connection:
    """See the module. Made by `Connection.open`, closed by `close` or as an async context manager."""

    def __init__(self, address: Address, patience_seconds: float) -> None:
        self.address = address
        self.patience_seconds = patience_seconds
        self._client = NatsClient()
        self._connected = asyncio.Event()
        self._waiting: dict[str, set[asyncio.Future[Any]]] = {}
        self._denied: dict[str, PermissionDenied] = {}
        self._deaf: PermissionDenied | None = None
        self._last_error: Exception | None = None
        self._rejected = asyncio.Event()
        self.generation = 1
        """Counts the connections made: what was asked on an earlier one will not be answered."""
        self.on_state: Callable[[str], None] | None = None

    @classmethod
    async def open(cls, address: Address, *, name: str = "purveyor", patience_seconds: float = 60) -> "Connection":
        """Connect; waits at most `patience_seconds` for a server. Raises AuthenticationFailed, ServerTooOld, ..."""
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
            "reconnect_time_wait": _RECONNECT_SECONDS,
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
            f"no NATS server answers at {self.address} ({cause or 'no answer'})",
            fix="is it running, and is the address right?",
        )

    def _check_server(self) -> None:
        found = self._client.connected_server_version
        if (found.major, found.minor) < OLDEST_SERVER:
            wanted = ".".join(map(str, OLDEST_SERVER))
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
        # nats-py gives the text in lower case. A denied inbox leaves every question without an answer.
        denied = PermissionDenied(
            f"these credentials may not {'publish' if publishing else 'subscribe'} to {subject!r}",
            fix="use other credentials, or have the permission added",
            code=403,
        )
        if publishing:
            if len(self._denied) >= _MOST_DENIED:
                self._denied.clear()
            self._denied[subject.lower()] = denied
        elif subject.lower().startswith(f"{self.address.inbox}.".lower()):
            self._deaf = denied
        self._fail(denied, subject.lower() if publishing else None)

    def _fail(self, error: PurveyorError, subject: str | None = None) -> None:
        """End the waits for answers: those on one subject, or all."""
        for waited_for, futures in self._waiting.items():
            if subject in (None, waited_for):
                for future in futures:
                    if not future.done():
                        future.set_exception(error)

    async def _on_disconnect(self) -> None:
        self._connected.clear()
        self._fail(NoAnswer(f"the connection to {self.address} was lost before the answer came", fix="try again"))
        if self.on_state:
            self.on_state("disconnected")

    async def _on_reconnect(self) -> None:
        self.generation += 1
        self._deaf = None
        self._connected.set()
        if self.on_state:
            self.on_state("connected")

    @property
    def connected(self) -> bool:
        """Whether a server is there at this moment."""
        return self._connected.is_set() and self._client.is_connected

    @property
    def server_version(self) -> str:
        """The version of the server connected to."""
        found = self._client.connected_server_version
        return f"{found.major}.{found.minor}.{found.patch}"

    @property
    def offers_jetstream(self) -> bool:
        """Whether the server connected to has JetStream."""
        return self._client.offers_jetstream

    @property
    def max_payload(self) -> int:
        """The largest message (headers and payload) the server takes."""
        return self._client.max_payload

    def closed_error(self) -> PurveyorError:
        """Why nothing goes any more: closed by us, or turned away by the server."""
        if self._rejected.is_set():
            return self._connect_error(None)
        return ServerUnavailable(f"the connection to {self.address} is closed", fix="connect again")

    async def wait_connected(self, patience_seconds: float) -> None:
        """Return when a server is there; ServerUnavailable when the patience is over."""
        if self._client.is_closed:
            raise self.closed_error()
        if self._connected.is_set():  # the usual case, asked before every question
            return
        try:
            await asyncio.wait_for(self._connected.wait(), None if math.isinf(patience_seconds) else patience_seconds)
        except TimeoutError:
            raise ServerUnavailable(
                f"no NATS server answered at {self.address} for {patience_seconds:.0f} s", fix="is it running?"
            ) from None

    async def request(
        self,
        subject: str,
        data: bytes = b"",
        *,
        headers: Headers | bytes | None = None,
        timeout_seconds: float | None = None,
    ) -> Answer:
        """One question, one answer. Raises NoAnswer on silence; a 503 status means that nobody listens there.

        Headers may be given as the block they go out as.
        """
        if self._deaf is not None:
            raise self._deaf
        with self._failure(subject) as failed:
            timer = asyncio.get_running_loop().call_later(timeout_seconds or _ANSWER_SECONDS, _in_vain, failed, subject)
            reply = self._client.expect(lambda answer: None if failed.done() else failed.set_result(answer))
            try:
                await self._client.ask(subject, data, reply, outgoing(headers))
                answer: Answer = await failed
            except nats_errors.OutboundBufferLimitError as error:
                raise NoAnswer(f"no answer on {subject!r}", fix=_SILENCE_FIX) from error
            except nats_errors.MaxPayloadError as error:
                size = len(data) + (len(block_of(headers)) if headers else 0)
                raise SetupError(f"{size} bytes are more than the server takes ({self.max_payload})") from error
            except nats_errors.ConnectionClosedError as error:
                raise self.closed_error() from error
            finally:
                timer.cancel()
                self._client.expect_no_more(reply)
            return answer

    async def request_many(self, subject: str, data: bytes, is_last: Callable[[Answer], bool]) -> list[Answer]:
        """One question, several answers, with the last one. Raises NoAnswer if that does not come."""
        if self._deaf is not None:
            raise self._deaf
        answers: list[Answer] = []
        with self._failure(subject) as failed:

            def heard(answer: Answer) -> None:
                answers.append(answer)
                if is_last(answer) and not failed.done():
                    failed.set_result(None)

            timer = asyncio.get_running_loop().call_later(_ANSWER_SECONDS, _in_vain, failed, subject)
            reply = self._client.expect(heard)
            try:
                await self._client.ask(subject, data, reply, None)
                await failed
            except nats_errors.OutboundBufferLimitError as error:
                raise NoAnswer(f"no answer on {subject!r}", fix=_SILENCE_FIX) from error
            except nats_errors.ConnectionClosedError as error:
                raise self.closed_error() from error
            finally:
                timer.cancel()
                self._client.expect_no_more(reply)
        return answers

    @contextlib.contextmanager
    def _failure(self, subject: str) -> Iterator["asyncio.Future[Any]"]:
        """A future that fails when the subject is denied or the connection lost, as long as the block lasts."""
        failed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(subject.lower(), set())
        waiting.add(failed)
        try:
            yield failed
        finally:
            failed.cancel()
            waiting.discard(failed)
            if not waiting:
                self._waiting.pop(subject.lower(), None)

    async def publish(
        self, subject: str, data: bytes = b"", *, reply: str = "", headers: Headers | None = None
    ) -> None:
        """Send without waiting for anything; whoever misses an answer then asks `raise_if_denied`."""
        if self._denied:
            self._denied.pop(subject.lower(), None)
        try:
            await self._client.publish(subject, data, reply=reply, headers=outgoing(headers))
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
        """PermissionDenied if the server refused what was last sent there."""
        denied = self._denied.pop(subject.lower(), None)
        if denied is not None:
            raise denied

    async def subscribe(self, subject: str, *, queue: str = "", confirm: bool = False) -> Subscription:
        """Listen on a subject. With `confirm`, returns when the server does its part, or raises PermissionDenied."""
        with self._failure(subject) as failed:
            try:
                listening = Subscription(self.closed_error, await self._client.subscribe(subject, queue=queue))
            except nats_errors.ConnectionClosedError as error:
                raise self.closed_error() from error
            if confirm:
                await self.flush()
                if failed.done():
                    failed.result()
            return listening

    async def listen_once(self, subject: str, heard: Callable[[], None]) -> Subscription:
        """Call `heard` at the next message on a subject; the server sends that one and no more. Survives a reconnect.

        The message was sent, and may not be stored yet.
        """
        message: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        message.add_done_callback(lambda done: None if done.cancelled() else heard())
        try:
            inner = await self._client.subscribe(subject, future=message)
            await inner.unsubscribe(limit=1)
        except nats_errors.ConnectionClosedError as error:
            raise self.closed_error() from error
        return Subscription(self.closed_error, inner)

    async def flush(self) -> None:
        """Return when the server has seen everything sent so far."""
        try:
            await self._client.flush(timeout=5)
        except nats_errors.Error as error:
            raise NoAnswer("the server did not confirm what was sent", fix="try again") from error

    def new_inbox(self) -> str:
        """A subject nobody else uses."""
        return self._client.new_inbox()

    async def close(self) -> None:
        """Close; what was sent is flushed first if a server is there."""
        if self.connected:
            with contextlib.suppress(PurveyorError):
                await self.flush()
        with contextlib.suppress(RuntimeError):  # uvloop's word for a transport that went with its server
            await self._client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _in_vain(waiting: "asyncio.Future[Any]", subject: str) -> None:
    if not waiting.done():
        waiting.set_exception(NoAnswer(f"no answer on {subject!r}", fix=_SILENCE_FIX))


async def _cancel(task: "asyncio.Task[Any]") -> None:
    if not task.done():
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task

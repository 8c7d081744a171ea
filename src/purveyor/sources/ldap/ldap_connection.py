"""A connection to an LDAP server: TLS, bind, and one request at a time with its responses. It translates errors."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Final, Self

from purveyor.model.errors import PurveyorError, describe
from purveyor.sources.ldap.ber import SEQUENCE, BerError
from purveyor.sources.ldap.byte_stream import ByteStream
from purveyor.sources.ldap.directory import DirectoryAddress
from purveyor.sources.ldap.ldap_errors import (
    CertificateRefused,
    DirectoryUnavailable,
    NotUnderstood,
    ResultCode,
    translate_result,
)
from purveyor.sources.ldap.ldap_messages import (
    MAX_MESSAGE_ID,
    BindResponse,
    Control,
    ExtendedResponse,
    LdapMessage,
    LdapResult,
    SearchRequest,
    SearchResultDone,
    decode_message,
    encode_abandon,
    encode_bind,
    encode_request,
    encode_search,
    encode_start_tls,
    encode_unbind,
)

_BATCH_MESSAGES: Final = 500
_BATCH_BYTES: Final = 4 << 20


class LdapConnection:
    """A connection after its bind. Made by `open`."""

    def __init__(self, stream: ByteStream, address: DirectoryAddress, place: str) -> None:
        self.place = place
        self._stream = stream
        self._address = address
        self._last_id = 0

    def __repr__(self) -> str:
        return f"LdapConnection({self.place})"

    @classmethod
    async def open(cls, address: DirectoryAddress) -> Self:
        """Connect, set up TLS where it is wanted, and bind."""
        scheme, host, port = address.host_and_port()
        place = f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
        tls = address.tls_context() if scheme == "ldaps" or address.start_tls else None
        connection: Self | None = None
        try:
            async with asyncio.timeout(address.connect_seconds):
                stream = await ByteStream.connect(host, port, tls=tls if scheme == "ldaps" else None)
                connection = cls(stream, address, place)
                if tls is not None and scheme == "ldap":
                    await connection._start_tls(tls, host)
                if address.bind_dn:
                    await connection._bind(address.bind_dn, address.password)
        except BaseException as error:
            if connection is not None:
                connection.abort()
            if isinstance(error, TimeoutError):
                raise DirectoryUnavailable(
                    f"{place} does not answer within {address.connect_seconds:g} seconds", fix="check the address"
                ) from error
            if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
                raise CertificateRefused(
                    f"no TLS with {place}: {_tls_reason(error)}",
                    fix="check the CA file, the host name in the certificate, and that the port speaks TLS",
                ) from error
            if isinstance(error, OSError | EOFError):
                raise DirectoryUnavailable(f"cannot connect to {place}: {describe(error)}") from error
            raise
        return connection

    async def close(self) -> None:
        """Send an unbind and close the connection."""
        await self._stream.close(encode_request(self._next_id(), encode_unbind()))

    def abort(self) -> None:
        """Close the connection at once."""
        self._stream.abort()

    async def responses(
        self,
        request: SearchRequest,
        controls: Sequence[Control],
        doing: str,
        silence_seconds: Callable[[], float | None],
    ) -> AsyncGenerator[list[LdapMessage], None]:
        """Send a search and yield the responses that have arrived; abandon it if the last one is not read.

        `silence_seconds` says how long the server may be silent at this moment; None: for ever.
        """
        message_id, done = self._send(encode_search(request), controls), False
        try:
            while not done:
                messages, failure = self._take(message_id)
                if messages:
                    done = isinstance(messages[-1].response, SearchResultDone)
                    yield messages
                if failure is not None:
                    raise failure
                if not messages:
                    await self._receive_more(doing, silence_seconds())
        finally:
            if not done:
                with contextlib.suppress(OSError, EOFError):
                    self._stream.write(encode_request(self._next_id(), encode_abandon(message_id)))

    async def _start_tls(self, tls: ssl.SSLContext, host: str) -> None:
        """Encrypt the connection (extended operation StartTLS)."""
        message = await self._ask(encode_start_tls())
        if not isinstance(message.response, ExtendedResponse):
            raise NotUnderstood(f"{self.place} answered StartTLS with {type(message.response).__name__}")
        check_result(message.response.result, f"StartTLS with {self.place}")
        if self._stream.has_unread:  # in clear, and not protected by the handshake: an attacker can have added them
            raise NotUnderstood(f"{self.place} sent bytes between its consent to TLS and the handshake")
        await self._stream.start_tls(tls, host)

    async def _bind(self, dn: str, password: str) -> None:
        """Log in with a simple bind."""
        message = await self._ask(encode_bind(dn, password))
        if not isinstance(message.response, BindResponse):
            raise NotUnderstood(f"{self.place} answered a bind with {type(message.response).__name__}")
        check_result(message.response.result, f"bind to {self.place} as {dn}")

    async def _ask(self, operation: bytes) -> LdapMessage:
        """Send a request and return its one response."""
        message_id = self._send(operation)
        while True:
            messages, failure = self._take(message_id, at_most=1)
            if messages:
                return messages[0]
            if failure is not None:
                raise failure
            await self._receive_more("request", self._address.response_seconds)

    def _send(self, operation: bytes, controls: Sequence[Control] = ()) -> int:
        message_id = self._next_id()
        try:
            self._stream.write(encode_request(message_id, operation, controls))
        except (OSError, EOFError) as error:
            raise self._lost(error) from error
        return message_id

    def _take(
        self, message_id: int, *, at_most: int = _BATCH_MESSAGES
    ) -> tuple[list[LdapMessage], PurveyorError | None]:
        """Decode responses to a request that have arrived, up to the last one, and the error that follows them."""
        found: list[LdapMessage] = []
        size = 0
        try:
            while len(found) < at_most and size < _BATCH_BYTES:
                data = self._stream.take_element(tag=SEQUENCE, max_bytes=self._address.max_message_bytes)
                if data is None:
                    break
                size += len(data)
                message = decode_message(data)
                if message.message_id == 0:
                    return found, self._notice(message)
                if message.message_id == message_id:  # else of an operation that was abandoned
                    found.append(message)
                    if isinstance(message.response, SearchResultDone):
                        break
        except BerError as error:
            self.abort()
            return found, self._not_understood(error)
        return found, None

    async def _receive_more(self, doing: str, seconds: float | None) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stream.read_more()
        except TimeoutError as error:
            self.abort()
            raise DirectoryUnavailable(f"{doing}: no answer of {self.place} within {seconds:g} seconds") from error
        except (OSError, EOFError) as error:
            raise self._lost(error) from error

    def _next_id(self) -> int:
        self._last_id = self._last_id % MAX_MESSAGE_ID + 1
        return self._last_id

    def _lost(self, error: Exception) -> DirectoryUnavailable:
        return DirectoryUnavailable(f"the connection to {self.place} is lost: {describe(error)}")

    def _not_understood(self, error: BerError) -> NotUnderstood:
        return NotUnderstood(
            f"{self.place} sent bytes that are not LDAP: {error}", fix="check the address and the port"
        )

    def _notice(self, message: LdapMessage) -> PurveyorError:
        """Return the error for a notice of disconnection."""
        self.abort()
        response = message.response
        if not isinstance(response, ExtendedResponse):
            return NotUnderstood(f"{self.place} sent a response without a request")
        error = translate_result(response.result, f"{self.place} ends the connection")
        if response.result.code == ResultCode.STRONGER_AUTH_REQUIRED:
            return error
        return DirectoryUnavailable(error.message, code=response.result.code)


def check_result(result: LdapResult, doing: str) -> None:
    """Raise the error of a result other than success."""
    if result.code != ResultCode.SUCCESS:
        raise translate_result(result, doing)


def _tls_reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return (error.reason or str(error)).lower().replace("_", " ")

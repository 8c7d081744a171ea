"""An LDAP client on asyncio: connect, bind, search, and follow a directory. One operation at a time per connection.

    async with connect(DirectoryAddress("ldap://localhost", bind_dn=..., password=...)) as client:
        async for change in client.follow("dc=example", cookie=stored):
            ...

Bytes are received only while the caller asks for changes: a slow caller slows the server down, and memory holds about
one megabyte and one message. All errors are PurveyorError: `retryable` says whether the source may try again by itself.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Final

from purveyor.model.errors import PurveyorError, describe
from purveyor.sources.ldap.ber import SEQUENCE, BerError
from purveyor.sources.ldap.byte_stream import ByteStream
from purveyor.sources.ldap.directory_address import DirectoryAddress
from purveyor.sources.ldap.ldap_errors import (
    CertificateRefused,
    DirectoryUnavailable,
    FollowEnded,
    NotUnderstood,
    refuse_referral,
    translate_result,
)
from purveyor.sources.ldap.ldap_messages import (
    ALL_OPERATIONAL_ATTRIBUTES,
    ALL_USER_ATTRIBUTES,
    MANAGE_DSA_IT,
    BindResponse,
    Control,
    ExtendedResponse,
    LdapMessage,
    LdapResult,
    Scope,
    SearchRequest,
    SearchResultDone,
    SearchResultEntry,
    SearchResultReference,
    decode_message,
    encode_abandon,
    encode_bind,
    encode_request,
    encode_search,
    encode_start_tls,
    encode_unbind,
)
from purveyor.sources.ldap.result_codes import ResultCode
from purveyor.sources.ldap.search_filter import encode_filter
from purveyor.sources.ldap.sync_consumer import RefreshRequired, SyncChange, SyncConsumer, SyncStage
from purveyor.sources.ldap.sync_controls import SYNC_REQUEST, SyncMode

ALL_ENTRIES: Final = "(objectClass=*)"
_MANAGE: Final = Control(MANAGE_DSA_IT)
_BATCH_MESSAGES: Final = 500
_BATCH_BYTES: Final = 4 << 20
_LARGEST_ID: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RootDse:
    """What a server says about itself."""

    attributes: dict[str, list[bytes]]

    @property
    def naming_contexts(self) -> tuple[str, ...]:
        """The bases of its databases."""
        return self._texts("namingContexts")

    @property
    def supported_controls(self) -> tuple[str, ...]:
        """The controls that the server knows, at least in one database."""
        return self._texts("supportedControl")

    @property
    def supports_sync(self) -> bool:
        """Whether a database of the server has the overlay syncprov, if the account may see that."""
        return SYNC_REQUEST in self.supported_controls

    def _texts(self, name: str) -> tuple[str, ...]:
        wanted = name.lower()
        found = (values for attribute, values in self.attributes.items() if attribute.lower() == wanted)
        return tuple(value.decode(errors="replace") for values in found for value in values)


@contextlib.asynccontextmanager
async def connect(address: DirectoryAddress) -> AsyncGenerator["LdapClient", None]:
    """Connect, set up TLS where it is wanted, and bind; close the connection at the end."""
    client = await _open(address)
    try:
        yield client
    finally:
        client.close()


async def _open(address: DirectoryAddress) -> "LdapClient":
    scheme, host, port = address.host_and_port()
    place = f"{scheme}://{host}:{port}"
    tls = address.tls_context() if scheme == "ldaps" or address.start_tls else None
    client: LdapClient | None = None
    try:
        async with asyncio.timeout(address.connect_seconds):
            stream = await ByteStream.connect(host, port, tls=tls if scheme == "ldaps" else None)
            client = LdapClient(stream, address, place)
            if tls is not None and scheme == "ldap":
                await client.start_tls(tls, host)
            if address.bind_dn:
                await client.bind(address.bind_dn, address.password)
    except BaseException as error:
        if client is not None:
            client.abort()
        if isinstance(error, TimeoutError):
            raise DirectoryUnavailable(
                f"{place} does not answer within {address.connect_seconds:g} seconds", fix="check the address"
            ) from error
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            raise CertificateRefused(
                f"no TLS with {place}: {_tls_reason(error)}",
                fix="check the authority (a CA file), the host name in the certificate, and that the port speaks TLS",
            ) from error
        if isinstance(error, OSError | EOFError):
            raise DirectoryUnavailable(f"cannot connect to {place}: {describe(error)}") from error
        raise
    return client


class LdapClient:
    """A connection to a directory. Made by `connect`."""

    def __init__(self, stream: ByteStream, address: DirectoryAddress, place: str) -> None:
        self._stream = stream
        self._address = address
        self._place = place
        self._last_id = 0

    def __repr__(self) -> str:
        return f"LdapClient({self._place})"

    def close(self) -> None:
        """Send an unbind and close the connection."""
        self._stream.close(encode_request(self._next_id(), encode_unbind()))

    def abort(self) -> None:
        """Close the connection at once."""
        self._stream.abort()

    async def start_tls(self, tls: ssl.SSLContext, host: str) -> None:
        """Encrypt the connection (extended operation StartTLS)."""
        message = await self._ask(encode_start_tls())
        if not isinstance(message.response, ExtendedResponse):
            raise NotUnderstood(f"{self._place} answered StartTLS with {type(message.response).__name__}")
        _check(message.response.result, f"StartTLS with {self._place}")
        await self._stream.start_tls(tls, host)

    async def bind(self, dn: str, password: str) -> None:
        """Log in with a simple bind."""
        message = await self._ask(encode_bind(dn, password))
        if not isinstance(message.response, BindResponse):
            raise NotUnderstood(f"{self._place} answered a bind with {type(message.response).__name__}")
        _check(message.response.result, f"bind to {self._place} as {dn}")

    async def read_root_dse(self) -> RootDse:
        """Read what the server says about itself."""
        entries = await self.search("", scope=Scope.BASE)
        return RootDse(entries[0].attributes if entries else {})

    async def search(
        self,
        base: str,
        filter_text: str = ALL_ENTRIES,
        *,
        scope: Scope = Scope.SUB,
        attributes: Sequence[str] = (ALL_USER_ATTRIBUTES, ALL_OPERATIONAL_ATTRIBUTES),
        size_limit: int = 0,
    ) -> list[SearchResultEntry]:
        """Return all entries that match. Referral objects are entries like others."""
        request = SearchRequest(
            base=base,
            filter=encode_filter(filter_text),
            scope=scope,
            attributes=attributes,
            size_limit=size_limit,
        )
        doing = f"search below {base!r} at {self._place}"
        found: list[SearchResultEntry] = []
        async with contextlib.aclosing(self._responses(request, (_MANAGE,), doing)) as batches:
            async for messages in batches:
                for message in messages:
                    match message.response:
                        case SearchResultEntry() as entry:
                            found.append(entry)
                        case SearchResultReference(uris=uris):
                            raise refuse_referral(doing, uris)
                        case SearchResultDone(result=result):
                            _check(result, doing)
                        case _:
                            pass
        return found

    async def follow(
        self,
        base: str,
        filter_text: str = ALL_ENTRIES,
        cookie: str | None = None,
        *,
        attributes: Sequence[str] = (ALL_USER_ATTRIBUTES, ALL_OPERATIONAL_ATTRIBUTES),
        mode: SyncMode = SyncMode.REFRESH_AND_PERSIST,
    ) -> AsyncGenerator[SyncChange, None]:
        """Yield the changes of `follow_batches` one by one."""
        following = self.follow_batches(base, filter_text, cookie, attributes=attributes, mode=mode)
        async with contextlib.aclosing(following) as batches:
            async for changes in batches:
                for change in changes:
                    yield change

    async def follow_batches(
        self,
        base: str,
        filter_text: str = ALL_ENTRIES,
        cookie: str | None = None,
        *,
        attributes: Sequence[str] = (ALL_USER_ATTRIBUTES, ALL_OPERATIONAL_ATTRIBUTES),
        mode: SyncMode = SyncMode.REFRESH_AND_PERSIST,
    ) -> AsyncGenerator[list[SyncChange], None]:
        """Synchronise with the subtree of a base: yield the changes that have arrived, as soon as there are any.

        `sync_consumer` says in which order they come and what they mean. The iteration ends after `RefreshRequired`,
        and with REFRESH_ONLY after `RefreshEnded`. Otherwise it ends with an error: FollowEnded if the server ended the
        synchronisation. Changes that arrived before an error are yielded before it is raised.
        """
        doing = f"following {base!r} at {self._place}"
        consumer = SyncConsumer(cookie, mode=mode, name=doing)
        request = SearchRequest(base=base, filter=encode_filter(filter_text), attributes=attributes)
        controls = (consumer.request_control(), _MANAGE)
        async with contextlib.aclosing(self._responses(request, controls, doing, consumer)) as batches:
            async for messages in batches:
                changes: list[SyncChange] = []
                failure: PurveyorError | None = None
                for message in messages:
                    try:
                        changes += consumer.receive(message)
                    except PurveyorError as error:
                        failure = error
                        break
                if changes:
                    yield changes
                if isinstance(failure, BerError):
                    raise self._not_understood(failure) from failure
                if failure is not None:
                    raise failure
                if changes and isinstance(changes[-1], RefreshRequired):
                    return
        if mode is SyncMode.REFRESH_AND_PERSIST:
            raise FollowEnded(f"{doing}: the server ended the synchronisation")

    async def _responses(
        self,
        request: SearchRequest,
        controls: Sequence[Control],
        doing: str,
        consumer: SyncConsumer | None = None,
    ) -> AsyncGenerator[list[LdapMessage], None]:
        """Send a search and yield the responses that have arrived; abandon it if the last one is not read."""
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
                    await self._receive_more(doing, self._silence(consumer))
        finally:
            if not done:
                with contextlib.suppress(OSError, EOFError):
                    self._stream.write(encode_request(self._next_id(), encode_abandon(message_id)))

    def _silence(self, consumer: SyncConsumer | None) -> float | None:
        """Return how long the server may be silent. In the persist stage, only TCP keepalive finds a dead peer."""
        if consumer is None:
            return self._address.response_seconds
        return None if consumer.stage is SyncStage.PERSIST else self._address.refresh_seconds

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
            raise DirectoryUnavailable(f"{doing}: no answer of {self._place} within {seconds:g} seconds") from error
        except (OSError, EOFError) as error:
            raise self._lost(error) from error

    def _next_id(self) -> int:
        self._last_id = self._last_id % _LARGEST_ID + 1
        return self._last_id

    def _lost(self, error: Exception) -> DirectoryUnavailable:
        return DirectoryUnavailable(f"the connection to {self._place} is lost: {describe(error)}")

    def _not_understood(self, error: BerError) -> NotUnderstood:
        return NotUnderstood(
            f"{self._place} sent bytes that are not LDAP: {error}", fix="check the address and the port"
        )

    def _notice(self, message: LdapMessage) -> PurveyorError:
        """Return the error for a notice of disconnection."""
        self.abort()
        response = message.response
        if not isinstance(response, ExtendedResponse):
            return NotUnderstood(f"{self._place} sent a response without a request")
        error = translate_result(response.result, f"{self._place} ends the connection")
        if response.result.code == ResultCode.STRONGER_AUTH_REQUIRED:
            return error
        return DirectoryUnavailable(error.message, code=response.result.code)


def _check(result: LdapResult, doing: str) -> None:
    if result.code != ResultCode.SUCCESS:
        raise translate_result(result, doing)


def _tls_reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return (error.reason or str(error)).lower().replace("_", " ")

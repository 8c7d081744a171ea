"""An LDAP client on asyncio: connect, bind, search, and follow a directory. One operation at a time per connection.

    async with connect(DirectoryAddress("ldap://localhost", bind_dn=..., password=...)) as client:
        async for change in client.follow("dc=example", cookie=stored):
            ...

Bytes are received only while the caller asks for changes: a slow caller slows the server down, and memory holds about
one megabyte and one message. All errors are PurveyorError; `retryable` says whether another attempt can succeed.
"""

import contextlib
import re
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Final

from purveyor.model.errors import PurveyorError
from purveyor.sources.ldap.ber import BerError
from purveyor.sources.ldap.directory import DirectoryAddress
from purveyor.sources.ldap.ldap_connection import LdapConnection, check_result
from purveyor.sources.ldap.ldap_errors import (
    FollowEnded,
    NoSuchBase,
    NotUnderstood,
    ResultCode,
    refuse_referral,
)
from purveyor.sources.ldap.ldap_messages import (
    ALL_OPERATIONAL_ATTRIBUTES,
    ALL_USER_ATTRIBUTES,
    MANAGE_DSA_IT,
    NO_ATTRIBUTES,
    Control,
    LdapMessage,
    LdapResult,
    Scope,
    SearchRequest,
    SearchResultDone,
    SearchResultEntry,
    SearchResultReference,
)
from purveyor.sources.ldap.search_filter import encode_filter
from purveyor.sources.ldap.sync_consumer import RefreshRequired, SyncChange, SyncConsumer, SyncStage
from purveyor.sources.ldap.sync_controls import SYNC_REQUEST, SyncMode
from purveyor.sources.ldap.sync_cookie import CookieError, SyncCookie

ALL_ENTRIES: Final = "(objectClass=*)"
_MANAGE: Final = Control(MANAGE_DSA_IT)


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowOptions:
    """How to follow a directory."""

    attributes: Sequence[str] = (ALL_USER_ATTRIBUTES, ALL_OPERATIONAL_ATTRIBUTES)
    mode: SyncMode = SyncMode.REFRESH_AND_PERSIST
    check_cookie: bool = True
    """Ask for a refresh without a cookie unless the server proves that it had the changes which the cookie names."""
    repeat_last: bool = True
    """Let the server send the last changes of the cookie again: see `move_back`."""


_FOLLOW: Final = FollowOptions()


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
    connection = await LdapConnection.open(address)
    try:
        yield LdapClient(connection, address)
    finally:
        await connection.close()


class LdapClient:
    """A connection to a directory. Made by `connect`."""

    def __init__(self, connection: LdapConnection, address: DirectoryAddress) -> None:
        self._connection = connection
        self._address = address
        self._place = connection.place

    def __repr__(self) -> str:
        return f"LdapClient({self._place})"

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
                            check_result(result, doing)
                        case _:
                            pass
        return found

    async def follow(
        self,
        base: str,
        filter_text: str = ALL_ENTRIES,
        cookie: str | None = None,
        *,
        options: FollowOptions = _FOLLOW,
    ) -> AsyncGenerator[SyncChange, None]:
        """Yield the changes of `follow_batches` one by one."""
        following = self.follow_batches(base, filter_text, cookie, options=options)
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
        options: FollowOptions = _FOLLOW,
    ) -> AsyncGenerator[list[SyncChange], None]:
        """Synchronise with the subtree of a base: yield the changes that have arrived, as soon as there are any.

        `sync_consumer` says in which order they come and what they mean. The iteration ends after `RefreshRequired`,
        and with REFRESH_ONLY after `RefreshEnded`. Otherwise it ends with an error: FollowEnded if the server ended the
        synchronisation. Changes that arrived before an error are yielded before it is raised.

        A cookie is checked first: an older database that was restored, and changed since, accepts the cookie and keeps
        quiet about entries that it never had. slapd does not notice, so `find_lost_change` does.
        """
        doing = f"following {base!r} at {self._place}"
        await self._refuse_referral_at(base, doing)
        if cookie is not None and options.check_cookie:
            lost = await self.find_lost_change(base, cookie)
            if lost is not None:
                yield [RefreshRequired(f"the server does not prove that it had the change {lost} of the cookie")]
                return
        consumer = SyncConsumer(cookie, mode=options.mode, name=doing, repeat_last=options.repeat_last)
        request = SearchRequest(base=base, filter=encode_filter(filter_text), attributes=options.attributes)
        controls = (consumer.request_control(), _MANAGE)

        def silence_seconds() -> float | None:
            """In the persist stage silence is normal, and TCP keepalive finds a dead peer."""
            return None if consumer.stage is SyncStage.PERSIST else self._address.refresh_seconds

        async with contextlib.aclosing(
            self._connection.responses(request, controls, doing, silence_seconds)
        ) as batches:
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
                    raise NotUnderstood(f"{doing}: the server sent an invalid value: {failure}") from failure
                if failure is not None:
                    raise failure
                if changes and isinstance(changes[-1], RefreshRequired):
                    return
        if options.mode is SyncMode.REFRESH_AND_PERSIST:
            raise FollowEnded(f"{doing}: the server ended the synchronisation")

    async def find_lost_change(self, base: str, cookie: str) -> str | None:
        """Return a CSN of a cookie that the server does not prove to know; None if it proves all of them.

        The proof of a CSN is that it is the last one of its server (`contextCSN`), or that an entry has it. A change
        that another change of the same entry followed, or the deletion of an entry, has no proof once there are newer
        changes: then a refresh without the cookie is the price of certainty. Cookies of other servers are not checked.
        """
        try:
            csns = SyncCookie.parse(cookie).csns
        except CookieError:
            return None
        suffix = await self._find_suffix(base)
        last: set[str] = set()
        with contextlib.suppress(NoSuchBase):
            for entry in await self.search(suffix, scope=Scope.BASE, attributes=("contextCSN",)):
                last = {value.decode(errors="replace") for values in entry.attributes.values() for value in values}
        for csn in csns:
            if csn not in last and not await self.search(suffix, f"(entryCSN={csn})", attributes=(NO_ATTRIBUTES,)):
                return csn
        return None

    async def _find_suffix(self, base: str) -> str:
        """Return the base of the database that holds an entry; its own name if the server does not say."""
        dn = _fold_dn(base)
        contexts = ((_fold_dn(each), each) for each in (await self.read_root_dse()).naming_contexts)
        found = [(len(folded), each) for folded, each in contexts if dn == folded or dn.endswith(f",{folded}")]
        return max(found)[1] if found else base

    async def _refuse_referral_at(self, base: str, doing: str) -> None:
        """Raise ReferralRefused if another server has the base. With ManageDsaIT the server would not say so."""
        request = SearchRequest(
            base=base, filter=encode_filter(ALL_ENTRIES), scope=Scope.BASE, attributes=(NO_ATTRIBUTES,)
        )
        async with contextlib.aclosing(self._responses(request, (), doing)) as batches:
            async for messages in batches:
                for message in messages:
                    match message.response:
                        case SearchResultReference(uris=uris):
                            raise refuse_referral(doing, uris)
                        case SearchResultDone(result=LdapResult(code=ResultCode.REFERRAL, referral=uris)):
                            raise refuse_referral(doing, uris)
                        case _:
                            pass  # the search that follows reports any other problem

    def _responses(
        self, request: SearchRequest, controls: Sequence[Control], doing: str
    ) -> AsyncGenerator[list[LdapMessage], None]:
        return self._connection.responses(request, controls, doing, lambda: self._address.response_seconds)


def _fold_dn(dn: str) -> str:
    """Return a DN in a form in which usual spellings are equal."""
    return re.sub(r"\s*([,=])\s*", r"\1", dn.strip()).lower()

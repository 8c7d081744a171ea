"""A client that follows a real slapd and keeps a copy, for tests that compare the two."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from purveyor.model.errors import PurveyorError
from purveyor.sources.ldap.directory import DirectoryAddress
from purveyor.sources.ldap.ldap_client import ALL_ENTRIES, FollowOptions, LdapClient, connect
from purveyor.sources.ldap.ldap_errors import NoSuchBase
from purveyor.sources.ldap.sync_consumer import RefreshEnded, RefreshRequired, SyncChange
from tests.support.directory_model import Copy
from tests.support.slapd import READER_DN, READER_PASSWORD, SUFFIX, Slapd
from tests.support.waiting import until

_COMPUTED = {"auditContext", "contextCSN", "entryDN", "hasSubordinates"}
"""Operational attributes that slapd computes: they change without a change of the entry, or a refresh lacks them."""
Content = dict[str, tuple[str, dict[str, list[bytes]]]]


@dataclass
class Follower:
    """A copy of a directory and the changes that made it. `follow` runs one synchronisation at a time."""

    slapd: Slapd
    base: str = SUFFIX
    filter_text: str = ALL_ENTRIES
    options: FollowOptions = field(default_factory=FollowOptions)
    copy: Copy = field(default_factory=Copy)
    changes: list[SyncChange] = field(default_factory=list)
    """The changes of the last synchronisation."""
    error: PurveyorError | None = None
    """How the last synchronisation ended."""

    def of(self, kind: type[SyncChange]) -> list[SyncChange]:
        """Return the changes of one kind."""
        return [each for each in self.changes if isinstance(each, kind)]

    @contextlib.asynccontextmanager
    async def follow(self) -> AsyncIterator[None]:
        """Follow until the end of the block; inside of it the refresh has ended, or the synchronisation."""
        self.changes, self.error = [], None
        task = asyncio.create_task(self._run())
        try:
            await until(lambda: task.done() or any(self.of(RefreshEnded)), what="the end of a refresh")
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def refresh(self) -> list[SyncChange]:
        """Follow until the copy equals the directory; return the changes. Begin again where the server requires it."""
        async with self.follow():
            required = bool(self.of(RefreshRequired))
            if not required:
                await self.until_equal()
        return [*self.changes, *(await self.refresh())] if required else self.changes

    async def until_equal(self) -> None:
        """Wait until the copy equals the directory."""
        async with reader(self.slapd) as client:

            async def equal() -> bool:
                return self.content() == await self.directory(client)

            await until(equal, what="a copy that equals the directory")

    def content(self) -> Content:
        """Return the copy in a form that can be compared."""
        return {uuid: (each.dn, _comparable(each.attributes)) for uuid, each in self.copy.entries.items()}

    async def directory(self, client: LdapClient) -> Content:
        """Return the directory in the same form."""
        try:
            found = await client.search(self.base, self.filter_text)
        except NoSuchBase:
            return {}
        return {each.attributes["entryUUID"][0].decode(): (each.dn, _comparable(each.attributes)) for each in found}

    async def _run(self) -> None:
        try:
            async with reader(self.slapd) as client:
                following = client.follow(self.base, self.filter_text, self.copy.cookie, options=self.options)
                async with contextlib.aclosing(following) as changes:
                    async for change in changes:
                        self.copy.apply(change)
                        self.changes.append(change)
        except PurveyorError as error:
            self.error = error


def reader(slapd: Slapd) -> contextlib.AbstractAsyncContextManager[LdapClient]:
    """Connect as the account without limits."""
    return connect(DirectoryAddress(slapd.uri, bind_dn=READER_DN, password=READER_PASSWORD))


def _comparable(attributes: dict[str, list[bytes]]) -> dict[str, list[bytes]]:
    return {name: sorted(values) for name, values in attributes.items() if name not in _COMPUTED}

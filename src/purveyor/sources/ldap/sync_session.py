"""Turns one synchronisation with a directory into records: each change becomes one, without the secrets.

The cookie of a change is marked behind its record, so it is stored only after the queue has the record.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, assert_never

from purveyor.model.errors import PurveyorError
from purveyor.model.ldif_changes import Gone, Present, RefreshBegin, RefreshEnd
from purveyor.sources.ldap.directory import Directory
from purveyor.sources.ldap.ldap_client import FollowOptions, LdapClient
from purveyor.sources.ldap.record_writer import RecordWriter
from purveyor.sources.ldap.source_status import SourceStatus, csn_time
from purveyor.sources.ldap.sync_consumer import (
    CookieAdvanced,
    EntriesDeleted,
    EntriesPresent,
    EntryReported,
    RefreshBegan,
    RefreshEnded,
    RefreshRequired,
    SyncChange,
)
from purveyor.sources.ldap.sync_controls import EntryState, SyncMode
from purveyor.sources.ldap.sync_cookie import CookieError, SyncCookie
from purveyor.sources.ldif.live_records import LiveEntry, LiveRecord, encode_live_record, split_uuids

_UUIDS_PER_RECORD: Final = 2000
_MOST_KNOWN_NAMES: Final = 10_000


class RefreshDue(PurveyorError):
    """The cookie is not valid any more: begin again without it."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the directory: the cookie to store, and what is known there."""

    cookie: str | None
    entries: int | None
    changed_at: datetime | None = None
    """When the change before the cookie happened."""
    is_live: bool = False
    """Whether the change came as it happened, and not in a refresh."""


class SecretFilter:
    """Drops the attributes that may not be stored. `is_secret` gets their names in lower case, with options."""

    def __init__(self, is_secret: Callable[[str], bool]) -> None:
        self._is_secret = is_secret
        self._known: dict[str, bool] = {}

    def is_secret(self, attribute: str) -> bool:
        """Return whether an attribute, with its options, is a secret."""
        known = self._known.get(attribute)
        if known is None:
            name = attribute.lower()
            known = self._is_secret(name) or self._is_secret(name.partition(";")[0])
            if len(self._known) < _MOST_KNOWN_NAMES:
                self._known[attribute] = known
        return known

    def clean(self, attributes: Mapping[str, Iterable[bytes]]) -> dict[str, tuple[bytes, ...]]:
        """Return the attributes that may be stored."""
        return {name: tuple(values) for name, values in attributes.items() if not self.is_secret(name)}


class SyncSession:
    """One synchronisation of a directory, from a cookie or from the beginning."""

    def __init__(
        self,
        directory: Directory,
        writer: RecordWriter[Place],
        status: SourceStatus,
        secrets: SecretFilter,
        *,
        epoch: int,
    ) -> None:
        self._directory = directory
        self._writer = writer
        self._status = status
        self._secrets = secrets
        self._epoch = epoch
        self._known_at: datetime | None = None
        self._is_persistent = False
        self._new = self._gone = 0

    async def follow(
        self,
        client: LdapClient,
        cookie: str | None,
        *,
        mode: SyncMode = SyncMode.REFRESH_AND_PERSIST,
        check_cookie: bool = True,
    ) -> str | None:
        """Write every change until the connection ends, or until the end of a refreshOnly, and return its cookie.

        RefreshDue if the server cannot continue from the cookie.
        """
        self._known_at = newest_change(cookie)
        self._is_persistent = mode is SyncMode.REFRESH_AND_PERSIST
        directory = self._directory
        options = FollowOptions(mode=mode, check_cookie=check_cookie)
        ended: str | None = None
        following = client.follow_batches(directory.base, directory.filter, cookie, options=options)
        async with contextlib.aclosing(following) as batches:
            async for changes in batches:
                for change in changes:
                    if isinstance(change, RefreshEnded):
                        ended = change.cookie
                    await self._receive(change)
                self.show_waiting()
        return ended

    def show_waiting(self) -> None:
        """Show in the status how many records are not stored yet."""
        self._status.waiting = self._writer.added - self._writer.stored

    async def write(self, record: LiveRecord, uuid: str | None = None) -> None:
        """Write a record; one that is too large is replaced by one that says that its entry is present."""
        substitute = None if uuid is None else lambda: encode_live_record(Present((uuid,)), self._epoch)
        await self._writer.add(encode_live_record(record, self._epoch), substitute)

    async def _receive(self, change: SyncChange) -> None:
        status = self._status
        match change:
            case EntryReported():
                self._count(change)
                entry = LiveEntry(change.uuid, change.dn, self._secrets.clean(change.attributes))
                await self.write(entry, change.uuid)
            case EntriesPresent(uuids=uuids):
                status.read += len(uuids)
                for group in split_uuids(uuids, _UUIDS_PER_RECORD):
                    await self.write(Present(group))
            case EntriesDeleted(uuids=uuids):
                self._gone += len(uuids)
                for group in split_uuids(uuids, _UUIDS_PER_RECORD):
                    await self.write(Gone(group))
            case RefreshBegan(full=full):
                status.begin_refresh()
                await self.write(RefreshBegin(full))
            case RefreshEnded():
                await self._end_refresh(change)
            case CookieAdvanced(cookie=cookie):
                self._add_up()
                self.mark(cookie, is_live=True)
            case RefreshRequired(reason=reason):
                raise RefreshDue(reason)
            case _:
                assert_never(change)

    async def _end_refresh(self, end: RefreshEnded) -> None:
        await self.write(RefreshEnd(end.remove_unseen, csns_of(end.cookie)))
        if end.remove_unseen:
            self._status.entries = self._status.read
            self._new = self._gone = 0
        else:
            self._add_up()
        if self._is_persistent:
            self._status.end_refresh()
            self.mark(end.cookie)

    def _count(self, entry: EntryReported) -> None:
        status = self._status
        if status.is_refreshing:
            status.read += 1
            self._new += self._known_at is None or _was_created_after(entry, self._known_at)
        elif entry.state is EntryState.ADD:
            self._new += 1

    def _add_up(self) -> None:
        if self._status.entries is not None:
            self._status.entries = max(self._status.entries + self._new - self._gone, 0)
        self._new = self._gone = 0

    def mark(self, cookie: str | None, *, is_live: bool = False) -> None:
        """Store a cookie when all records before it are stored. `is_live`: the change came as it happened."""
        changed_at = newest_change(cookie)
        self._status.last_change = changed_at or self._status.last_change
        self._writer.mark(Place(cookie, self._status.entries, changed_at, is_live))


def csns_of(cookie: str | None) -> tuple[str, ...]:
    """Return the CSNs in a cookie of OpenLDAP, one for each server; none in another server's."""
    try:
        return SyncCookie.parse(cookie).csns if cookie is not None else ()
    except CookieError:
        return ()


def newest_change(cookie: str | None) -> datetime | None:
    """Return the time of the newest change that a cookie covers; None if it does not say so."""
    times = [at for csn in csns_of(cookie) if (at := csn_time(csn)) is not None]
    return max(times, default=None)


def _was_created_after(entry: EntryReported, at: datetime) -> bool:
    """Return whether an entry is newer than a time. In a refresh slapd reports a changed entry like a new one."""
    created = entry.attributes.get("createTimestamp")
    created_at = csn_time(created[0].decode(errors="replace")) if created else None
    return created_at is None or created_at > at

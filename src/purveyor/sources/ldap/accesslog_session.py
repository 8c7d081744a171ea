"""Follows a directory by its accesslog: each operation in order becomes a record, intermediate versions included.

Without a valid cookie:

1. Read the newest position of the log.
2. Read the whole base by content synchronisation: a full refresh.
3. Read the newest CSNs of the directory, then follow the log from the position of step 1. An operation up to those CSNs
   may be in the refresh already; its record carries `catch_up`.

A cookie is a position in the log. It is stored only behind the operations of step 3: a crash before begins again. A log
that does not hold the position any more, or an operation in it that cannot be read, leads to another full refresh.

With a cookie, step 1 writes the operations since the cookie, and step 2 reads what changed in the directory since then.
slapd writes an operation first into the directory, and then into its log: one that is killed in between never logs the
last operation. The refresh of step 2 has it. The operations of step 1 carry `catch_up`, because they may depend on it.

Operations outside the base are ignored. An entry that is moved into the base is fetched with all entries below it, as
they are now; operations up to their CSNs carry `catch_up`. An entry that is moved out of it is gone with all below it;
if that happened while the source was away, a full refresh follows, because an entry below it may be deleted since.
"""

import contextlib
from typing import Final

from purveyor.model.errors import InvalidConfig
from purveyor.model.ldif_changes import Change, Gone
from purveyor.sources.ldap import accesslog
from purveyor.sources.ldap.accesslog import WRITES_FILTER, AccesslogError, read_operation
from purveyor.sources.ldap.directory import DEFAULT_FILTER, Directory, Mode
from purveyor.sources.ldap.ldap_client import FollowOptions, LdapClient, connect
from purveyor.sources.ldap.ldap_errors import DirectoryRefused, NoSuchBase
from purveyor.sources.ldap.ldap_messages import NO_ATTRIBUTES, Scope, SearchResultEntry
from purveyor.sources.ldap.source_status import SourceStatus
from purveyor.sources.ldap.sync_consumer import (
    CookieAdvanced,
    EntryReported,
    RefreshBegan,
    RefreshEnded,
    RefreshRequired,
    SyncChange,
)
from purveyor.sources.ldap.sync_controls import SyncMode
from purveyor.sources.ldap.sync_cookie import SyncCookie, server_of
from purveyor.sources.ldap.sync_session import RefreshDue, SecretFilter, SyncSession, csns_of
from purveyor.sources.ldif.live_records import LiveEntry, Operation
from purveyor.sources.ldif.records import Modification, Record

_NOTHING: Final = "(reqType=none)"
_CONTEXT_CSN: Final = ("contextCSN",)


async def find_mode(client: LdapClient, directory: Directory) -> Mode:
    """Return how to read the changes: by the accesslog if that is wanted, or if it can be read and has every entry."""
    if directory.mode is Mode.SYNCREPL:
        return Mode.SYNCREPL
    if directory.filter != DEFAULT_FILTER:
        if directory.mode is Mode.AUTO:
            return Mode.SYNCREPL
        raise InvalidConfig(
            f"source {directory.source!r}: mode accesslog with the filter {directory.filter}",
            fix="leave the filter out, or use mode syncrepl: the accesslog has the operations on all entries",
        )
    try:
        # Without the overlay syncprov on the log, or without the right to read it, the server refuses.
        options = FollowOptions(mode=SyncMode.REFRESH_ONLY)
        async for _ in client.follow_batches(directory.accesslog_base, _NOTHING, options=options):
            pass
    except DirectoryRefused:
        if directory.mode is Mode.ACCESSLOG:
            raise
        return Mode.SYNCREPL
    return Mode.ACCESSLOG


class AccesslogSession:
    """One connection to a directory whose accesslog is followed."""

    def __init__(self, directory: Directory, sync: SyncSession, status: SourceStatus, secrets: SecretFilter) -> None:
        self._directory = directory
        self._sync = sync
        self._status = status
        self._secrets = secrets
        self._base = normalise_dn(directory.base)
        self._refreshed: dict[int, str] = {}
        """The CSN of each server up to which a refresh may contain an operation."""
        self._fetched: dict[str, str] = {}
        """The CSN of each entry that was fetched when it was moved into the base."""
        self._is_live = self._is_resuming = False
        self._is_before_refresh = False
        """Whether a refresh follows the operations that are read now."""

    async def follow(self, client: LdapClient, cookie: str | None) -> None:
        """Write every operation until the connection ends. RefreshDue if the log does not hold the cookie any more."""
        self._refreshed = {}
        self._is_live, self._is_resuming = False, cookie is not None
        self._base = await self._read_base(client)
        if cookie is None:
            csns = await self._read_csns(client, self._directory.accesslog_base)
            begin = SyncCookie(csns=csns, rid=0).to_store() if csns else None
        else:
            begin = await self._read_log(client, cookie)
            await self._check_place(client, cookie)
        # The log has the cookie, so the directory need not prove it: a later change of its entry is no reason to doubt.
        ended = await self._sync.follow(client, cookie, mode=SyncMode.REFRESH_ONLY, check_cookie=False)
        newest = [*csns_of(ended), *await self._read_csns(client, await self._find_suffix(client))]
        for csn in newest:
            self._refreshed[server_of(csn)] = max(csn, self._refreshed.get(server_of(csn), ""))
        await self._follow_log(client, begin)

    async def _read_log(self, client: LdapClient, cookie: str) -> str | None:
        """Write the operations since the cookie; return the place in the log behind them."""
        self._status.begin_refresh()
        self._is_before_refresh = True
        end: str | None = cookie
        options = FollowOptions(mode=SyncMode.REFRESH_ONLY, repeat_last=False)
        log = self._directory.accesslog_base
        async with contextlib.aclosing(client.follow_batches(log, WRITES_FILTER, cookie, options=options)) as batches:
            async for changes in batches:
                for change in changes:
                    if isinstance(change, RefreshEnded):
                        end = change.cookie
                    elif not isinstance(change, CookieAdvanced):
                        await self._receive(change)
                self._sync.show_waiting()
        self._is_before_refresh = False
        return end

    async def _check_place(self, client: LdapClient, cookie: str) -> None:
        """Raise RefreshDue if the directory itself does not know the last operations of the cookie."""
        found = await self._read_csns(client, await self._find_suffix(client))
        known = {server_of(csn): csn for csn in found}
        for csn in csns_of(cookie):
            if csn > known.get(server_of(csn), ""):
                raise RefreshDue(f"the directory does not know the operation {csn} of its accesslog")

    async def _follow_log(self, client: LdapClient, cookie: str | None) -> None:
        log, options = self._directory.accesslog_base, FollowOptions(check_cookie=False, repeat_last=False)
        async with contextlib.aclosing(client.follow_batches(log, WRITES_FILTER, cookie, options=options)) as batches:
            async for changes in batches:
                for change in changes:
                    await self._receive(change)
                self._sync.show_waiting()

    async def _receive(self, change: SyncChange) -> None:
        match change:
            case EntryReported():
                await self._receive_entry(change)
            case RefreshEnded(cookie=cookie):
                self._is_live, self._is_resuming = True, False
                self._status.end_refresh()
                self._sync.mark(cookie)
            case CookieAdvanced(cookie=cookie):
                self._sync.mark(cookie, is_live=self._is_live)
            case RefreshRequired(reason=reason):
                raise RefreshDue(reason)
            case RefreshBegan() | _:
                pass  # entries that were purged from the log say nothing about the directory

    async def _receive_entry(self, entry: EntryReported) -> None:
        try:
            operation = read_operation(entry.dn, entry.attributes)
        except AccesslogError as error:
            raise RefreshDue(error.message) from error
        if operation is None:
            return
        was_inside = self._is_inside(operation.dn)
        is_inside = was_inside if operation.change is not Change.MODRDN else self._is_inside(_new_dn(operation))
        if not was_inside and not is_inside:
            return
        if operation.uuid is None:
            raise RefreshDue(f"the access log entry {entry.dn} does not name the entry: it has no reqEntryUUID")
        if not was_inside:
            await self._fetch(operation.uuid)
        elif not is_inside:
            await self._drop(operation)
        else:
            await self._sync.write(self._record(operation, operation.uuid), operation.uuid)
            self._count(operation)

    def _record(self, operation: accesslog.Operation, uuid: str) -> Operation:
        record = Record(
            line=0,
            dn=operation.dn,
            change=operation.change,
            attributes=self._secrets.clean(operation.attributes),
            modifications=tuple(
                Modification(each.step, each.attribute, each.values)
                for each in operation.changes
                if operation.change is Change.MODIFY and not self._secrets.is_secret(each.attribute)
            ),
            new_rdn=operation.new_rdn,
            delete_old_rdn=operation.delete_old_rdn,
            new_superior=operation.new_superior,
        )
        return Operation(record, uuid, operation.csn, catch_up=self._is_catch_up(operation.csn, uuid))

    def _is_catch_up(self, csn: str, uuid: str) -> bool:
        if self._is_before_refresh:
            return True
        fetched = self._fetched.get(uuid)
        if fetched is not None:
            if csn <= fetched:
                return True
            del self._fetched[uuid]
        return csn <= self._refreshed.get(server_of(csn), "")

    def _count(self, operation: accesslog.Operation) -> None:
        status = self._status
        if status.is_refreshing:
            status.read += 1
        if self._is_before_refresh:
            return
        if status.entries is not None and operation.csn > self._refreshed.get(server_of(operation.csn), ""):
            change = {Change.ADD: 1, Change.DELETE: -1}.get(operation.change, 0)
            status.entries = max(status.entries + change, 0)

    async def _fetch(self, uuid: str) -> None:
        """Write an entry that was moved into the base, and all entries below it, as they are now."""
        async with connect(self._directory.address) as client:
            moved = await client.search(self._directory.base, f"(entryUUID={uuid})")
            found = await client.search(moved[0].dn) if moved else []  # it was moved again, or deleted
        for entry in found:
            known = _text(entry, "entryUUID")
            if known is None:
                raise RefreshDue(f"the account cannot read the entryUUID of {entry.dn}")
            self._fetched[known] = _text(entry, "entryCSN") or ""
            await self._sync.write(LiveEntry(known, entry.dn, self._secrets.clean(entry.attributes)), known)

    async def _drop(self, operation: accesslog.Operation) -> None:
        """Write that an entry is gone that was moved out of the base, with all entries below it."""
        if self._is_resuming:
            raise RefreshDue(f"{operation.dn} was moved out of the base while the source was away")
        try:
            async with connect(self._directory.address) as client:
                found = await client.search(_new_dn(operation), attributes=("entryUUID",))
        except DirectoryRefused as error:
            raise RefreshDue(f"{operation.dn} was moved out of the base: {error.message}") from error
        uuids = {operation.uuid, *(_text(entry, "entryUUID") for entry in found)}
        await self._sync.write(Gone(tuple(sorted(uuid for uuid in uuids if uuid is not None))))

    async def _read_base(self, client: LdapClient) -> str:
        """Return the base as the server spells it, and the log with it: a comma in a name has two spellings."""
        with contextlib.suppress(NoSuchBase):  # the refresh reports it; a log that continues may say that it is deleted
            for entry in await client.search(self._directory.base, scope=Scope.BASE, attributes=(NO_ATTRIBUTES,)):
                return normalise_dn(entry.dn)
        return normalise_dn(self._directory.base)

    def _is_inside(self, dn: str) -> bool:
        return f",{normalise_dn(dn)}".endswith(f",{self._base}")

    async def _find_suffix(self, client: LdapClient) -> str:
        contexts = (await client.read_root_dse()).naming_contexts
        suffixes = [each for each in contexts if f",{self._base}".endswith(f",{normalise_dn(each)}")]
        return max(suffixes, key=len, default=self._directory.base)

    async def _read_csns(self, client: LdapClient, base: str) -> tuple[str, ...]:
        found = await client.search(base, scope=Scope.BASE, attributes=_CONTEXT_CSN)
        values = [value for entry in found for each in entry.attributes.values() for value in each]
        return tuple(value.decode(errors="replace") for value in values)


def normalise_dn(dn: str) -> str:
    """Return a form of a DN for comparisons: without case, and without spaces around its separators.

    >>> normalise_dn("OU=People, dc=Example,DC = org")
    'ou=people,dc=example,dc=org'
    """
    return ",".join("=".join(part.strip() for part in rdn.split("=")) for rdn in dn.lower().split(","))


def _new_dn(operation: accesslog.Operation) -> str:
    if operation.new_dn is not None:
        return operation.new_dn
    parent = operation.new_superior if operation.new_superior is not None else operation.dn.partition(",")[2]
    return f"{operation.new_rdn},{parent}"


def _text(entry: SearchResultEntry, name: str) -> str | None:
    values = next((values for each, values in entry.attributes.items() if each.lower() == name.lower()), None)
    return values[0].decode(errors="replace") if values else None

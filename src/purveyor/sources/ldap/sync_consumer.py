"""The client's side of content synchronisation (RFC 4533) without input and output: messages in, changes out.

A synchronisation is one search. Its refresh stage brings a copy of the content up to date; its persist stage reports
each change as it happens. The changes of one synchronisation come in this order:

    RefreshBegan
      EntryReported, EntriesPresent, EntriesDeleted     in the order of the server, any number
    RefreshEnded(remove_unseen, cookie)
      EntryReported, EntriesDeleted, CookieAdvanced     the persist stage, any number

or they end anywhere before with `RefreshRequired` or an error. A copy is kept by these rules:

- Entries are known by UUID. A rename is an `EntryReported` with another DN.
- slapd reports a renamed or moved entry, and none of those below it, in either stage. The copy gives them their new
  names: an entry that was not reported is still below the same parent, so it keeps its first name and takes the name of
  that parent (by UUID, not by DN: two subtrees can have changed places). In a refresh this is done once, at its end.
  A filter that leaves containers out hides their renames.
- `EntriesDeleted` may name entries that the copy does not have, and an entry may be reported again unchanged.
- An entry is seen if it was in `EntryReported` or `EntriesPresent` since `RefreshBegan`. With `remove_unseen` every
  entry of the copy that was not seen is gone; without it, only those in `EntriesDeleted` are.
- A refresh that breaks off before `RefreshEnded` proves nothing about unseen entries: forget what was seen.
- A cookie covers all changes that came before it. Store it after them. A synchronisation that begins with an older
  cookie repeats changes, and misses none.

How the end of a refresh is understood:

| the request had | phases before the end | remove_unseen |
|---|---|---|
| no cookie | any | yes: the server sent the whole content |
| a cookie | present, or present and then delete | yes |
| a cookie | delete only | no |
| a cookie, refreshOnly | done with refreshDeletes | only if a present phase ended before |
| a cookie, refreshOnly | done without refreshDeletes | yes |

Entries that change between two phases of one refresh are reported in the later phase, so the unseen entries are
removed once, at the end. Cookies inside a refresh are ignored: they name a place in that refresh, not a state.
"""

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from purveyor.sources.ldap.ldap_errors import (
    SYNCPROV_FIX,
    DirectoryRefused,
    DirectoryUnavailable,
    NotUnderstood,
    ResultCode,
    SyncNotSupported,
    refuse_referral,
    translate_result,
)
from purveyor.sources.ldap.ldap_messages import (
    Control,
    IntermediateResponse,
    LdapMessage,
    LdapResult,
    SearchResultDone,
    SearchResultEntry,
    SearchResultReference,
)
from purveyor.sources.ldap.sync_controls import (
    SYNC_DONE,
    SYNC_INFO,
    SYNC_STATE,
    EntryState,
    NewCookie,
    RefreshPhaseEnded,
    SyncDone,
    SyncIdSet,
    SyncMode,
    decode_sync_done,
    decode_sync_info,
    decode_sync_state,
    encode_sync_request,
)
from purveyor.sources.ldap.sync_cookie import drop_empty_cookie, merge_cookie, move_back, replace_cookie


@dataclass(frozen=True, slots=True)
class RefreshBegan:
    """The server answers."""

    full: bool
    """Whether the request had no cookie, so that the refresh reports the whole content."""


@dataclass(frozen=True, slots=True)
class EntryReported:
    """An entry as it is now."""

    uuid: str
    dn: str
    attributes: dict[str, list[bytes]]
    """All requested attributes, named as the server does, with their options."""
    state: EntryState
    """ADD or MODIFY. A hint: in a refresh slapd says ADD of entries that the client knows, too."""


@dataclass(frozen=True, slots=True)
class EntriesPresent:
    """Entries that exist and have not changed since the cookie."""

    uuids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EntriesDeleted:
    """Entries that were deleted, or left the scope or the filter."""

    uuids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RefreshEnded:
    """The copy is up to date."""

    remove_unseen: bool
    """Whether entries that this refresh did not report are gone."""
    cookie: str | None
    """The cookie to store; None if the server has none, as slapd with an empty database."""


@dataclass(frozen=True, slots=True)
class CookieAdvanced:
    """In the persist stage: all changes up to here are covered by this cookie."""

    cookie: str


@dataclass(frozen=True, slots=True)
class RefreshRequired:
    """The last change of a synchronisation: the server cannot continue from the cookie. Begin again without one."""

    reason: str


SyncChange: TypeAlias = (
    RefreshBegan | EntryReported | EntriesPresent | EntriesDeleted | RefreshEnded | CookieAdvanced | RefreshRequired
)


class SyncStage(Enum):
    """Where a synchronisation is."""

    REQUESTED = "requested"
    REFRESH = "refresh"
    PERSIST = "persist"
    ENDED = "ended"


class SyncConsumer:
    """Understands the responses to one synchronisation. Not reusable: each search has its own."""

    def __init__(
        self,
        cookie: str | None = None,
        *,
        mode: SyncMode = SyncMode.REFRESH_AND_PERSIST,
        name: str = "synchronisation",
        repeat_last: bool = False,
    ) -> None:
        self._mode = mode
        self._name = name
        self._repeat_last = repeat_last
        self._requested_with = self._cookie = drop_empty_cookie(cookie)
        self._stage = SyncStage.REQUESTED
        self._present_phase = False

    @property
    def stage(self) -> SyncStage:
        """Where the synchronisation is."""
        return self._stage

    @property
    def cookie(self) -> str | None:
        """The newest cookie that covers all changes up to here."""
        return self._cookie

    def request_control(self) -> Control:
        """Return the control that goes with the search."""
        cookie = self._requested_with
        if cookie is not None and self._repeat_last:
            cookie = move_back(cookie)
        return encode_sync_request(self._mode, None if cookie is None else cookie.encode())

    def receive(self, message: LdapMessage) -> tuple[SyncChange, ...]:
        """Return the changes that a response to the search means.

        Raise DirectoryUnavailable or DirectoryRefused at a result other than success, at a referral, and at responses
        that break the rules; raise BerError at values that are not valid.
        """
        if self._stage is SyncStage.ENDED:
            raise NotUnderstood(f"{self._name}: the server sent a response after the last one")
        response = message.response
        match response:
            case SearchResultEntry():
                return self._begin() + self._receive_entry(response, message)
            case IntermediateResponse():
                if response.oid != SYNC_INFO or response.value is None:
                    return ()  # of an extension that was not requested
                return self._begin() + self._receive_info(response.value)
            case SearchResultDone():
                return self._receive_done(response.result, message.control(SYNC_DONE))
            case SearchResultReference():
                raise refuse_referral(self._name, response.uris)
            case _:
                raise NotUnderstood(f"{self._name}: {type(response).__name__} is no response to a search")

    def _begin(self) -> tuple[SyncChange, ...]:
        """Enter the refresh stage at the first response."""
        if self._stage is not SyncStage.REQUESTED:
            return ()
        self._stage = SyncStage.REFRESH
        return (RefreshBegan(full=self._requested_with is None),)

    def _receive_entry(self, entry: SearchResultEntry, message: LdapMessage) -> tuple[SyncChange, ...]:
        control = message.control(SYNC_STATE)
        if control is None or control.value is None:
            raise SyncNotSupported(f"{self._name}: the server ignores the request to synchronise", fix=SYNCPROV_FIX)
        sync = decode_sync_state(control.value)
        if not sync.uuid:
            raise DirectoryRefused(
                f"{self._name}: the entry {entry.dn} has no entryUUID, so its changes have no identity",
                fix="leave it out with a filter: (&(entryUUID=*)(objectClass=*))",
            )
        change: SyncChange
        match sync.state:
            case EntryState.DELETE:
                change = EntriesDeleted((sync.uuid,))
            case EntryState.PRESENT:
                change = EntriesPresent((sync.uuid,))
            case EntryState.ADD | EntryState.MODIFY:
                change = EntryReported(sync.uuid, entry.dn, entry.attributes, sync.state)
        return (change, *self._advance(sync.cookie))

    def _receive_info(self, value: bytes) -> tuple[SyncChange, ...]:
        info = decode_sync_info(value)
        match info:
            case NewCookie():
                return self._advance(info.cookie)
            case SyncIdSet():
                if info.deleted:
                    return (EntriesDeleted(info.uuids), *self._advance(info.cookie))
                return (EntriesPresent(info.uuids), *self._advance(info.cookie))
            case RefreshPhaseEnded():
                return self._end_phase(info)

    def _end_phase(self, phase: RefreshPhaseEnded) -> tuple[SyncChange, ...]:
        if self._stage is SyncStage.PERSIST:
            if phase.present:  # entries of the persist stage are not all entries: nothing may be removed
                raise DirectoryUnavailable(f"{self._name}: the server ended a present phase outside of a refresh")
            return self._advance(phase.cookie)
        self._present_phase = self._present_phase or phase.present
        if not phase.refresh_done:
            return ()
        ended = self._end_refresh(phase.cookie, remove_unseen=self._present_phase)
        self._stage = SyncStage.PERSIST
        return (ended,)

    def _end_refresh(self, cookie: bytes | None, *, remove_unseen: bool) -> RefreshEnded:
        self._cookie = replace_cookie(self._cookie, cookie)
        return RefreshEnded(remove_unseen or self._requested_with is None, self._cookie)

    def _advance(self, cookie: bytes | None) -> tuple[SyncChange, ...]:
        if cookie is None or self._stage is not SyncStage.PERSIST:
            return ()
        merged = merge_cookie(self._cookie, cookie)
        if merged == self._cookie:
            return ()
        self._cookie = merged
        return (CookieAdvanced(merged),)

    def _receive_done(self, result: LdapResult, control: Control | None) -> tuple[SyncChange, ...]:
        stage, self._stage = self._stage, SyncStage.ENDED
        began = (RefreshBegan(full=self._requested_with is None),) if stage is SyncStage.REQUESTED else ()
        if result.code == ResultCode.SYNC_REFRESH_REQUIRED or self._is_ahead(result, stage):
            return (RefreshRequired(result.text or "the server does not know the cookie any more"),)
        if result.code != ResultCode.SUCCESS:
            raise translate_result(result, self._name)
        done = decode_sync_done(control.value) if control is not None and control.value is not None else None
        if stage is SyncStage.PERSIST:
            return self._end_persist(done)
        if done is None:
            raise SyncNotSupported(f"{self._name}: the server ended the search without a refresh", fix=SYNCPROV_FIX)
        ended = self._end_refresh(done.cookie, remove_unseen=self._present_phase or not done.refresh_deletes)
        return (*began, ended)

    def _end_persist(self, done: SyncDone | None) -> tuple[SyncChange, ...]:
        if done is None or done.cookie is None:
            return ()
        self._cookie = merge_cookie(self._cookie, done.cookie)
        return (CookieAdvanced(self._cookie),)

    def _is_ahead(self, result: LdapResult, stage: SyncStage) -> bool:
        """Return whether the server refuses the cookie: an older database was restored, and the cookie is newer.

        slapd answers unwillingToPerform then, "consumer state is newer than provider". The text is not needed: without
        a cookie, a server that is unwilling for another reason says so again, and that is an error.
        """
        unwilling = result.code == ResultCode.UNWILLING_TO_PERFORM
        return unwilling and stage is SyncStage.REQUESTED and self._requested_with is not None

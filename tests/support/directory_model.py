"""A model of a directory server that speaks RFC 4533, and of a client's copy of it: the two sides of property tests.

The server chooses at random among the forms of a refresh that RFC 4533 allows. The copy follows only the rules that
`sync_consumer` documents.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from purveyor.sources.ldap.ldap_errors import ResultCode
from purveyor.sources.ldap.ldap_messages import LdapMessage
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
from purveyor.sources.ldap.sync_controls import EntryState
from purveyor.sources.ldap.sync_cookie import SyncCookie, server_of
from tests.support.sync_messages import entry, id_set, make_csn, new_cookie, phase_end, search_done

SERVERS = 3


@dataclass(frozen=True)
class Stored:
    """An entry of the model. `visible` is whether it is in the scope and the filter of the client."""

    csn: str
    dn: str
    visible: bool


@dataclass
class DirectoryModel:
    """A directory to which several masters write."""

    chance: random.Random
    entries: dict[int, Stored] = field(default_factory=dict)
    gone: list[tuple[str, int]] = field(default_factory=list)
    """Entries that were deleted or left the filter, with the CSN: the session log."""
    contexts: dict[int, str] = field(default_factory=dict)
    clock: int = 0
    numbers: int = 0
    forgotten: dict[int, str] = field(default_factory=dict)
    """The CSN of each server up to which the session log was forgotten."""

    def content(self) -> dict[int, str]:
        """Return what a client should see: the name of each entry by number."""
        return {number: each.dn for number, each in self.entries.items() if each.visible}

    def change(self) -> list[LdapMessage]:
        """Make a random change, and return what the persist stage says about it."""
        self.clock += 1
        server = self.chance.randrange(SERVERS)
        csn = make_csn(self.clock, server)
        self.contexts[server] = csn
        cookie = f"rid=000,sid={server:03x},csn={csn}"
        known = self.chance.choice([*self.entries, 0, 0])
        if known and self.chance.random() < 0.3:
            was = self.entries.pop(known)
            self.gone.append((csn, known))
            return [self._departure(known, cookie)] if was.visible else [new_cookie(cookie)]
        number = known
        if not number:
            self.numbers += 1
            number = self.numbers
        before = self.entries.get(number)
        now = Stored(csn, f"cn={self.clock}", self.chance.random() < 0.8)
        self.entries[number] = now
        if now.visible:
            known_state = EntryState.MODIFY if before is not None and before.visible else EntryState.ADD
            return [entry(number, known_state, cookie=cookie, dn=now.dn)]
        self.gone.append((csn, number))
        return [self._departure(number, cookie)] if before is not None and before.visible else [new_cookie(cookie)]

    def _departure(self, number: int, cookie: str) -> LdapMessage:
        if self.chance.random() < 0.5:
            return entry(number, EntryState.DELETE, cookie=cookie)
        return id_set([number], deleted=True, cookie=cookie)

    def forget(self) -> None:
        """Lose the session log, as at a restart."""
        self.gone.clear()
        self.forgotten = dict(self.contexts)

    def refresh(self, cookie: str | None, *, persist: bool) -> Iterator[LdapMessage]:
        """Answer a search. The directory may change while a client reads the messages."""
        known = _by_server(cookie)
        if cookie is not None and self.chance.random() < 0.1:
            yield search_done(ResultCode.SYNC_REFRESH_REQUIRED)
            return
        if any(csn > self.contexts.get(server, "") for server, csn in known.items()):
            yield search_done(ResultCode.UNWILLING_TO_PERFORM, text="consumer state is newer than provider!")
            return
        end = f"rid=000,csn={';'.join(self.contexts[server] for server in sorted(self.contexts))}"
        log_reaches = all(known.get(server, "") >= csn for server, csn in self.forgotten.items())
        present = False
        if not known:
            yield from self._changed(known)
            present = self.chance.random() < 0.5
        elif not log_reaches or self.chance.random() < 0.3:
            present = True
            yield from self._present(known)
            if self.chance.random() < 0.5:  # present and then delete, with changes between the phases
                yield phase_end(present=True, done=False)
                if self.chance.random() < 0.7:
                    # The delete phase covers what changed since the present phase began.
                    covered = dict(self.contexts)
                    for _ in range(self.chance.randrange(4)):
                        self.change()
                    yield from self._deletions(covered)
                    yield from self._changed(covered)
                    present = False
                end = f"rid=000,csn={';'.join(self.contexts[server] for server in sorted(self.contexts))}"
        else:
            yield from self._deletions(known)
            yield from self._changed(known)
        if persist:
            yield phase_end(present=present, cookie=end if self.contexts else None)
        else:
            yield search_done(cookie=end if self.contexts else None, refresh_deletes=not present)

    def _changed(self, known: dict[int, str]) -> Iterator[LdapMessage]:
        for number, each in sorted(self.entries.items(), key=lambda _: self.chance.random()):
            if each.visible and each.csn > known.get(server_of(each.csn), ""):
                # A cookie inside a refresh is a place in it, and must not be stored.
                inside = f"rid=000,csn={each.csn},delcsn={each.csn}" if self.chance.random() < 0.2 else None
                yield entry(number, EntryState.ADD, dn=each.dn, cookie=inside)

    def _present(self, known: dict[int, str]) -> Iterator[LdapMessage]:
        unchanged = [
            number
            for number, each in self.entries.items()
            if each.visible and each.csn <= known.get(server_of(each.csn), "")
        ]
        if unchanged and self.chance.random() < 0.5:
            yield id_set(unchanged, deleted=False)
        else:
            yield from (entry(number, EntryState.PRESENT) for number in unchanged)
        yield from self._changed(known)

    def _deletions(self, known: dict[int, str]) -> Iterator[LdapMessage]:
        numbers = [
            number for csn, number in self.gone if csn > known.get(server_of(csn), "") and number not in self.content()
        ]
        if numbers:
            yield id_set(numbers, deleted=True, cookie=f"rid=000,delcsn={self.gone[-1][0]}")


@dataclass
class Copy:
    """What a client stores: its entries and its cookie."""

    entries: dict[str, EntryReported] = field(default_factory=dict)
    cookie: str | None = None
    _reported: set[str] = field(default_factory=set)
    """The entries that were reported since the names were last brought up to date."""
    _seen: set[str] = field(default_factory=set)
    _parents: dict[str, str] = field(default_factory=dict)
    _refreshing: bool = False

    def apply(self, change: SyncChange, *, store_cookie: bool = True) -> None:
        """Follow the documented rules. A client that crashed before it stored a cookie has an older one."""
        match change:
            case RefreshBegan():
                self._seen, self._refreshing = set(), True
            case EntryReported(uuid=uuid):
                self.entries[uuid] = change
                self._seen.add(uuid)
                self._reported.add(uuid)
            case EntriesPresent(uuids=uuids):
                self._seen.update(uuids)
            case EntriesDeleted(uuids=uuids):
                for each in uuids:
                    self.entries.pop(each, None)
            case RefreshEnded(remove_unseen=remove_unseen):
                if remove_unseen:
                    self.entries = {uuid: each for uuid, each in self.entries.items() if uuid in self._seen}
                self._refreshing = False
            case RefreshRequired():
                self.cookie = None
            case CookieAdvanced():
                pass
        if isinstance(change, RefreshEnded | CookieAdvanced) and store_cookie:
            self.cookie = change.cookie
        if not self._refreshing:
            self._move_subtrees()

    def _move_subtrees(self) -> None:
        """Give entries below a renamed one their new names: the server does not report them."""
        names: dict[str, str] = {}

        def name(uuid: str) -> str:
            if uuid not in names:
                dn, parent = self.entries[uuid].dn, self._parents.get(uuid)
                if uuid not in self._reported and parent in self.entries:
                    dn = f"{_split(dn)[0]},{name(parent)}"
                names[uuid] = dn
            return names[uuid]

        for uuid, each in self.entries.items():
            if each.dn != name(uuid):
                self.entries[uuid] = replace(each, dn=name(uuid))
        by_name = {dn.lower(): uuid for uuid, dn in names.items()}
        self._parents = {
            uuid: by_name[above] for uuid, dn in names.items() if (above := _split(dn)[1].lower()) in by_name
        }
        self._reported.clear()


def _split(dn: str) -> tuple[str, str]:
    """Return the first part of a DN and the rest."""
    first, *rest = re.split(r"(?<!\\),", dn, maxsplit=1)
    return first, "".join(rest)


def _by_server(cookie: str | None) -> dict[int, str]:
    return {} if cookie is None else {server_of(csn): csn for csn in SyncCookie.parse(cookie).csns}

"""The rules of a live directory: how a record of its source changes the known entries. Pure.

`old` of an event is always what the transform knew, so these rules decide when it is known that an entry changed:

- An entry is known by its entryUUID. One that the state has without an entryUUID, from an LDIF file, is known by its
  name, and keeps its identity.
- Outside of a refresh a rename applies at once to everything below: the server sends the renamed entry alone.
- In a refresh the entries come in any order. A renamed entry takes its name at once; what is below it, and is not
  reported itself, follows at the end, when all names are known. An entry that loses its name to another one is
  displaced (see `live_directory`) until the refresh decides.
- The end of a refresh deletes what was not seen, children before parents, and then moves what follows its containers,
  all at once, so that two containers can exchange their names. If more entries change than one record may change, the
  rest follows with the next records of the source.
- A record that was applied before has no effect: an entry that is equal, an operation whose CSN is not newer than the
  last one of its server or than the entry's own entryCSN. A record of an earlier epoch has none either.

A record whose effect is impossible raises InvalidRecord, and nothing has happened.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final, assert_never

from purveyor.model.ldif_changes import Change, Gone, Present, RefreshBegin, RefreshEnd
from purveyor.pipeline.transform import directory_rules
from purveyor.pipeline.transform.directory_records import Attributes, InvalidRecord, parse_dn, renamed_dn
from purveyor.pipeline.transform.directory_rules import (
    ENTRY_UUID,
    Entry,
    EntryChange,
    list_bounded,
    modified_attributes,
    moved_along,
    renamed_attributes,
    superior_name,
)
from purveyor.pipeline.transform.live_directory import (
    LiveDirectory,
    SeenEntries,
    entry_uuid,
    identity,
    index_key,
    is_displaced,
    original_key,
)
from purveyor.pipeline.transform.live_records import EntryNow, InvalidEntry, LiveRecord, Operation, server_id
from purveyor.pipeline.transform.sync_state import Refresh, SyncState

ENTRY_CSN: Final = "entrycsn"


class PartlyApplied(Exception):
    """A record had a part of its effect; the rest is impossible."""

    def __init__(self, reason: str, changes: Sequence[EntryChange]) -> None:
        super().__init__(reason)
        self.changes = changes


def apply_live_record(directory: LiveDirectory, record: LiveRecord) -> list[EntryChange]:
    """Change the directory by the record."""
    if not _accept_epoch(directory, record.epoch):
        return []
    changes = _apply(directory, record)
    refresh = directory.state.refresh
    if refresh is None or not refresh.ending:
        return changes
    changes += _end_refresh(directory, refresh, directory_rules.MAX_CHANGED_ENTRIES - len(changes))
    if isinstance(record.body, RefreshEnd) and record.body.remove_unseen and not refresh.complete:
        raise PartlyApplied("refresh-end: a record of the refresh was not understood, so nothing is deleted", changes)
    return changes


def note_invalid(directory: LiveDirectory, error: InvalidRecord) -> None:
    """Note that a message was not understood: the end of its refresh must not delete an entry because of it."""
    refresh = directory.state.refresh if directory.is_live else None
    if refresh is None:
        return
    if not isinstance(error, InvalidEntry):
        directory.change_state(replace(directory.state, refresh=replace(refresh, complete=False)))
    elif _accept_epoch(directory, error.epoch):
        directory.note_present(index_key(error.uuid))


def _accept_epoch(directory: LiveDirectory, epoch: int) -> bool:
    state = directory.state
    if epoch > state.epoch:
        directory.change_state(replace(state, epoch=epoch))
    return epoch >= state.epoch


def _apply(directory: LiveDirectory, record: LiveRecord) -> list[EntryChange]:
    match record.body:
        case RefreshBegin():
            return _begin_refresh(directory, record.body)
        case EntryNow():
            return _apply_entry(directory, record.body)
        case Gone():
            found = [each for uuid in record.body.uuids if (each := directory.find(uuid)) is not None]
            return _delete(directory, found)
        case Present():
            if directory.state.refresh is not None:
                for uuid in record.body.uuids:
                    directory.note_present(index_key(uuid))
            return []
        case RefreshEnd():
            return _begin_end(directory, record.body)
        case Operation():
            return _apply_operation(directory, record.body)
        case _:
            assert_never(record.body)


def _apply_entry(directory: LiveDirectory, now: EntryNow) -> list[EntryChange]:
    given = now.attributes.get(ENTRY_UUID)
    if given and str(given[0]).lower() != now.uuid:
        raise InvalidEntry("its entryUUID is not its uuid", directory.state.epoch, now.uuid)
    known = _find(directory, now.uuid, now.name.key)
    after = Entry(
        now.name.text,
        now.uuid if known is None else known[1].uuid,
        now.attributes if given else {**now.attributes, ENTRY_UUID: [now.uuid]},
    )
    try:
        return _put_entry(directory, known, after)
    except InvalidRecord as error:
        raise InvalidEntry(str(error), directory.state.epoch, now.uuid) from None


def _find(directory: LiveDirectory, uuid: str, key: str) -> tuple[str, Entry] | None:
    """Return the known entry: by its entryUUID, or by its name if it has none."""
    found = directory.find(uuid)
    if found is None and (named := directory.get(key)) is not None and entry_uuid(named) is None:
        return key, named
    return found


def _apply_operation(directory: LiveDirectory, operation: Operation) -> list[EntryChange]:
    state, csn = directory.state, operation.csn
    server = server_id(csn)
    if csn <= state.csns.get(server, ""):
        return []
    known = _find(directory, operation.uuid, operation.record.name.key)
    contained = known is not None and _contains(known[1], operation)
    changes = [] if contained else _operate(directory, operation, known)
    directory.change_state(replace(directory.state, csns={**state.csns, server: csn}))
    return changes


def _contains(entry: Entry, operation: Operation) -> bool:
    """Return whether an entry is already as the operation, or a later one, left it."""
    newest = _entry_csn(entry)
    same_server = newest.split("#")[2:3] == [server_id(operation.csn)]
    return operation.csn <= newest and (same_server or operation.catch_up)


def _entry_csn(entry: Entry) -> str:
    given = entry.attributes.get(ENTRY_CSN)
    return given[0] if given and isinstance(given[0], str) else ""


def _operate(directory: LiveDirectory, operation: Operation, known: tuple[str, Entry] | None) -> list[EntryChange]:
    record = operation.record
    if (known is None) != (record.change is Change.ADD):
        if operation.catch_up:
            return []
        what = "there is no such entry" if known is None else "there is such an entry already"
        raise InvalidRecord(f"{record.change.value}: {what}")
    if known is None:
        attributes = _with_csn(record.attributes, operation)
        return _put_entry(directory, None, Entry(record.name.text, operation.uuid, attributes))
    before = known[1]
    match record.change:
        case Change.MODIFY:
            attributes = _with_csn(modified_attributes(before, record.modifications), operation)
            return _put_entry(directory, known, before._replace(attributes=attributes))
        case Change.MODRDN:
            superior = None if record.new_superior is None else superior_name(record.new_superior)
            new = renamed_dn(parse_dn(before.dn), record.new_rdn, superior)
            if new.below(parse_dn(before.dn)):
                raise InvalidRecord("modrdn: an entry cannot be moved below itself")
            attributes = _with_csn(renamed_attributes(before, new, record), operation)
            after = before._replace(dn=new.text, attributes=attributes)
            return _put_entry(directory, known, after, until=operation.csn if operation.catch_up else None)
        case _:
            return _delete(directory, [known])


def _with_csn(attributes: Attributes, operation: Operation) -> Attributes:
    return {**attributes, ENTRY_UUID: [operation.uuid], ENTRY_CSN: [operation.csn]}


def _put_entry(
    directory: LiveDirectory, known: tuple[str, Entry] | None, after: Entry, until: str | None = None
) -> list[EntryChange]:
    """Put an entry where its name says, with what is below it; not what has changed there after `until`."""
    generation, in_refresh = directory.state.generation, directory.state.refresh is not None
    if in_refresh:
        directory.note_reported(identity(after))
    new_key = parse_dn(after.dn).key
    if known is None:
        _occupy(directory, new_key, after, generation)
        return [EntryChange(None, after)]
    key, before = known
    if before == after and not is_displaced(key):
        return []
    moved = directory.moved_by(identity(before))
    if before.dn != after.dn:
        if not in_refresh:
            return _rename(directory, known, after, until)
        if moved != generation and any(True for _ in directory.below(original_key(key, before))):
            _note_container(directory, original_key(key, before), after)
        moved = generation
    if key == new_key:
        directory.put(key, after, moved)
    else:
        directory.take(key)
        _occupy(directory, new_key, after, moved)
        directory.settle(original_key(key, before))
    return [EntryChange(before, after)] if before != after else []


def _note_container(directory: LiveDirectory, old_key: str, after: Entry) -> None:
    """Note that the entries below the old name follow at the end of the refresh."""
    state = directory.state
    directory.change_state(replace(state, containers={old_key: identity(after), **state.containers}))


def _occupy(directory: LiveDirectory, key: str, entry: Entry, moved: int) -> None:
    if directory.get(key) is not None:
        directory.displace(key)
    directory.put(key, entry, moved)


def _rename(directory: LiveDirectory, known: tuple[str, Entry], after: Entry, until: str | None) -> list[EntryChange]:
    """Rename an entry and everything below it at once."""
    key, before = known
    moves = [(key, before, after)]
    if not is_displaced(key):  # else the entries there belong to the entry that took the name
        for inner, entry in list_bounded(directory.descendants(key)):
            if until is None or _entry_csn(entry) <= until:
                moves.append((inner, entry, moved_along(entry, inner.count("\0") - key.count("\0"), after.dn)))
    return _move(directory, moves)


def _move(directory: LiveDirectory, moves: Iterable[tuple[str, Entry, Entry]]) -> list[EntryChange]:
    """Give entries their new names, all at once."""
    done = list(moves)
    for key, _, _ in done:
        directory.take(key)
    for _, _, after in done:
        _occupy(directory, parse_dn(after.dn).key, after, directory.state.generation)
    for key, before, _ in done:
        directory.settle(original_key(key, before))
    return [EntryChange(before, after) for _, before, after in done if before != after]


def _delete(directory: LiveDirectory, found: Iterable[tuple[str, Entry]]) -> list[EntryChange]:
    """Delete exactly these entries, children before parents."""
    gone = sorted(
        {identity(entry): (original_key(key, entry), key, entry) for key, entry in found}.values(), reverse=True
    )
    for _, key, _ in gone:
        directory.take(key)
    for original, _, _ in gone:
        directory.settle(original)
    return [EntryChange(entry, None) for _, _, entry in gone]


def _begin_refresh(directory: LiveDirectory, begin: RefreshBegin) -> list[EntryChange]:
    state, changes = directory.state, list[EntryChange]()
    if state.refresh is not None and state.refresh.ending:
        changes = _end_refresh(directory, state.refresh, directory_rules.MAX_CHANGED_ENTRIES)
        state = directory.state
        if state.refresh is not None:
            raise InvalidRecord("the refresh before it has not ended: too many entries change by it")
    if state.refresh is None:  # else the names before the refresh are those before the first attempt
        state = replace(state, generation=state.generation + 1, containers={})
    directory.forget_seen()
    directory.change_state(replace(state, refresh=Refresh(full=begin.full)))
    return changes


def _begin_end(directory: LiveDirectory, end: RefreshEnd) -> list[EntryChange]:
    state = directory.state
    if state.refresh is None or state.refresh.ending:
        if all(csn <= state.csns.get(server_id(csn), "") for csn in end.csns) or state.refresh is not None:
            return []  # it was applied before
        raise InvalidRecord("refresh-end: no refresh is in progress")
    remove_unseen = end.remove_unseen and state.refresh.complete
    ending = replace(state.refresh, ending=True, remove_unseen=remove_unseen, csns=end.csns)
    directory.change_state(replace(state, refresh=ending))
    return []


def _end_refresh(directory: LiveDirectory, refresh: Refresh, room: int) -> list[EntryChange]:
    """Do what the end of a refresh decides, for as many entries as one record may change; the rest comes later."""
    changes: list[EntryChange] = []
    if refresh.remove_unseen:
        entries = (each for known in directory.unseen() if (each := directory.find_known(known)) is not None)
        unseen = sorted(((original_key(*each), *each) for each in entries), key=lambda each: each[0], reverse=True)
        changes = _delete(directory, ((key, entry) for _, key, entry in unseen[:room]))
        if len(unseen) > room:
            return changes
    room -= len(changes)
    moves = list(islice(_followers(directory), room + 1))
    changes += _move(directory, moves[:room])
    if len(moves) <= room:
        directory.change_state(_ended(directory.state, refresh))
    return changes


def _ended(state: SyncState, refresh: Refresh) -> SyncState:
    csns = {} if refresh.full else dict(state.csns)
    for csn in refresh.csns:
        csns[server_id(csn)] = max(csn, csns.get(server_id(csn), ""))
    return replace(state, csns=csns, refresh=None, containers={})


def _followers(directory: LiveDirectory) -> Iterator[tuple[str, Entry, Entry]]:
    """Yield the entries that a refresh did not report, below containers that it renamed: key, before, after."""
    containers, generation = directory.state.containers, directory.state.generation
    if not containers:
        return
    reported = directory.reported()
    new_name = _new_names(directory, reported)
    last = None
    for old in sorted(containers):
        if last is not None and old.startswith(f"{last}\0"):
            continue  # below one that was dealt with
        last = old
        for key, entry in directory.below(old):
            if not reported.has(entry) and directory.moved_by(identity(entry)) != generation:
                above = new_name(original_key(key, entry))
                if above is not None:
                    after = moved_along(entry, *above)
                    if after != entry:
                        yield key, entry, after


def _new_names(directory: LiveDirectory, reported: SeenEntries) -> Callable[[str], tuple[int, str] | None]:
    """Return a function from the old key of an entry to the new name of the nearest reported entry above it.

    With the name it gives the number of levels between them. None: the name is the same, or there is no such entry.
    """
    state = directory.state
    names: dict[str, tuple[str | None, bool]] = {}
    """By the key of a container: its new name, and whether the search ends there."""

    def find_entry(key: str) -> tuple[str | None, bool]:
        if key in state.containers:
            found = directory.find_known(state.containers[key])
            return (None, False) if found is None else (found[1].dn, True)
        occupant = directory.get(key)
        if occupant is None or directory.moved_by(identity(occupant)) == state.generation:
            return None, False
        return None, reported.has(occupant)

    def new_name(key: str) -> tuple[int, str] | None:
        above, levels = key, 0
        while "\0" in above:
            above, levels = above.rsplit("\0", 1)[0], levels + 1
            if above not in names:
                names[above] = find_entry(above)
            name, ends = names[above]
            if ends:
                return None if name is None else (levels, name)
        return None

    return new_name

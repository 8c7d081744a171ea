"""The rules of the directory: how a record changes the known entries. Pure; a store has the entries.

A change happens completely, or the record is invalid and nothing happens. The result is a list of the changed entries,
from which the events are made. Where servers differ or a record overlaps with an earlier import, the record's outcome
counts: adding a value that is there and deleting one that is not are no errors.

The identity of an entry is its entryUUID; without one, an id that is made when the entry is first seen. It survives
renames. An entry that gets another entryUUID is another entry.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple, Protocol

from purveyor.model.ldif_changes import Change, Step
from purveyor.pipeline.transform.directory_records import (
    Attributes,
    DistinguishedName,
    InvalidRecord,
    Modification,
    Record,
    Value,
    fold_value,
    parse_dn,
    rdn_values,
    renamed_dn,
)

ENTRY_UUID: Final = "entryuuid"
MAX_CHANGED_ENTRIES: Final = (1 << 19) - 1
"""Entries that one record may change: each can give two events, and a position has room for 2**20."""


class Entry(NamedTuple):
    """What is known about one entry. `directory_pages` has its stored form."""

    dn: str
    uuid: str
    attributes: Attributes
    published: "Published | None" = None
    """What subscribers have, if the last event of the entry could not be published; else they have the entry."""
    member_kinds: Mapping[str, str] | None = None
    """What members of a group are by their entries, where their names say something else."""


class Published(NamedTuple):
    """What subscribers have instead of an entry."""

    entry: Entry | None
    """An earlier version, or nothing."""


class Store(Protocol):
    """Entries by the keys of their names."""

    def get(self, key: str) -> Entry | None:
        """Return the entry of that name."""

    def put(self, key: str, entry: Entry) -> None:
        """Add or replace the entry."""

    def remove(self, key: str) -> None:
        """Remove the entry, if it is there."""

    def descendants(self, key: str) -> Iterator[tuple[str, Entry]]:
        """Yield everything below an entry, in the order of the keys (so parents come first)."""


@dataclass(frozen=True, slots=True)
class EntryChange:
    """The change of one entry: `before` is None for a new one, `after` for a deleted one."""

    before: Entry | None
    after: Entry | None


def apply_record(store: Store, record: Record, fresh_id: str) -> list[EntryChange]:
    """Change the directory by the record. `fresh_id` is the identity of a new entry that has no entryUUID."""
    match record.change:
        case Change.CONTENT:
            return _set(store, record, fresh_id)
        case Change.ADD:
            if store.get(record.name.key) is not None:
                raise InvalidRecord("add: there is such an entry already")
            return _set(store, record, fresh_id)
        case Change.MODIFY:
            return _modify(store, record)
        case Change.DELETE:
            return _delete(store, record)
        case Change.MODRDN:
            return _rename(store, record)


def _set(store: Store, record: Record, fresh_id: str) -> list[EntryChange]:
    before = store.get(record.name.key)
    after = Entry(record.name.text, _identity(record.attributes, before, fresh_id), record.attributes)
    return _put(store, record.name.key, before, after)


def _modify(store: Store, record: Record) -> list[EntryChange]:
    before = _known(store, record)
    attributes = modified_attributes(before, record.modifications)
    after = Entry(before.dn, _identity(attributes, before, before.uuid), attributes)
    return _put(store, record.name.key, before, after)


def _delete(store: Store, record: Record) -> list[EntryChange]:
    before = _known(store, record)
    below = list_bounded(store.descendants(record.name.key))
    gone = [*reversed(below), (record.name.key, before)]
    for key, _ in gone:
        store.remove(key)
    return [EntryChange(entry, None) for _, entry in gone]


def _rename(store: Store, record: Record) -> list[EntryChange]:
    before, old = _known(store, record), record.name
    superior = None if record.new_superior is None else superior_name(record.new_superior)
    new = renamed_dn(parse_dn(before.dn), record.new_rdn, superior)
    if new.below(old):
        raise InvalidRecord("modrdn: an entry cannot be moved below itself")
    if new.key != old.key and store.get(new.key) is not None:
        raise InvalidRecord(f"modrdn: there is an entry {new.text!r} already")
    after = before._replace(dn=new.text, attributes=renamed_attributes(before, new, record))
    below = list_bounded(store.descendants(old.key))
    if new.key != old.key and next(iter(store.descendants(new.key)), None) is not None and below:
        raise InvalidRecord(f"modrdn: there are entries below {new.text!r} already")
    # Everything is computed before the first change: a failure on the way has changed nothing.
    renamed = [(old.key, new.key, before, after)]
    for key, entry in below:
        child = moved_along(entry, key.count("\0") - old.key.count("\0"), new.text)
        renamed.append((key, new.key + key[len(old.key) :], entry, child))
    for was, _, _, _ in renamed:
        store.remove(was)
    for _, now, _, entry in renamed:
        store.put(now, entry)
    done = [EntryChange(one, other) for _, _, one, other in renamed]
    return [change for change in done if change.before != change.after]


def moved_along(entry: Entry, levels: int, above: str) -> Entry:
    """Return an entry under the new name of the entry that is some levels above it."""
    return entry._replace(dn=",".join((*parse_dn(entry.dn).rdns[:levels], above)))


def superior_name(text: str) -> DistinguishedName:
    """Parse the name of a parent; the empty one is that of the root."""
    return parse_dn(text) if text.strip() else DistinguishedName((), "")


def _known(store: Store, record: Record) -> Entry:
    entry = store.get(record.name.key)
    if entry is None:
        raise InvalidRecord(f"{record.change.value}: there is no such entry")
    return entry


def list_bounded(entries: Iterator[tuple[str, Entry]]) -> list[tuple[str, Entry]]:
    """Return entries that change together with another one; raise InvalidRecord if they are too many."""
    found = list(islice(entries, MAX_CHANGED_ENTRIES))
    if len(found) == MAX_CHANGED_ENTRIES:
        raise InvalidRecord(f"more than {MAX_CHANGED_ENTRIES} entries would change at once")
    return found


def _put(store: Store, key: str, before: Entry | None, after: Entry) -> list[EntryChange]:
    if before == after:
        return []
    store.put(key, after)
    return [EntryChange(before, after)]


def _identity(attributes: Attributes, before: Entry | None, fresh_id: str) -> str:
    given = _entry_uuid(attributes)
    if before is not None and given in (None, _entry_uuid(before.attributes)):
        return before.uuid  # a live source can give an entry its entryUUID and leave its identity
    return fresh_id if given is None else given


def _entry_uuid(attributes: Attributes) -> str | None:
    given = attributes.get(ENTRY_UUID)
    return given[0].lower() if given and isinstance(given[0], str) and given[0] else None


def modified_attributes(before: Entry, modifications: Iterable[Modification]) -> dict[str, list[Value]]:
    """Return the attributes of an entry after a modify."""
    attributes = dict(before.attributes)
    for modification in modifications:
        values = _modified(attributes.get(modification.attribute, []), modification)
        if values:
            attributes[modification.attribute] = values
        else:
            attributes.pop(modification.attribute, None)
    return attributes


def _modified(values: Iterable[Value], modification: Modification) -> list[Value]:
    """Return the values of an attribute after one step."""
    have, given = list(values), modification.values
    match modification.step:
        case Step.REPLACE:
            return list(given)
        case Step.ADD:
            return have + [value for value in given if value not in have]
        case Step.DELETE:
            return _without(have, given) if given else []
        case Step.INCREMENT:
            try:
                (by,) = given
                return [str(int(str(value)) + int(str(by))) for value in have] if have else [_missing(modification)]
            except ValueError:
                raise InvalidRecord(f"increment: {modification.attribute} or the step is no whole number") from None


def _missing(modification: Modification) -> str:
    raise InvalidRecord(f"increment: the entry has no {modification.attribute}")


def _without(have: list[Value], given: Iterable[Value]) -> list[Value]:
    """Remove values: equal ones, or else those that a server takes for equal.

    The rule of an attribute is in the schema of the server. Most ignore case and further spaces; that of telephone
    numbers ignores all spaces and hyphens.
    """
    left = list(have)
    for value in given:
        if value in left:
            left.remove(value)
        elif isinstance(value, str):
            left = _without_alike(left, value)
    return left


def _without_alike(values: list[Value], value: str) -> list[Value]:
    for fold in (fold_value, _fold_number):
        folded = fold(value)
        left = [each for each in values if not (isinstance(each, str) and fold(each) == folded)]
        if len(left) < len(values):
            return left
    return values


def _fold_number(value: str) -> str:
    return fold_value(value).replace(" ", "").replace("-", "")


def renamed_attributes(before: Entry, new: DistinguishedName, record: Record) -> Attributes:
    """Remove the values of the old rdn if the record says so, and add those of the new one that are missing.

    slapd does the same in this order: a value that is in both comes to the end, in its new spelling.
    """
    attributes = dict(before.attributes)
    if record.delete_old_rdn:
        for kind, value in rdn_values(parse_dn(before.dn)):
            left = _without(list(attributes.get(kind, [])), [value])
            if left:
                attributes[kind] = left
            else:
                attributes.pop(kind, None)
    for kind, value in rdn_values(new):
        have = attributes.get(kind, [])
        if not any(isinstance(each, str) and fold_value(each) == fold_value(value) for each in have):
            attributes[kind] = [*have, value]
    return attributes

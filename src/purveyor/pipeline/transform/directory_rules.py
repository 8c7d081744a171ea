"""The rules of the directory: what a record makes of the entries that are known. Pure; entries are in a store.

A change either happens whole or is Unfit, and then nothing has happened. It is told as a list of what became of which
entry; from that the events are made. Where servers differ or a record overlaps with what was imported before, the
record's outcome counts: adding a value that is there and deleting one that is not are no errors.

The identity of an entry is its entryUUID; without one, an id made when it is first seen. It survives renames. An entry
that gets another entryUUID is another entry.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple, Protocol

from purveyor.model.ldif_changes import Change, Step
from purveyor.pipeline.transform.dn import Name, Unfit, folded, moved, name, rdn_values
from purveyor.pipeline.transform.records import Attributes, Modification, Record, Value

ENTRY_UUID: Final = "entryuuid"
MOST_AT_ONCE: Final = (1 << 19) - 1
"""Entries that one record may change: each can give two events, and a position leaves room for 2**20."""


class Entry(NamedTuple):
    """What is known of one entry. A plain list in JSON, which is how it is kept."""

    dn: str
    uuid: str
    attributes: Attributes


class Store(Protocol):
    """Entries by the keys of their names."""

    def get(self, key: str) -> Entry | None:
        """The entry of that name."""

    def put(self, key: str, entry: Entry) -> None:
        """Add or replace it."""

    def remove(self, key: str) -> None:
        """Forget it, if it is there."""

    def descendants(self, key: str) -> Iterator[tuple[str, Entry]]:
        """Everything below an entry, in the order of the keys (so parents come first)."""


@dataclass(frozen=True, slots=True)
class Changed:
    """What became of one entry: new when there was none before, deleted when there is none after."""

    before: Entry | None
    after: Entry | None


def apply(store: Store, record: Record, fresh_id: str) -> list[Changed]:
    """Change the directory as the record says. `fresh_id` is the identity of an entry that is new and brings none."""
    match record.change:
        case Change.CONTENT:
            return _set(store, record, fresh_id)
        case Change.ADD:
            if store.get(record.name.key) is not None:
                raise Unfit("add: there is such an entry already")
            return _set(store, record, fresh_id)
        case Change.MODIFY:
            return _modify(store, record)
        case Change.DELETE:
            return _delete(store, record)
        case Change.MODRDN:
            return _rename(store, record)


def undo(store: Store, changes: Iterable[Changed]) -> None:
    """Put the entries back as they were before some changes of `apply`."""
    done = list(changes)
    for change in done:
        if change.after is not None:
            store.remove(name(change.after.dn).key)
    for change in done:
        if change.before is not None:
            store.put(name(change.before.dn).key, change.before)


def _set(store: Store, record: Record, fresh_id: str) -> list[Changed]:
    before = store.get(record.name.key)
    known = fresh_id if before is None else before.uuid
    after = Entry(record.name.text, _identity(record.attributes, known), record.attributes)
    return _put(store, record.name.key, before, after)


def _modify(store: Store, record: Record) -> list[Changed]:
    before = _known(store, record)
    attributes = dict(before.attributes)
    for modification in record.modifications:
        values = _modified(attributes.get(modification.attribute, []), modification)
        if values:
            attributes[modification.attribute] = values
        else:
            attributes.pop(modification.attribute, None)
    return _put(store, record.name.key, before, Entry(before.dn, _identity(attributes, before.uuid), attributes))


def _delete(store: Store, record: Record) -> list[Changed]:
    before = _known(store, record)
    below = _descendants(store, record.name.key)
    gone = [*reversed(below), (record.name.key, before)]
    for key, _ in gone:
        store.remove(key)
    return [Changed(entry, None) for _, entry in gone]


def _rename(store: Store, record: Record) -> list[Changed]:
    before, old = _known(store, record), record.name
    superior = None if record.new_superior is None else _superior(record.new_superior)
    new = moved(name(before.dn), record.new_rdn, superior)
    if new.below(old):
        raise Unfit("modrdn: an entry cannot be moved below itself")
    if new.key != old.key and store.get(new.key) is not None:
        raise Unfit(f"modrdn: there is an entry {new.text!r} already")
    after = before._replace(dn=new.text, attributes=_renamed_attributes(before, new, record))
    below = _descendants(store, old.key)
    if new.key != old.key and next(iter(store.descendants(new.key)), None) is not None and below:
        raise Unfit(f"modrdn: there are entries below {new.text!r} already")
    # Everything is worked out before the first change: what fails on the way has changed nothing.
    renamed = [(old.key, new.key, before, after)]
    for key, entry in below:
        own = name(entry.dn).rdns[: key.count("\0") - old.key.count("\0")]
        child = entry._replace(dn=",".join((*own, new.text)))
        renamed.append((key, new.key + key[len(old.key) :], entry, child))
    for was, _, _, _ in renamed:
        store.remove(was)
    for _, now, _, entry in renamed:
        store.put(now, entry)
    done = [Changed(one, other) for _, _, one, other in renamed]
    return [change for change in done if change.before != change.after]


def _superior(text: str) -> Name:
    return name(text) if text.strip() else Name((), "")


def _known(store: Store, record: Record) -> Entry:
    entry = store.get(record.name.key)
    if entry is None:
        raise Unfit(f"{record.change.value}: there is no such entry")
    return entry


def _descendants(store: Store, key: str) -> list[tuple[str, Entry]]:
    found = list(islice(store.descendants(key), MOST_AT_ONCE))
    if len(found) == MOST_AT_ONCE:
        raise Unfit(f"more than {MOST_AT_ONCE} entries would change at once")
    return found


def _put(store: Store, key: str, before: Entry | None, after: Entry) -> list[Changed]:
    if before == after:
        return []
    store.put(key, after)
    return [Changed(before, after)]


def _identity(attributes: Attributes, known: str) -> str:
    given = attributes.get(ENTRY_UUID)
    return given[0].lower() if given and isinstance(given[0], str) and given[0] else known


def _modified(values: Iterable[Value], modification: Modification) -> list[Value]:
    """The values of an attribute after one step."""
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
                raise Unfit(f"increment: {modification.attribute} or the step is no whole number") from None


def _missing(modification: Modification) -> str:
    raise Unfit(f"increment: the entry has no {modification.attribute}")


def _without(have: list[Value], given: Iterable[Value]) -> list[Value]:
    """Without these values: the very same ones, or else those that differ only in case and space."""
    left = list(have)
    for value in given:
        if value in left:
            left.remove(value)
        elif isinstance(value, str):
            left = [each for each in left if not (isinstance(each, str) and folded(each) == folded(value))]
    return left


def _renamed_attributes(before: Entry, new: Name, record: Record) -> Attributes:
    """The values of the new rdn are there; those of the old one are gone if the record says so."""
    attributes = dict(before.attributes)
    fresh = rdn_values(new)
    if record.delete_old_rdn:
        for kind, value in rdn_values(name(before.dn)):
            if (kind, folded(value)) not in {(each, folded(text)) for each, text in fresh}:
                left = _without(list(attributes.get(kind, [])), [value])
                if left:
                    attributes[kind] = left
                else:
                    attributes.pop(kind, None)
    for kind, value in fresh:
        have = attributes.get(kind, [])
        if not any(isinstance(each, str) and folded(each) == folded(value) for each in have):
            attributes[kind] = [*have, value]
    return attributes

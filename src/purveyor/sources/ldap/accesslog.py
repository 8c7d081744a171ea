"""The entries of OpenLDAP's overlay accesslog as the operations that they record.

The log is a database of its own (`cn=accesslog`). Read by content synchronisation, its entries arrive in the order of
the operations. Passwords stand in clear in it: drop secrets before anything is stored.

`reqMod` has one value for each value of a change, and an attribute name, a colon and a sign before it:

| value | meaning |
|---|---|
| `sn:+ Müller` | add a value |
| `sn:- Meier` | delete a value |
| `sn:-` | delete the attribute |
| `sn:= Müller` | replace all values by this one, and by those of the next lines with the same name and sign |
| `sn:=` | replace all values by none |
| `loginCount:# 1` | increment |
| `:` | the next line begins a new change, though its name and sign are those of the line before |
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from purveyor.model.errors import PurveyorError
from purveyor.model.ldif_changes import Change, Step

WRITES_FILTER: Final = (
    "(&(|(objectClass=auditAdd)(objectClass=auditModify)(objectClass=auditDelete)(objectClass=auditModRDN))"
    "(reqResult=0))"
)
"""The log entries that `read_operation` understands."""

Attributes: TypeAlias = Mapping[str, tuple[bytes, ...]]


class AccesslogError(PurveyorError):
    """An entry of the access log that this program does not understand."""


@dataclass(frozen=True, slots=True)
class AttributeChange:
    """One step of an operation on an attribute."""

    step: Step
    attribute: str
    values: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation that the server has carried out."""

    change: Change
    """ADD, MODIFY, DELETE or MODRDN."""
    dn: str
    """The name of the entry before the operation."""
    uuid: str | None
    """The entryUUID."""
    csn: str
    """The change sequence number: the order of operations, and the id of this one."""
    attributes: Attributes = field(default_factory=dict)
    """After an ADD: the new entry."""
    changes: tuple[AttributeChange, ...] = ()
    """The steps of a MODIFY, in order; after a MODRDN what it changed in the entry."""
    old: Attributes = field(default_factory=dict)
    """What the server logged of the entry before: all of it at a DELETE where `logold` matches, else nothing."""
    new_dn: str | None = None
    """After a MODRDN: the name of the entry, if the server logs it (OpenLDAP 2.5 and newer)."""
    new_rdn: str | None = None
    delete_old_rdn: bool | None = None
    new_superior: str | None = None
    started: str = ""
    """The time as the server wrote it (`reqStart`)."""
    author: str = ""
    """The account that asked for it (`reqAuthzID`)."""


_KINDS: Final = {
    "add": Change.ADD,
    "modify": Change.MODIFY,
    "delete": Change.DELETE,
    "modrdn": Change.MODRDN,
    "moddn": Change.MODRDN,
}
_NO_WRITES: Final = frozenset({"bind", "unbind", "search", "compare", "abandon"})
_STEPS: Final = {b"+": Step.ADD, b"-": Step.DELETE, b"=": Step.REPLACE, b"#": Step.INCREMENT}


def read_operation(log_dn: str, attributes: Mapping[str, Iterable[bytes]]) -> Operation | None:
    """Return the operation of a log entry; None for what changed nothing: reads, failed operations, the log's root.

    Raise AccesslogError, which names the log entry, at a kind that is not known or a value that is not valid.
    """
    entry = _LogEntry(log_dn, attributes)
    kind = entry.text("reqType")
    if kind is None:
        if entry.has_class("auditContainer"):
            return None
        raise entry.error("it has no reqType")
    if kind in _NO_WRITES or kind.startswith("extended"):
        return None  # what an extended operation changes is logged as a modify, too
    if entry.required("reqResult") != "0":
        return None
    change = _KINDS.get(kind)
    if change is None:
        raise entry.error(f"unknown reqType {kind!r}")
    steps = tuple(_read_steps(entry))
    renames = change is Change.MODRDN
    return Operation(
        change=change,
        dn=entry.required("reqDN"),
        uuid=entry.text("reqEntryUUID") or _uuid_in(steps),
        csn=_csn_in(steps) or entry.required("entryCSN"),
        attributes=_content(entry, steps) if change is Change.ADD else {},
        changes=() if change is Change.ADD else steps,
        old=_read_old(entry),
        new_dn=entry.text("reqNewDN") if renames else None,
        new_rdn=entry.required("reqNewRDN") if renames else None,
        delete_old_rdn=entry.required("reqDeleteOldRDN").upper() == "TRUE" if renames else None,
        new_superior=entry.text("reqNewSuperior") if renames else None,
        started=entry.text("reqStart") or "",
        author=entry.text("reqAuthzID") or "",
    )


class _LogEntry:
    """The attributes of a log entry, by name without regard to case."""

    def __init__(self, dn: str, attributes: Mapping[str, Iterable[bytes]]) -> None:
        self._dn = dn
        self._values = {name.lower(): tuple(values) for name, values in attributes.items()}

    def values(self, name: str) -> tuple[bytes, ...]:
        return self._values.get(name.lower(), ())

    def text(self, name: str) -> str | None:
        values = self.values(name)
        if not values:
            return None
        try:
            return values[0].decode()
        except UnicodeDecodeError:
            raise self.error(f"{name} is not UTF-8") from None

    def required(self, name: str) -> str:
        text = self.text(name)
        if text is None:
            raise self.error(f"it has no {name}; the account may not be allowed to read it")
        return text

    def has_class(self, name: str) -> bool:
        return any(value.decode(errors="replace").lower() == name.lower() for value in self.values("objectClass"))

    def error(self, reason: str) -> AccesslogError:
        return AccesslogError(f"the access log entry {self._dn} cannot be read: {reason}")


def _read_steps(entry: _LogEntry) -> Iterator[AttributeChange]:
    """Group the lines of `reqMod` into the steps of the operation. A line without a value is a step of its own."""
    current: tuple[Step, str] | None = None
    values: list[bytes] = []
    for line in entry.values("reqMod"):
        step, value = (None, None) if line == b":" else _read_line(entry, line)
        if current is not None and (step != current or value is None or not values):
            yield AttributeChange(*current, tuple(values))
            values = []
        current = step
        if value is not None:
            values.append(value)
    if current is not None:
        yield AttributeChange(*current, tuple(values))


def _read_line(entry: _LogEntry, line: bytes) -> tuple[tuple[Step, str], bytes | None]:
    name, colon, rest = line.partition(b":")
    step = _STEPS.get(rest[:1])
    if not name or not colon or step is None or rest[1:2] not in {b"", b" "}:
        raise entry.error(f"unknown form of reqMod: {name[:100].decode(errors='replace')!r}{'' if colon else ' only'}")
    return (step, _attribute(entry, name)), rest[2:] if len(rest) > 1 else None


def _read_old(entry: _LogEntry) -> dict[str, tuple[bytes, ...]]:
    old: dict[str, tuple[bytes, ...]] = {}
    for line in entry.values("reqOld"):
        name, colon, value = line.partition(b":")
        if not colon or value[:1] not in {b"", b" "}:
            raise entry.error("unknown form of reqOld")
        attribute = _attribute(entry, name)
        old[attribute] = (*old.get(attribute, ()), value[1:])
    return old


def _attribute(entry: _LogEntry, name: bytes) -> str:
    try:
        return name.decode("ascii")
    except UnicodeDecodeError:
        raise entry.error("an attribute name is not ASCII") from None


def _content(entry: _LogEntry, steps: Iterable[AttributeChange]) -> dict[str, tuple[bytes, ...]]:
    content: dict[str, tuple[bytes, ...]] = {}
    for each in steps:
        if each.step is not Step.ADD:
            raise entry.error(f"an add with the step {each.step.value} on {each.attribute}")
        content[each.attribute] = (*content.get(each.attribute, ()), *each.values)
    return content


def _csn_in(steps: Iterable[AttributeChange]) -> str | None:
    return _last_value(steps, "entrycsn")


def _uuid_in(steps: Iterable[AttributeChange]) -> str | None:
    return _last_value(steps, "entryuuid")


def _last_value(steps: Iterable[AttributeChange], attribute: str) -> str | None:
    found = None
    for each in steps:
        if each.attribute.lower() == attribute and each.values:
            found = each.values[-1].decode(errors="replace")
    return found

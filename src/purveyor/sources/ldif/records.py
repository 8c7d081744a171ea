"""What an LDIF file says: a record is an entry as it is, or one change to an entry. Values are bytes, as in LDAP."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from purveyor.model.ldif_changes import Change, Step

Attributes: TypeAlias = Mapping[str, tuple[bytes, ...]]
"""Each attribute, as it was first spelled and with its options (`cn;lang-de`), and its values in order."""


@dataclass(frozen=True, slots=True)
class Modification:
    """One step of a modify."""

    step: Step
    attribute: str
    values: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Control:
    """An LDAP control that goes with a change."""

    oid: str
    critical: bool = False
    value: bytes | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """One record; which of the later fields have a meaning depends on `change`."""

    line: int
    """The line of the file on which it begins."""
    dn: str
    change: Change
    attributes: Attributes = field(default_factory=dict)
    modifications: tuple[Modification, ...] = ()
    new_rdn: str | None = None
    delete_old_rdn: bool | None = None
    new_superior: str | None = None
    controls: tuple[Control, ...] = ()
    raw: bytes = field(default=b"", compare=False, repr=False)
    """The lines it was read from, without those before its dn."""


@dataclass(frozen=True, slots=True)
class Broken:
    """Lines that are no record, and why."""

    line: int
    reason: str
    raw: bytes
    """The lines as they are; of a record above the size limit only the beginning."""
    size: int
    """How many bytes the lines have in full."""

"""The kinds of change in LDIF and of a live directory, and the records about a refresh, in the queue `ldif`.

A source writes them, the transform reads them. A module of its own, because sources and pipeline share it and must not
import each other.
"""

from dataclasses import dataclass
from enum import Enum


class Change(Enum):
    """The change type of a record. `moddn` is a synonym of `modrdn`."""

    CONTENT = "content"
    """No change: the record describes an entry."""
    ADD = "add"
    MODIFY = "modify"
    DELETE = "delete"
    MODRDN = "modrdn"


class Step(Enum):
    """The operation of a modification on an attribute."""

    ADD = "add"
    DELETE = "delete"
    """Delete the given values, or all values if none are given."""
    REPLACE = "replace"
    INCREMENT = "increment"
    """Add the one given number."""


class LiveChange(Enum):
    """What a source that follows a directory says beside the changes of LDIF."""

    REFRESH_BEGIN = "refresh-begin"
    """The source compares the directory with what it sent before."""
    ENTRY = "entry"
    """A whole entry as it is now: new, changed, renamed or moved."""
    GONE = "gone"
    """These entries, and no others, are deleted, or left the filter."""
    PRESENT = "present"
    """These entries are still there, as they were sent before."""
    REFRESH_END = "refresh-end"
    """The comparison is complete."""


@dataclass(frozen=True, slots=True)
class RefreshBegin:
    """A refresh begins, or begins again."""

    full: bool
    """Every entry of the directory follows: the source has no cookie, or its cookie is not valid any more."""


@dataclass(frozen=True, slots=True)
class Gone:
    """These entries are not in the directory any more, or not in its filter."""

    uuids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Present:
    """These entries are in the directory and unchanged."""

    uuids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RefreshEnd:
    """The refresh is complete."""

    remove_unseen: bool
    csns: tuple[str, ...] = ()
    """The directory's contextCSNs, such as `20261119041844.123456Z#000000#001#000000`."""

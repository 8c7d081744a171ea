"""The kinds of change in LDIF. A source writes them into the queue `ldif`, the transform reads them.

A module of its own, because sources and pipeline share it and must not import each other.
"""

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

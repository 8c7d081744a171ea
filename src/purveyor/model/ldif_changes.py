"""What a change to a directory is, in the words of LDIF: import writes it into the queue `ldif`, transform reads it."""

from enum import Enum


class Change(Enum):
    """What a record does. `moddn` is another word for `modrdn`."""

    CONTENT = "content"
    """Nothing: it tells how an entry is."""
    ADD = "add"
    MODIFY = "modify"
    DELETE = "delete"
    MODRDN = "modrdn"


class Step(Enum):
    """What a modification does to an attribute."""

    ADD = "add"
    DELETE = "delete"
    """Of the values given, or of all when none are."""
    REPLACE = "replace"
    INCREMENT = "increment"
    """By the one number given."""

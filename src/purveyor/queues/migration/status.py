"""Whether a queue can be used: what `ensure` answers, and every look at a migration."""

from enum import Enum


class QueueStatus(Enum):
    """Whether a queue can be used."""

    READY = "ready"
    NEEDS_MIGRATION = "needs migration"
    """It is there in a shape that cannot change in place; nothing was touched."""
    SEALED_FOR_MIGRATION = "sealed for migration"
    """A migration is under way: readers drain it, writers wait."""

"""How long things take and are kept, all in one place."""

from dataclasses import dataclass
from datetime import timedelta

from purveyor.model.errors import InvalidConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times of an application with stages; the defaults are for production."""

    ack_wait: timedelta = timedelta(seconds=30)
    """How long after a crash its messages come again."""
    grace: timedelta = timedelta(seconds=3)
    """How long the new owner of a stage in order waits after one that did not say goodbye, and may still be alive."""
    outbox_kept: timedelta = timedelta(days=7)
    """How long what was sent can be replayed."""
    inbox_kept: timedelta = timedelta(days=30)
    """How long a processed message is known at least: longer than any sender may be down before it sends again."""
    upkeep: timedelta = timedelta(minutes=1)
    """How often old rows are looked for."""

    def __post_init__(self) -> None:
        if self.inbox_kept < self.outbox_kept:
            raise InvalidConfig(
                f"the inbox is kept for {self.inbox_kept}, and the outbox, which can be replayed, for "
                f"{self.outbox_kept}",
                fix="keep the inbox at least as long as the outbox",
            )
        if self.ack_wait <= timedelta(0):
            raise InvalidConfig("ack_wait must be longer than nothing", fix="leave it at its default")

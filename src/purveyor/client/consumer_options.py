"""How a consumer works; and how long it waits before it tries again. Pure."""

import os
import random
import socket
import ssl
import uuid
from dataclasses import dataclass, field
from typing import Final

from purveyor.model.errors import InvalidInput

MOST_AT_ONCE: Final = 1000
LONGEST_WAIT_SECONDS: Final = 3600.0


def new_instance() -> str:
    """A name that no other process has: two that shared one would be given the same messages."""
    return f"{socket.gethostname()[:100]}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerOptions:
    """What is left out is good for most."""

    instance: str = field(default_factory=new_instance)
    """The name of this consumer among several of one subscription. Give one that a restart repeats, and it goes on at
    once after a crash; without, it has to wait until the lease of the one that crashed has run out."""
    batch: int = 100
    """So many messages are fetched at once, at most."""
    lease_seconds: float | None = None
    """For so long they are ours, and again while we work; None: as the subscription says."""
    wait_seconds: float = 30.0
    """So long one request waits for messages, before it is made again."""
    patience_seconds: float = 60.0
    """So long the API may be away before an acknowledgement fails. For new messages it is waited without end."""
    tls: ssl.SSLContext | None = None
    """For an API whose certificate the system does not know."""

    def __post_init__(self) -> None:
        if not 0 < len(self.instance) <= 200 or not self.instance.isprintable() or not self.instance.isascii():
            raise InvalidInput(f"invalid instance {self.instance[:40]!r}", fix="use 1 to 200 printable characters")
        if not 1 <= self.batch <= MOST_AT_ONCE:
            raise InvalidInput(f"a batch of {self.batch} messages", fix=f"give 1 to {MOST_AT_ONCE}")
        if not 0 < self.wait_seconds <= LONGEST_WAIT_SECONDS:
            raise InvalidInput(f"a wait of {self.wait_seconds:g} s", fix=f"give up to {LONGEST_WAIT_SECONDS:g}")


@dataclass(slots=True)
class Backoff:
    """Pauses between tries: longer each time up to a limit, spread so that many clients do not come back at once."""

    shortest: float = 0.1
    longest: float = 10.0
    _tries: int = 0

    def pause(self, at_least: float = 0.0) -> float:
        """The next pause, in seconds; at least as long as the server asked for."""
        longest = min(self.shortest * 2.0 ** min(self._tries, 20), self.longest)
        self._tries += 1
        return max(at_least, longest * (0.5 + random.random() / 2))  # noqa: S311 - only to get out of step


def retry_after(header: str | None) -> float:
    """What the server asks for, in seconds; a date, which ours does not send, counts as nothing.

    >>> retry_after("3"), retry_after(None), retry_after("Wed, 21 Oct 2026 07:28:00 GMT")
    (3.0, 0.0, 0.0)
    """
    return float(header) if header is not None and header.isdecimal() else 0.0

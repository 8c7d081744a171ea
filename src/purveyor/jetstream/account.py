"""What the server says about itself and about us: how much the account uses and may use, and what time it is there."""

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from purveyor.jetstream.api import Api
from purveyor.jetstream.codec import parse_time

if TYPE_CHECKING:
    from purveyor.jetstream.client import JetStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The use of JetStream by this account, and its limits; None: there is none."""

    storage: int
    streams: int
    consumers: int
    max_storage: int | None
    max_streams: int | None
    max_consumers: int | None


async def account(jetstream: "JetStream") -> Account:
    """Ask the server; SetupError if it has no JetStream."""
    found = await Api(jetstream.connection).ask("INFO")
    limits = found.get("limits") or {}
    return Account(
        storage=int(found.get("storage") or 0),
        streams=int(found.get("streams") or 0),
        consumers=int(found.get("consumers") or 0),
        max_storage=_limit(limits.get("max_storage")),
        max_streams=_limit(limits.get("max_streams")),
        max_consumers=_limit(limits.get("max_consumers")),
    )


def _limit(value: int | None) -> int | None:
    return None if value is None or value <= 0 else int(value)


async def clock_offset_seconds(jetstream: "JetStream", stream: str) -> float | None:
    """How far the server's clock is ahead of ours, to half the time of a question; None if it does not tell."""
    before = time.monotonic()
    found = await jetstream.streams.raw_info(stream)
    now, took = datetime.now(UTC), time.monotonic() - before
    there = parse_time(str(found.get("ts") or ""))
    return None if there is None else (there - now).total_seconds() + took / 2

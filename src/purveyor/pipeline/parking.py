"""Parks a message of `incoming` that a part of the pipeline cannot process, once for each position.

Such a letter is not written in the order of positions: a catch-up job can be ahead of the dispatcher, and a gap lies
behind it. On the same subject the dispatcher parks what is no event, and goes by the newest position there. So these
letters carry their position in a header of their own, and it is looked up among all letters whether one is there.
"""

import asyncio
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import ReadOptions, read_range
from purveyor.jetstream.headers import PARKED_POSITION, POSITION
from purveyor.model import metrics
from purveyor.model.event import SUBJECT
from purveyor.queues.catalogue import DEAD_LETTERS
from purveyor.queues.client import connect
from purveyor.queues.dead_letters.letter import DeadLetter, park, token
from purveyor.queues.dead_letters.store import SETTLED

ORIGIN: Final = SUBJECT
_EVERYTHING: Final = 2**62

_log = logging.getLogger(__name__)


def park_once(address: Address, message: Mapping[str, Any], reason: str) -> bool:
    """Park a message (position, subject, headers, data); False if a letter about its position was parked before.

    A letter that was put back or discarded since counts too. Two processes that park the same position at the same time
    write the same message id, so the server keeps one letter.
    """
    position = int(message["position"])
    if is_parked(address, position):
        _log.info("a dead letter about position %d is there already", position)
        return False
    now = datetime.now(UTC)
    letter = DeadLetter(
        reason=reason,
        origin=ORIGIN,
        subject=message["subject"],
        data=message["data"],
        failed_first=now,
        failed_last=now,
        headers={name: tuple(values) for name, values in message["headers"] or ()},
        position=position,
        out_of_order=True,
    )
    asyncio.run(_park(address, letter))
    metrics.DEAD_LETTERS.add(ORIGIN)
    _log.error("the message at position %d is parked as a dead letter: %s", position, reason)
    return True


def is_parked(address: Address, position: int) -> bool:
    """Whether there is a letter about a position of `incoming`, or the receipt of one."""
    word, wanted = token(ORIGIN), str(position)
    options = ReadOptions(subjects=(f"dead-letters.{word}", f"{SETTLED}.{word}.*"), columns=("headers",))
    for batch in read_range(address, DEAD_LETTERS.stream, 1, _EVERYTHING, options):
        headers = batch.column("headers")
        for name in (PARKED_POSITION, POSITION):
            found = pc.map_lookup(headers, pa.scalar(name), "first").drop_null().to_pylist()
            if any(values[:1] == [wanted] for values in found):
                return True
    return False


async def _park(address: Address, letter: DeadLetter) -> None:
    async with connect(address, name="purveyor-pipeline") as queues:
        await park(queues, letter)

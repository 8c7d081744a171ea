"""Let the server forget the ids of messages, as after its window of deduplication of two minutes."""

import asyncio
from uuid import uuid4

from purveyor.jetstream.address import Address
from purveyor.queues.client import Queues, connect
from tests.support.waiting import until

_WINDOW_NANOSECONDS = 100_000_000


async def forget_ids(queues: Queues, stream: str, subject: str) -> int:
    """Return when the server has forgotten every id in a stream; return how many sequences that took.

    The server does not say what it remembers, and may be late. It forgets ids in the order of their messages: so a
    probe that it stores a second time is proof for all before it. The probes are deleted. The window stays short.
    """
    await queues.streams.update(stream, {"duplicate_window": _WINDOW_NANOSECONDS})
    probe = f"probe-{uuid4()}"
    stored = [(await queues.publish(subject, b"probe", msg_id=probe)).sequence]

    async def is_forgotten() -> bool:
        receipt = await queues.publish(subject, b"probe", msg_id=probe)
        if not receipt.duplicate:
            stored.append(receipt.sequence)
        return not receipt.duplicate

    await until(is_forgotten, what=f"the server to forget the ids in {stream}")
    for sequence in stored:
        await queues.streams.delete_message(stream, sequence)
    return len(stored)


def forget_ids_now(address: Address, stream: str, subject: str) -> int:
    """Do the same where no event loop runs."""

    async def forget() -> int:
        async with connect(address, name="tests") as queues:
            return await forget_ids(queues, stream, subject)

    return asyncio.run(forget())

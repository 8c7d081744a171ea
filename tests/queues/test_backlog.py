"""The age of a queue counts what a reader has not processed, not what a durable keeps."""

from purveyor.model.event import LDIF_SUBJECT
from purveyor.queues.backlog import unread_since
from purveyor.queues.catalogue import RECEIPTS, incoming
from purveyor.queues.client import Queues, connect
from tests.support.nats_servers import OwnServer

STREAM = incoming().stream


async def _unread(queues: Queues) -> object:
    return (await unread_since(queues, await queues.streams.usage())).get(STREAM)


async def test_a_message_that_only_the_receipts_keep_has_no_age(own_server: OwnServer) -> None:
    async with connect(own_server().address) as queues:
        (await queues.ensure(incoming())).require_usable()
        for number in (1, 2):
            await queues.publish(LDIF_SUBJECT, b"%d" % number)
        first = await queues.streams.get(STREAM, 1)
        assert await _unread(queues) == first.timestamp
        for durable in {reader.durable for reader in incoming().readers} - {RECEIPTS}:
            for _ in (1, 2):  # a reader gets the next message when it has acknowledged one
                (message,) = await queues.fetch(STREAM, durable)
                await message.ack(confirm=True)
        assert (await queues.streams.info(STREAM)).state.messages == 2  # the receipts keep them
        assert await _unread(queues) is None
        await queues.publish(LDIF_SUBJECT, b"3")
        newest = await queues.streams.get(STREAM, 3)
        assert await _unread(queues) == newest.timestamp

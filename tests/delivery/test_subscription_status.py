"""The position of a queue is that of its newest message or of the last acknowledgement."""

from purveyor.delivery.subscription_status import backlogs, read_status
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.headers import POSITION
from purveyor.queues.client import Queues
from purveyor.queues.registry import ACKNOWLEDGED
from tests.support.delivery import definition


async def test_the_position_is_that_of_the_newest_message_or_acknowledgement(
    queues: Queues, subscriptions: Subscriptions
) -> None:
    record, _ = await subscriptions.add(definition())
    registry = await subscriptions.registry()
    found = await subscriptions.get("ox")
    empty = await read_status(queues, registry, found)
    assert (empty.position, empty.main, empty.prefill) == (None, 0, 0)

    for position in (5, 7):
        await queues.publish("ox.main", b"{}", headers={POSITION: str(position)})
    await queues.publish("ox.prefill", b"{}", headers={POSITION: "1"})
    written = await read_status(queues, registry, found)
    assert (written.position, written.main, written.prefill) == (7, 2, 1)
    assert (await backlogs(queues))["ox"] == 3

    acknowledged = await queues.bucket(ACKNOWLEDGED)
    await acknowledged.put("ox", f'{{"incarnation": "{record.incarnation}", "position": 7}}'.encode())
    await queues.streams.purge("stream:ox")
    assert (await read_status(queues, registry, found)).position == 7

    await queues.streams.remove("stream:ox")
    missing = await read_status(queues, registry, found)
    assert (missing.position, missing.main, missing.prefill) == (7, None, None)

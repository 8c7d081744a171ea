"""How far a queue was written is told by what lies in it, or by what was acknowledged there."""

from purveyor.delivery.subscription_status import backlogs, look
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.headers import POSITION
from purveyor.queues.client import Queues
from purveyor.queues.registry import ACKNOWLEDGED
from tests.delivery.conftest import definition


async def test_the_position_is_that_of_the_newest_message_or_acknowledgement(
    queues: Queues, subscriptions: Subscriptions
) -> None:
    record, _ = await subscriptions.add(definition())
    registry = await subscriptions.registry()
    found = await subscriptions.get("ox")
    empty = await look(queues, registry, found)
    assert (empty.position, empty.main, empty.prefill) == (None, 0, 0)

    for position in (5, 7):
        await queues.publish("ox.main", b"{}", headers={POSITION: str(position)})
    await queues.publish("ox.prefill", b"{}", headers={POSITION: "1"})
    written = await look(queues, registry, found)
    assert (written.position, written.main, written.prefill) == (7, 2, 1)
    assert (await backlogs(queues))["ox"] == 3

    acknowledged = await queues.bucket(ACKNOWLEDGED)
    await acknowledged.put("ox", f'{{"incarnation": "{record.incarnation}", "position": 7}}'.encode())
    await queues.streams.purge("stream:ox")
    assert (await look(queues, registry, found)).position == 7

    await queues.streams.remove("stream:ox")
    missing = await look(queues, registry, found)
    assert (missing.position, missing.main, missing.prefill) == (7, None, None)

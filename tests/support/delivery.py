"""Subscriptions, messages in their queues, and a clock that the test moves."""

import contextlib
import json
from typing import Any

from purveyor.delivery.pull import DeliveredMessage, PullService
from purveyor.jetstream.headers import POSITION
from purveyor.jetstream.streams import StoredMessage
from purveyor.model.delivery_policy import Delivery, OrderBy
from purveyor.model.errors import UnknownMessage
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.queues.client import Queues


def definition(name: str = "ox", *, topic: str = "users/user", prefill: bool = False) -> Subscription:
    return Subscription(name=name, realms_topics=(RealmTopic("udm", topic),), request_prefill=prefill)


async def stored(queues: Queues, stream: str) -> list[StoredMessage]:
    """Return all messages of a stream."""
    state = (await queues.streams.info(stream)).state
    sequences = range(state.first_seq, state.last_seq + 1) if state.messages else ()
    found: list[StoredMessage] = []
    for sequence in sequences:
        with contextlib.suppress(UnknownMessage):  # deleted
            found.append(await queues.streams.get(stream, sequence))
    return found


async def bodies(queues: Queues, stream: str) -> list[Any]:
    return [json.loads(message.data) for message in await stored(queues, stream)]


OX = "stream:ox"


class Clock:
    """A wall clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


def parallel(order_by: OrderBy | None = None, **more: Any) -> Subscription:
    topics = (RealmTopic("udm", "users/user"),)
    return Subscription(name="ox", realms_topics=topics, delivery=Delivery.PARALLEL, order_by=order_by, **more)


async def write(queues: Queues, *bodies: str, kind: str = "main", first: int = 2) -> list[int]:
    """Write messages as the dispatcher does, with positions from `first` on; return their sequences."""
    return [
        (await queues.publish(f"ox.{kind}", body.encode(), headers={POSITION: str(position)})).sequence
        for position, body in enumerate(bodies, first)
    ]


def texts(messages: list[DeliveredMessage]) -> list[str]:
    return [message.data.decode() for message in messages]


async def is_empty(queues: Queues) -> bool:
    return (await queues.streams.info(OX)).state.messages == 0


async def drain(pull: PullService, instance: str = "default") -> list[str]:
    got = []
    while (message := await pull.next("ox", instance)) is not None:
        got.append(message.data.decode())
        await pull.acknowledge("ox", message.sequence)
    return got

"""A test event to the endpoints of a push subscription: sent as push would send it, and told what came back.

It passes no queue and reaches no other subscriber. The endpoint knows it by its id, which begins with `test-`, and by
the attribute `purveyortest`.
"""

import asyncio
import contextlib
import time
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime

from purveyor.app.push_input import PushEdge
from purveyor.delivery.push.endpoint_sender import Health, Lane, Secrets
from purveyor.delivery.push.http_pool import Sender
from purveyor.delivery.push.retry_decision import Outcome
from purveyor.delivery.state import Kind
from purveyor.delivery.transitions import Delivered
from purveyor.jetstream.headers import EVENT_ID
from purveyor.model import json_fields
from purveyor.model.errors import InvalidInput
from purveyor.model.subscription import Subscription


@dataclass(frozen=True, slots=True)
class Tested:
    """What an endpoint answered."""

    url: str
    outcome: Outcome
    milliseconds: float
    accepted: bool


async def send_test(definition: Subscription, edge: PushEdge) -> list[Tested]:
    """Send one event to each endpoint; InvalidInput if there is none, or a secret cannot be had."""
    push = definition.push
    if push is None:
        raise InvalidInput(f"subscription {definition.name!r} is not pushed", fix="give it an endpoint first")
    needs_box = push.secret is not None or push.bearer_token is not None
    secrets = Secrets.open(push, edge.box()) if needs_box else Secrets((), (), 0.0, None)
    message = _event(definition)
    sender = Sender(edge.allowed)
    found = []
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(sender.close)
        for endpoint in push.targets:
            host = sender.host(endpoint)
            lane = Lane(endpoint, Health(), host)
            lane.adopt(definition.name, push, secrets)
            answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
            began = time.perf_counter()
            host.post(lane.request(message), push.ack_deadline_seconds, answer.set_result)
            outcome = await answer
            accepted = outcome.status is not None and push.ack_codes.acknowledges(outcome.status)
            found.append(Tested(endpoint.url, outcome, (time.perf_counter() - began) * 1000, accepted))
    return found


def _event(definition: Subscription) -> Delivered:
    wanted = definition.realms_topics[0]
    event = {
        "publisher_name": "purveyor-console",
        "ts": datetime.now(UTC).isoformat(),
        "realm": wanted.realm,
        "topic": wanted.topic,
        "body": {"old": {}, "new": {"id": "test", "text": "A test event from the console"}},
        "attributes": {"purveyortest": "true"},
    }
    return Delivered(
        sequence=0,
        position=None,
        kind=Kind.MAIN,
        data=json_fields.dump(event),
        headers={EVENT_ID: (f"test-{uuid.uuid4()}",)},
        num_delivered=1,
        lease=None,
        until=None,
    )

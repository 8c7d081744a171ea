"""A consumer and a publisher of the HTTP API, for programs in Python. They need the extra `client`."""

from purveyor.model.event import Event
from purveyor.model.extras import NeedsExtra

with NeedsExtra("purveyor.client (Consumer, Publisher)"):
    from purveyor.client.consumer import Consumer, ConsumerOptions
    from purveyor.client.leased_messages import Batch, Message
    from purveyor.client.publisher import (
        EventsRefused,
        Published,
        PublishedMany,
        Publisher,
        PublisherOptions,
        RefusedEvent,
    )

__all__ = [
    "Batch",
    "Consumer",
    "ConsumerOptions",
    "Event",
    "EventsRefused",
    "Message",
    "Published",
    "PublishedMany",
    "Publisher",
    "PublisherOptions",
    "RefusedEvent",
]

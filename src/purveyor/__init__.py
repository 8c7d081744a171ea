"""Purveyor: every change, to every subscriber, in order, once.

`Consumer`, `Publisher` and the types around them come from `purveyor.client`, which is imported at their first use.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from purveyor.client import (
        Batch,
        Consumer,
        ConsumerOptions,
        Event,
        EventsRefused,
        Message,
        Published,
        PublishedMany,
        Publisher,
        PublisherOptions,
        RefusedEvent,
    )

__version__ = "0.1.0"
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
    "__version__",
]


def __getattr__(name: str) -> object:
    if name.startswith("_") or name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "Event":  # the same class for a program that has no extra
        from purveyor.model.event import Event  # noqa: PLC0415

        return Event
    from purveyor import client  # noqa: PLC0415 - it needs aiohttp, which the queues do not

    return getattr(client, name)

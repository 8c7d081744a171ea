"""What all lines of a push worker share."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from purveyor.delivery.push.attempts import Attempts
from purveyor.delivery.push.counter import Counter
from purveyor.delivery.push.lane import Health
from purveyor.delivery.push.parked import ParkedKeys
from purveyor.delivery.push.sealing import SecretBox
from purveyor.delivery.push.sender import Sender
from purveyor.delivery.push.troubles import Troubles
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.queues.connection import Connection


@dataclass(frozen=True, slots=True, kw_only=True)
class Shop:
    """See the module."""

    connection: Connection
    counter: Counter
    subscriptions: Subscriptions
    sender: Sender
    attempts: Attempts
    parked: ParkedKeys
    troubles: Troubles
    box: SecretBox
    health: Callable[[str], Health]
    """Of an endpoint, by its URL."""
    tell: Callable[[str, str, str], None]
    """Of a subscription: what happened, in a word and in words."""
    openings: asyncio.Semaphore
    """So many lines look for messages for the first time at once."""

"""What all lines of a push worker share."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from purveyor.delivery.push.attempt_log import Attempts
from purveyor.delivery.push.blocked_keys import ParkedKeys
from purveyor.delivery.push.endpoint_sender import Health
from purveyor.delivery.push.http_pool import Sender
from purveyor.delivery.push.push_leases import Counter
from purveyor.delivery.push.push_problems import Troubles
from purveyor.delivery.push.secret_encryption import SecretBox
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.connection import Connection


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

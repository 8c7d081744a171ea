"""A consumer of the HTTP API, for programs in Python: `from purveyor import Consumer`. Needs the extra `client`."""

from purveyor.client.consumer import Consumer, ConsumerOptions
from purveyor.client.leased_messages import Batch, Message

__all__ = ["Batch", "Consumer", "ConsumerOptions", "Message"]

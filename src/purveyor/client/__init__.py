"""A consumer of the HTTP API, for programs in Python: `from purveyor import Consumer`. Needs the extra `client`."""

from purveyor.client.consumer import Consumer
from purveyor.client.consumer_messages import Batch, Message
from purveyor.client.consumer_options import ConsumerOptions

__all__ = ["Batch", "Consumer", "ConsumerOptions", "Message"]

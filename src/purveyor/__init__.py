"""Purveyor: every change, to every subscriber, in order, once.

`Consumer`, `ConsumerOptions`, `Message` and `Batch` come from `purveyor.client`, which is imported at their first use.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from purveyor.client import Batch, Consumer, ConsumerOptions, Message

__version__ = "0.1.0"
__all__ = ["Batch", "Consumer", "ConsumerOptions", "Message", "__version__"]


def __getattr__(name: str) -> object:
    if name.startswith("_") or name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from purveyor import client  # noqa: PLC0415 - it needs aiohttp, which the queues do not

    return getattr(client, name)

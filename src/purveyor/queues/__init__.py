"""Purveyor's queues on JetStream: the catalogue, `ensure`, the registry, dead letters, migration and permissions.

Names are imported when they are first used: `purveyor --help` does not load the client.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from purveyor.queues.catalogue import Queue, Reader, incoming, internal_queues, stage_queue, subscription_queue
    from purveyor.queues.client import Queues, connect
    from purveyor.queues.ensure import Ensured
    from purveyor.queues.migration.record import QueueStatus

_MODULES = {
    "catalogue": "Queue Reader incoming internal_queues stage_queue subscription_queue",
    "client": "Queues connect",
    "ensure": "Ensured",
    "migration.record": "QueueStatus",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)


__all__ = [
    "Ensured",
    "Queue",
    "QueueStatus",
    "Queues",
    "Reader",
    "connect",
    "incoming",
    "internal_queues",
    "stage_queue",
    "subscription_queue",
]

"""The embedded NATS server and its store."""

from purveyor.queues.server.binary import ServerBinary, find_server
from purveyor.queues.server.config import ServerOptions, ServerTls
from purveyor.queues.server.embedded import EmbeddedServer
from purveyor.queues.server.restarts import RestartPolicy
from purveyor.queues.server.store import running
from purveyor.queues.server.supervisor import EventKind, ServerEvent

__all__ = [
    "EmbeddedServer",
    "EventKind",
    "RestartPolicy",
    "ServerBinary",
    "ServerEvent",
    "ServerOptions",
    "ServerTls",
    "find_server",
    "running",
]

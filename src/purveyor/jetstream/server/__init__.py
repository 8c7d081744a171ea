"""The embedded NATS server and its store."""

from purveyor.jetstream.server.binary import ServerBinary, find_server
from purveyor.jetstream.server.config import ServerOptions, ServerTls
from purveyor.jetstream.server.embedded import EmbeddedServer
from purveyor.jetstream.server.restart_policy import RestartPolicy
from purveyor.jetstream.server.store_lock import running
from purveyor.jetstream.server.supervisor import EventKind, ServerEvent

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

"""The embedded NATS server and its store."""

from purveyor.jetstream.server.config import ServerOptions, ServerTls
from purveyor.jetstream.server.discovery import default_data_dir, discovery_environment, find_server_address
from purveyor.jetstream.server.embedded import EmbeddedServer
from purveyor.jetstream.server.files import find_running_server
from purveyor.jetstream.server.process import ServerBinary, find_server
from purveyor.jetstream.server.supervisor import EventKind, ServerEvent
from purveyor.model.retries import RestartPolicy

__all__ = [
    "EmbeddedServer",
    "EventKind",
    "RestartPolicy",
    "ServerBinary",
    "ServerEvent",
    "ServerOptions",
    "ServerTls",
    "default_data_dir",
    "discovery_environment",
    "find_running_server",
    "find_server",
    "find_server_address",
]

"""The fixture of a server with the queues of the pipeline."""

from tests.support.dispatch_world import world

__all__ = ["world"]

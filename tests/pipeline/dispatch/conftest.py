"""The fixture of a server with the queues of the pipeline."""

from tests.support.dispatch_harness import harness

__all__ = ["harness"]

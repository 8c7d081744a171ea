"""Dispatch: every event of `stream:incoming` into the queue of each subscription that asked for it, in order, once."""

from purveyor.pipeline.dispatch.dispatch_query import DispatchSettings, start_dispatch

__all__ = ["DispatchSettings", "start_dispatch"]

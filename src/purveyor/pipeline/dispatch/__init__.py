"""Dispatch: writes every event of `stream:incoming` to the queue of each subscription that gets it, in order, once."""

from purveyor.pipeline.dispatch.dispatch_query import DispatchSettings, start_dispatch

__all__ = ["DispatchSettings", "start_dispatch"]

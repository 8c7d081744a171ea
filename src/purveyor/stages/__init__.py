"""Transactional stages: message in, database work, messages out, as one. Inbox, outbox, flows of several stages."""

from purveyor.stages.application import Stages
from purveyor.stages.endpoint import Endpoint, Retry
from purveyor.stages.handler_types import Context, Goto, Next, Refuse, Reply, Request, Target
from purveyor.stages.sql_store import SqlStore

__all__ = [
    "Context",
    "Endpoint",
    "Goto",
    "Next",
    "Refuse",
    "Reply",
    "Request",
    "Retry",
    "SqlStore",
    "Stages",
    "Target",
]

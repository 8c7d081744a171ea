"""Transactional stages: message in, database work, messages out, as one. Inbox, outbox, flows of several stages.

Needs the extra `stages`.
"""

from purveyor.model.extras import NeedsExtra

with NeedsExtra("purveyor.stages"):
    from purveyor.stages.application import Stages
    from purveyor.stages.endpoint import Endpoint, Retry
    from purveyor.stages.handler_types import Context, Goto, Next, Refuse, Reply, Request, Target
    from purveyor.stages.sql_store import SqlStore
    from purveyor.stages.subscription_source import SubscriptionPull, SubscriptionSource

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
    "SubscriptionPull",
    "SubscriptionSource",
    "Target",
]

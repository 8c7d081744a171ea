"""Subscriptions with all that operators see of them: the JSON of `purveyor subscription`, and of `?details=true`."""

from datetime import UTC, datetime

from purveyor.app.json_views import replay_json, status_json
from purveyor.delivery.push.push_reports import PushProblem, read_problems
from purveyor.delivery.subscription_status import SubscriptionStatus, backlogs, read_status
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.model.json_fields import UPGRADE, Json
from purveyor.queues.client import Queues
from purveyor.queues.registry import Registered, Unreadable


async def read_all_details(subscriptions: Subscriptions, queues: Queues) -> list[Json]:
    """Return all subscriptions by name, then those whose records this program cannot read, each with its backlog."""
    snapshot, waiting = await subscriptions.list(), await backlogs(queues)
    found = sorted(snapshot.subscriptions.values(), key=lambda each: each.name)
    problems = await read_problems(queues, found)
    shown = [_registered_json(each, problems.get(each.name)) for each in found]
    shown += [_unreadable_json(each) for each in sorted(snapshot.unreadable.values(), key=lambda each: each.name)]
    return [{**each, "backlog": waiting.get(str(each["name"]))} for each in shown]


async def read_details(subscriptions: Subscriptions, queues: Queues, name: str) -> Json:
    """Return a subscription with its status, also one whose deletion was interrupted or whose record is unreadable."""
    registry = await subscriptions.registry()
    found = await registry.find(name)
    if isinstance(found, Unreadable):
        return _unreadable_json(found)
    return _details_json(await read_status(queues, registry, await registry.get(name)))


def _details_json(found: SubscriptionStatus) -> Json:
    return {
        **_registered_json(found.registered, found.push_problem),
        **status_json(found, datetime.now(UTC)),
    }


def _registered_json(found: Registered, push_problem: PushProblem | None) -> Json:
    record = found.record
    return {
        **record.definition.to_public_json(),
        "incarnation": record.incarnation,
        "state": record.state.value,
        "paused": record.paused,
        **({} if record.pause_reason is None else {"pause_reason": record.pause_reason}),
        **({} if push_problem is None else {"push_trouble": push_problem.to_json()}),
        "created": record.created.isoformat(),
        "begin": record.begin,
        "in_force_after": record.past[-1].until if record.past else None,
        "suspended": found.suspended.to_json() if found.suspended else None,
        "prefill": found.own_prefill.to_json() if found.own_prefill else None,
        "replay": replay_json(found.replay),
    }


def _unreadable_json(found: Unreadable) -> Json:
    return {
        "name": found.name,
        "incarnation": found.incarnation,
        "state": "unreadable",
        "unreadable": found.reason,
        "fix": UPGRADE,
        "begin": found.begin,
        "suspended": found.suspended.to_json() if found.suspended else None,
    }

"""A push worker that does not understand a record of a newer program stops one subscription and shows it."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from purveyor.delivery.push.push_reports import AttemptLog, attempts_bucket, read_problems
from purveyor.delivery.push.push_worker import PushWorker
from purveyor.jetstream.key_value import Bucket
from purveyor.model.delivery_policy import AfterDeadLetter, OrderBy
from purveyor.queues.registry import ACKNOWLEDGED, SUBSCRIPTIONS
from tests.support.push import Events, PushSubscription
from tests.support.waiting import until

Work = Callable[..., Awaitable[PushWorker]]
UNKNOWN = pytest.mark.parametrize("unknown", [{"version": 2}, {"zone": "eu"}], ids=["version", "field"])


async def attempts(pushed: PushSubscription) -> Bucket:
    return await pushed.queues.bucket(attempts_bucket(1))


async def make_newer(bucket: Bucket, key: str, unknown: dict[str, Any]) -> bytes:
    """Write a record as a newer program does; what it was before."""
    before = (await bucket.get(key)).value
    await bucket.put(key, json.dumps({**json.loads(before), **unknown}).encode())
    return before


async def trouble(pushed: PushSubscription) -> str:
    """Why it is not pushed, as a program tells that understands its record."""
    found = await pushed.subscriptions.get(pushed.name)
    stored = await read_problems(pushed.queues, [found])
    return stored[pushed.name].reason if pushed.name in stored else ""


@UNKNOWN
async def test_a_subscription_that_is_not_understood_is_not_pushed_until_it_is(
    pushed: PushSubscription, work: Work, events: Events, unknown: dict[str, Any]
) -> None:
    await pushed.add("/ok", order_by=OrderBy.POSITION)
    await pushed.write({}, {})
    await work()
    await pushed.drained()
    bucket = await pushed.queues.bucket(SUBSCRIPTIONS)
    understood = await make_newer(bucket, f"{pushed.name}.definition", unknown)
    await until(lambda: any(event == "unreadable" for _, event, _ in events))
    await pushed.write({}, {})
    kept = await attempts(pushed)

    async def noted() -> bool:
        entry = await kept.newest(f"{pushed.name}.trouble")
        return entry is not None and not entry.deleted and next(iter(unknown)).encode() in entry.value

    await until(noted)
    assert pushed.acked() == [1, 2]
    await bucket.put(f"{pushed.name}.definition", understood)
    await pushed.drained()
    assert pushed.acked() == [1, 2, 3, 4]
    assert await trouble(pushed) == ""


@UNKNOWN
async def test_a_delivery_state_that_is_not_understood_stops_the_push_and_says_so(
    pushed: PushSubscription, work: Work, unknown: dict[str, Any]
) -> None:
    await pushed.add("/ok", order_by=OrderBy.POSITION)
    await pushed.write({}, {})
    await work()
    await pushed.drained()
    books = await pushed.queues.bucket(ACKNOWLEDGED)
    understood = await make_newer(books, pushed.name, unknown)
    newer = await books.get(pushed.name)
    await pushed.write({}, {})

    async def says_so() -> bool:
        return next(iter(unknown)) in await trouble(pushed)

    await until(says_so)
    assert pushed.acked() == [1, 2]
    assert (await books.get(pushed.name)).revision == newer.revision
    await books.put(pushed.name, understood)
    await pushed.drained()
    assert pushed.acked() == [1, 2, 3, 4]


@UNKNOWN
async def test_blocked_keys_that_are_not_understood_stop_the_push_and_stay(
    pushed: PushSubscription, work: Work, unknown: dict[str, Any]
) -> None:
    await pushed.add("/ok", order_by=OrderBy.KEY, after_dead_letter=AfterDeadLetter.PARK_KEY)
    incarnation = (await pushed.subscriptions.get(pushed.name)).incarnation
    kept, key = await attempts(pushed), f"{pushed.name}.parked"
    parked = {"incarnation": incarnation, "keys": {"a": [10**9]}}  # a dead letter that is not there any more
    newer = json.dumps({**parked, **unknown}).encode()
    await kept.put(key, newer)
    await pushed.write({"uuid": "a"}, {"uuid": "b"})
    await work()

    async def says_so() -> bool:
        return next(iter(unknown)) in await trouble(pushed)

    await until(says_so)
    assert pushed.acked() == []
    assert (await kept.get(key)).value == newer
    await kept.put(key, json.dumps(parked).encode())
    await pushed.drained()
    assert sorted(pushed.acked()) == [1, 2]


@UNKNOWN
async def test_attempts_that_are_not_understood_stop_nothing_and_stay(
    pushed: PushSubscription, unknown: dict[str, Any]
) -> None:
    """They are notes for people."""
    await pushed.add("/ok")
    incarnation = (await pushed.subscriptions.get(pushed.name)).incarnation
    await AttemptLog(pushed.queues).append(pushed.name, incarnation, 7, 1, {"error": "first"})
    kept, key = await attempts(pushed), f"{pushed.name}.7"
    understood = await make_newer(kept, key, unknown)
    newer = await kept.get(key)
    older = AttemptLog(pushed.queues)
    await older.append(pushed.name, incarnation, 7, 2, {"error": "second"})
    assert await older.read(pushed.name, incarnation, 7) == []
    assert (await kept.get(key)).revision == newer.revision
    await kept.put(key, understood)
    await older.append(pushed.name, incarnation, 7, 3, {"error": "third"})
    assert [each["error"] for each in await older.read(pushed.name, incarnation, 7)] == ["first", "third"]


@UNKNOWN
async def test_a_problem_that_is_not_understood_is_shown_as_one(
    pushed: PushSubscription, unknown: dict[str, Any]
) -> None:
    await pushed.add("/ok")
    incarnation = (await pushed.subscriptions.get(pushed.name)).incarnation
    stored = {"incarnation": incarnation, "reason": "no secret", "since": "2026-01-01T00:00:00Z"}
    await (await attempts(pushed)).put(f"{pushed.name}.trouble", json.dumps({**stored, **unknown}).encode())
    assert next(iter(unknown)) in await trouble(pushed)
    await (await attempts(pushed)).put(f"{pushed.name}.trouble", json.dumps(stored).encode())
    assert await trouble(pushed) == "no secret"

"""A push worker that is older than the program that wrote a record stops one subscription, and says so."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from purveyor.delivery.push.attempt_log import AttemptLog, attempts_bucket
from purveyor.delivery.push.push_problems import read_problems
from purveyor.delivery.push.push_worker import PushWorker
from purveyor.jetstream.key_value import Bucket
from purveyor.model.delivery_policy import OrderBy
from purveyor.model.push_config import AfterDeadLetter
from purveyor.queues.registry import ACKNOWLEDGED, SUBSCRIPTIONS
from tests.support.push import Desk, Told
from tests.support.waiting import until

Work = Callable[..., Awaitable[PushWorker]]
UNKNOWN = pytest.mark.parametrize("unknown", [{"version": 2}, {"zone": "eu"}], ids=["version", "field"])


async def attempts(desk: Desk) -> Bucket:
    return await desk.queues.bucket(attempts_bucket(1))


async def make_newer(bucket: Bucket, key: str, unknown: dict[str, Any]) -> bytes:
    """Write a record as a newer program does; what it was before."""
    before = (await bucket.get(key)).value
    await bucket.put(key, json.dumps({**json.loads(before), **unknown}).encode())
    return before


async def trouble(desk: Desk) -> str:
    """Why it is not pushed, as a program tells that understands its record."""
    found = await desk.subscriptions.get(desk.name)
    told = await read_problems(desk.queues, [found])
    return told[desk.name].reason if desk.name in told else ""


@UNKNOWN
async def test_a_subscription_that_is_not_understood_is_not_pushed_until_it_is(
    desk: Desk, work: Work, told: Told, unknown: dict[str, Any]
) -> None:
    await desk.add("/ok", order_by=OrderBy.POSITION)
    await desk.write({}, {})
    await work()
    await desk.drained()
    bucket = await desk.queues.bucket(SUBSCRIPTIONS)
    understood = await make_newer(bucket, f"{desk.name}.definition", unknown)
    await until(lambda: any(event == "unreadable" for _, event, _ in told))
    await desk.write({}, {})
    kept = await attempts(desk)

    async def noted() -> bool:
        entry = await kept.newest(f"{desk.name}.trouble")
        return entry is not None and not entry.deleted and next(iter(unknown)).encode() in entry.value

    await until(noted)
    assert desk.acked() == [1, 2]
    await bucket.put(f"{desk.name}.definition", understood)
    await desk.drained()
    assert desk.acked() == [1, 2, 3, 4]
    assert await trouble(desk) == ""


@UNKNOWN
async def test_a_delivery_state_that_is_not_understood_stops_the_push_and_says_so(
    desk: Desk, work: Work, unknown: dict[str, Any]
) -> None:
    await desk.add("/ok", order_by=OrderBy.POSITION)
    await desk.write({}, {})
    await work()
    await desk.drained()
    books = await desk.queues.bucket(ACKNOWLEDGED)
    understood = await make_newer(books, desk.name, unknown)
    newer = await books.get(desk.name)
    await desk.write({}, {})

    async def says_so() -> bool:
        return next(iter(unknown)) in await trouble(desk)

    await until(says_so)
    assert desk.acked() == [1, 2]
    assert (await books.get(desk.name)).revision == newer.revision
    await books.put(desk.name, understood)
    await desk.drained()
    assert desk.acked() == [1, 2, 3, 4]


@UNKNOWN
async def test_blocked_keys_that_are_not_understood_stop_the_push_and_stay(
    desk: Desk, work: Work, unknown: dict[str, Any]
) -> None:
    await desk.add("/ok", order_by=OrderBy.KEY, after_dead_letter=AfterDeadLetter.PARK_KEY)
    incarnation = (await desk.subscriptions.get(desk.name)).incarnation
    kept, key = await attempts(desk), f"{desk.name}.parked"
    parked = {"incarnation": incarnation, "keys": {"a": [10**9]}}  # a dead letter that is not there any more
    newer = json.dumps({**parked, **unknown}).encode()
    await kept.put(key, newer)
    await desk.write({"uuid": "a"}, {"uuid": "b"})
    await work()

    async def says_so() -> bool:
        return next(iter(unknown)) in await trouble(desk)

    await until(says_so)
    assert desk.acked() == []
    assert (await kept.get(key)).value == newer
    await kept.put(key, json.dumps(parked).encode())
    await desk.drained()
    assert sorted(desk.acked()) == [1, 2]


@UNKNOWN
async def test_attempts_that_are_not_understood_stop_nothing_and_stay(desk: Desk, unknown: dict[str, Any]) -> None:
    """They are notes for people."""
    await desk.add("/ok")
    incarnation = (await desk.subscriptions.get(desk.name)).incarnation
    await AttemptLog(desk.queues).append(desk.name, incarnation, 7, 1, {"error": "first"})
    kept, key = await attempts(desk), f"{desk.name}.7"
    understood = await make_newer(kept, key, unknown)
    newer = await kept.get(key)
    older = AttemptLog(desk.queues)
    await older.append(desk.name, incarnation, 7, 2, {"error": "second"})
    assert await older.read(desk.name, incarnation, 7) == []
    assert (await kept.get(key)).revision == newer.revision
    await kept.put(key, understood)
    await older.append(desk.name, incarnation, 7, 3, {"error": "third"})
    assert [each["error"] for each in await older.read(desk.name, incarnation, 7)] == ["first", "third"]


@UNKNOWN
async def test_a_problem_that_is_not_understood_is_told_as_one(desk: Desk, unknown: dict[str, Any]) -> None:
    await desk.add("/ok")
    incarnation = (await desk.subscriptions.get(desk.name)).incarnation
    told = {"incarnation": incarnation, "reason": "no secret", "since": "2026-01-01T00:00:00Z"}
    await (await attempts(desk)).put(f"{desk.name}.trouble", json.dumps({**told, **unknown}).encode())
    assert next(iter(unknown)) in await trouble(desk)
    await (await attempts(desk)).put(f"{desk.name}.trouble", json.dumps(told).encode())
    assert await trouble(desk) == "no secret"

"""Every message of a push subscription reaches its endpoint, or becomes a dead letter: whatever the endpoint does."""

import asyncio
import dataclasses
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from purveyor.delivery import transitions
from purveyor.delivery.push.push_leases import BlockedKeys, PushLeases
from purveyor.delivery.push.push_reports import AttemptLog, read_problems
from purveyor.delivery.push.push_worker import PushWorker
from purveyor.delivery.state_writer import SharedServices
from purveyor.delivery.subscription_status import read_status
from purveyor.model.delivery_policy import AckCodes, AfterDeadLetter, OrderBy, RetryPolicy
from purveyor.model.registration import RecordState
from purveyor.queues.catalogue import DEAD_LETTERS
from tests.support.push import SWIFT, Events, PushSubscription
from tests.support.waiting import until

Work = Callable[..., Awaitable[PushWorker]]
TWICE = RetryPolicy(max_attempts=2, min_backoff_seconds=0.01, max_backoff_seconds=0.02)


async def test_messages_arrive_with_their_id_and_attempt_and_leave_the_queue(
    pushed: PushSubscription, work: Work
) -> None:
    await pushed.add("/ok")
    await pushed.write(*({"uuid": f"u{number}"} for number in range(40)))
    await work()
    await pushed.drained()
    assert sorted(pushed.acked()) == list(range(1, 41))
    first = pushed.seen()[0]
    body = json.loads(first["body"])
    assert body["subscription"] == pushed.name
    assert body["deliveryAttempt"] == 1
    assert first["headers"]["webhook-id"] == body["message"]["messageId"]


async def test_a_message_that_comes_to_an_idle_worker_is_pushed_at_once(pushed: PushSubscription, work: Work) -> None:
    await work()
    await pushed.add("/ok")
    for number in (1, 2):
        await pushed.write({})
        await until(lambda number=number: len(pushed.acked()) == number)  # type: ignore[misc]
    await pushed.drained()


@pytest.mark.parametrize("path", ["/status/200", "/status/201", "/status/202", "/status/204", "/status/102", "/stream"])
async def test_these_answers_acknowledge(pushed: PushSubscription, work: Work, path: str) -> None:
    await pushed.add(path)
    await pushed.write({}, {})
    await work()
    await pushed.drained()
    assert len(pushed.seen()) == 2


@pytest.mark.parametrize("path", ["/until-close", "/notice", "/drop", "/long", "/endless"])
async def test_an_answer_counts_by_its_status_however_it_ends(pushed: PushSubscription, work: Work, path: str) -> None:
    await pushed.add(path)
    await pushed.write({})
    await work()
    await pushed.drained()
    assert len(pushed.seen()) == 1


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/hang", "not whole within"),
        ("/close", "no answer"),
        ("/short", "before the answer was whole"),
        ("/redirect", "status 302"),
        ("/garbage", "not an HTTP answer"),
        ("/slow/5", "no answer within"),
        ("/status/206", "status 206: said status"),
        ("/status/400", "status 400"),
        ("/status/500", "status 500"),
    ],
)
async def test_anything_else_is_tried_again_and_then_a_dead_letter(
    pushed: PushSubscription, work: Work, path: str, words: str
) -> None:
    await pushed.add(path, retry=TWICE, ack_deadline_seconds=3 if "within" in words else 60)
    await pushed.write({})
    await work()
    await pushed.drained()
    (letter,) = await pushed.letters()
    assert words in letter.reason
    assert letter.attempts == 2
    log = json.loads(str(letter.details["attempts_log"]))
    assert [set(each) for each in log] == [{"time", "status", "error", "excerpt"}] * 2
    assert json.loads(letter.data)["body"]["new"]["n"] == 1


async def test_all_of_2xx_acknowledge_if_that_is_asked_for(pushed: PushSubscription, work: Work) -> None:
    await pushed.add("/status/299", ack_codes=AckCodes.ALL)
    await pushed.write({})
    await work()
    await pushed.drained()
    assert not await pushed.letters()


async def test_410_pauses_the_subscription_with_a_reason_and_keeps_its_messages(
    pushed: PushSubscription, work: Work, events: Events
) -> None:
    await pushed.add("/status/410", retry=TWICE)
    await pushed.write({}, {}, {})
    await work()

    async def paused() -> bool:
        return (await pushed.subscriptions.get(pushed.name)).record.paused

    await until(paused)
    record = (await pushed.subscriptions.get(pushed.name)).record
    assert record.pause_reason is not None
    assert "410" in record.pause_reason
    assert await pushed.waiting() == 3
    assert not await pushed.letters()
    resumed = await pushed.subscriptions.resume(pushed.name)
    assert resumed.pause_reason is None


async def test_retry_after_is_obeyed(pushed: PushSubscription, work: Work) -> None:
    await pushed.add("/script?retry-after=1")
    await pushed.write({"script": [503]})
    await work()
    await pushed.drained()
    one, two = pushed.seen()
    assert (one["status"], two["status"]) == (503, 204)
    apart = int(two["headers"]["webhook-timestamp"]) - int(one["headers"]["webhook-timestamp"])
    assert apart >= 1


async def test_order_by_key_is_kept_through_retries_while_other_keys_go_on(
    pushed: PushSubscription, work: Work
) -> None:
    await pushed.add("/script", order_by=OrderBy.KEY)
    for number in range(12):
        failures = [500] * (number % 3)
        await pushed.write(*({"uuid": key, "script": failures} for key in ("a", "b", "c", "d")))
    await work()
    await pushed.drained()
    acked = [each for each in pushed.seen() if each["status"] == 204]
    for key in ("a", "b", "c", "d"):
        numbers = [each["n"] for each in acked if each["key"] == key]
        assert numbers == sorted(numbers)
        assert len(numbers) == 12


async def test_strict_order_is_kept_through_retries(pushed: PushSubscription, work: Work) -> None:
    await pushed.add("/script", order_by=OrderBy.POSITION)
    await pushed.write(*({"script": [500] if number % 7 == 3 else []} for number in range(30)))
    await work()
    await pushed.drained()
    assert pushed.acked() == list(range(1, 31))
    failed = [each["n"] for each in pushed.seen() if each["status"] == 500]
    assert failed == [number + 1 for number in range(30) if number % 7 == 3]


async def test_in_strict_order_a_message_that_fails_for_good_is_parked_and_the_next_goes_on(
    pushed: PushSubscription, work: Work
) -> None:
    await pushed.add("/script", order_by=OrderBy.POSITION, retry=TWICE)
    await pushed.write({}, {"script": [500] * 9}, {}, {})
    await work()
    await pushed.drained()
    assert pushed.acked() == [1, 3, 4]
    assert [json.loads(each.data)["body"]["new"]["n"] for each in await pushed.letters()] == [2]


async def test_several_endpoints_share_the_messages(pushed: PushSubscription, work: Work) -> None:
    await pushed.add("/slow/0.005?at=a", "/slow/0.005?at=b")
    await pushed.write(*({} for _ in range(60)))
    await work()
    await pushed.drained()
    assert sorted(pushed.acked()) == list(range(1, 61))
    assert {each["path"].split("at=")[1][0] for each in pushed.seen()} == {"a", "b"}


async def test_a_dead_endpoint_beside_a_good_one_loses_nothing(pushed: PushSubscription, work: Work) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{closed.getsockname()[1]}/"
        await pushed.add(urls=(dead, pushed.site.url(f"/ok?for={pushed.name}")))
        await pushed.write(*({} for _ in range(30)))
        await work()
        await pushed.drained()
    assert sorted(pushed.acked()) == list(range(1, 31))


async def test_while_an_endpoint_is_down_no_attempts_are_spent(
    pushed: PushSubscription, work: Work, events: Events
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{closed.getsockname()[1]}/"
        retry = RetryPolicy(max_attempts=3, min_backoff_seconds=0.01, max_backoff_seconds=0.02)
        await pushed.add(urls=(dead,), retry=retry)
        await pushed.write(*({} for _ in range(100)))
        worker = await work()
        await until(lambda: any(event == "down" for _, event, _ in events))
        # Two probes more: connections are tried, messages are not.
        (pusher, _) = worker._pushers[pushed.name]
        sender = pusher._endpoints._senders[0]
        await until(lambda: sender.health.breaker.openings >= 2)
    assert await pushed.waiting() + len(await pushed.letters()) == 100
    assert len(await pushed.letters()) < 10


async def test_the_window_grows_until_many_are_under_way(pushed: PushSubscription, work: Work) -> None:
    await pushed.add("/slow/0.05")
    await pushed.write(*({} for _ in range(300)))
    worker = await work()
    await pushed.drained()
    (pusher, _) = worker._pushers[pushed.name]
    assert pusher._endpoints.window > 32
    assert sorted(pushed.acked()) == list(range(1, 301))


async def test_a_host_gets_no_more_connections_than_it_may(pushed: PushSubscription, work: Work) -> None:
    await pushed.add("/slow/0.01")
    await pushed.write(*({} for _ in range(60)))
    worker = await work(per_host=3)
    most = 0

    async def gone() -> bool:
        nonlocal most
        most = max(most, *(len(host._connections) for host in worker._http._hosts.values()), 0)
        return await pushed.waiting() == 0

    await until(gone)
    assert 0 < most <= 3
    assert sorted(pushed.acked()) == list(range(1, 61))


async def test_a_change_takes_effect_at_once(pushed: PushSubscription, work: Work) -> None:
    await pushed.add("/status/500", retry=SWIFT)
    await pushed.write({})
    await work()
    await until(lambda: len(pushed.seen()) > 1)

    def better(now: Any) -> Any:
        push = dataclasses.replace(now.push, endpoints=(pushed.site.url(f"/ok?for={pushed.name}"),))
        return dataclasses.replace(now, push=push)

    await pushed.subscriptions.redefine(pushed.name, better)
    await pushed.drained()
    assert pushed.seen()[-1]["status"] == 204


async def test_paused_nothing_is_sent_and_resumed_it_goes_on(pushed: PushSubscription, work: Work) -> None:
    await pushed.add("/ok")
    await pushed.subscriptions.pause(pushed.name)
    await pushed.write({}, {})
    worker = await work()
    assert pushed.name not in worker._pushers
    await pushed.subscriptions.resume(pushed.name)
    await pushed.drained()
    assert sorted(pushed.acked()) == [1, 2]


async def test_an_address_that_is_not_allowed_is_never_reached(
    pushed: PushSubscription, work: Work, events: Events
) -> None:
    await pushed.add("/ok", retry=TWICE)
    await pushed.write({})
    await work(allowed=())
    await until(lambda: any(event == "refused" for _, event, _ in events))
    assert "PURVEYOR_PUSH_ALLOW" in events[0][2]
    assert await pushed.waiting() == 1
    assert not pushed.seen()
    await until(lambda: _is_shown(pushed, "127.0.0.1 is not a public address"))


async def test_the_reason_is_shown_until_the_cause_is_gone_and_no_attempt_is_spent(
    pushed: PushSubscription, work: Work
) -> None:
    await pushed.add("/ok", retry=TWICE, secret="env:PURVEYOR_PUSH_SECRET_NONE")
    await pushed.write({})
    await work()
    await until(lambda: _is_shown(pushed, "PURVEYOR_PUSH_SECRET_NONE is not set"))
    await pushed.change(secret=None, endpoints=("http://10.0.0.1/", "http://10.0.0.2/"))
    await until(lambda: _is_shown(pushed, "10.0.0.2"))
    found = await pushed.subscriptions.get(pushed.name)
    overview = await read_status(pushed.queues, await pushed.subscriptions.registry(), found)
    assert overview.push_problem is not None
    assert "SECRET" not in overview.push_problem.reason
    assert found.record.state is RecordState.ACTIVE
    await pushed.subscriptions.pause(pushed.name)  # then that is the reason
    await until(lambda: _is_shown(pushed, None))
    await pushed.subscriptions.resume(pushed.name)
    await until(lambda: _is_shown(pushed, "10.0.0.1"))
    await pushed.change(endpoints=(pushed.site.url(f"/ok?for={pushed.name}"),))
    await pushed.drained()
    await until(lambda: _is_shown(pushed, None))
    assert [json.loads(each["body"])["deliveryAttempt"] for each in pushed.seen()] == [1]
    assert not await pushed.letters()


async def _is_shown(pushed: PushSubscription, words: str | None) -> bool:
    """Return whether the status shows this reason; None: no reason."""
    found = await pushed.subscriptions.get(pushed.name)
    other = dataclasses.replace(
        found,
        record=dataclasses.replace(found.record, definition=dataclasses.replace(found.record.definition, name="o")),
    )
    trouble = (await read_problems(pushed.queues, [found])).get(pushed.name)
    if trouble != (await read_problems(pushed.queues, [found, other])).get(pushed.name):
        return False  # events just now
    return trouble is None if words is None else trouble is not None and words in trouble.reason


async def test_a_missing_secret_stops_one_subscription_and_shows_it(
    pushed: PushSubscription, work: Work, events: Events
) -> None:
    await pushed.add("/ok", secret="env:PURVEYOR_PUSH_SECRET_NONE")
    await pushed.write({})
    await work()
    await until(lambda: any(event == "stuck" for _, event, _ in events))
    assert "PURVEYOR_PUSH_SECRET_NONE is not set" in events[0][2]
    assert not pushed.seen()


async def test_a_variable_that_is_not_allowed_stops_one_subscription_and_shows_it(
    pushed: PushSubscription, work: Work
) -> None:
    """As a definition of an older version may name it; the endpoint gets nothing of it."""
    await pushed.add("/ok", bearer_token="env:PATH")
    await pushed.write({})
    await work()
    await until(lambda: _is_shown(pushed, "PATH is not allowed as a secret of push"))
    assert not pushed.seen()
    await pushed.change(bearer_token=None)
    await pushed.drained()
    assert not any("authorization" in each["headers"] for each in pushed.seen())


async def test_two_workers_share_the_work_and_each_message_is_sent_once(pushed: PushSubscription, work: Work) -> None:
    await pushed.add("/slow/0.01", order_by=OrderBy.KEY)
    await pushed.write(*({"uuid": f"u{number % 20}"} for number in range(200)))
    one, two = await asyncio.gather(work(), work())
    await pushed.drained()
    assert sorted(pushed.acked()) == list(range(1, 201))
    for key in {each["key"] for each in pushed.seen()}:
        numbers = [each["n"] for each in pushed.seen() if each["key"] == key]
        assert numbers == sorted(numbers)
    assert one._services.leases.instance != two._services.leases.instance


async def test_a_worker_that_stops_leaves_no_lease_behind(pushed: PushSubscription, work: Work) -> None:
    await pushed.add("/slow/0.3", order_by=OrderBy.POSITION)
    await pushed.write(*({} for _ in range(20)))
    first = await work()
    await until(lambda: bool(pushed.seen()))
    (pusher, task) = first._pushers[pushed.name]
    pusher.stop()
    await task
    state = await (await first._services.leases._pull.state_writer(pushed.name)).current()
    assert not state.leases
    assert all(count == 0 for count in state.delivery_counts.values())


async def test_by_policy_a_message_that_only_crashes_used_up_parks_the_later_messages_of_its_key_too(
    pushed: PushSubscription, work: Work
) -> None:
    await pushed.add("/ok", order_by=OrderBy.KEY, retry=TWICE, after_dead_letter=AfterDeadLetter.PARK_KEY)
    await pushed.write({"uuid": "a"}, {"uuid": "a"}, {"uuid": "b"})
    attempts, keys = AttemptLog(pushed.queues), BlockedKeys(pushed.queues)
    for number in range(2):
        async with SharedServices.build(pushed.queues) as shared:
            leases = PushLeases(shared, attempts, keys, instance=f"killed-{number}")
            await until(lambda leases=leases: _has_leased(leases, pushed.name))  # type: ignore[misc]
    await asyncio.gather(work(), work())
    await pushed.drained()
    assert pushed.acked() == [3]
    used_up, later = await pushed.letters()
    assert [json.loads(each.data)["body"]["new"]["n"] for each in (used_up, later)] == [1, 2]
    assert (used_up.reason, used_up.attempts) == ("not acknowledged after 2 deliveries", 2)
    events = [each["error"] for each in json.loads(str(used_up.details["attempts_log"]))]
    assert events == [f"the lease of instance 'killed-{number}' expired" for number in range(2)]
    assert "parked with an earlier message about 'a'" in later.reason


async def _has_leased(leases: PushLeases, name: str) -> bool:
    """Lease one message and never settle it, as a worker that is killed."""
    found, _ = await leases.lease(name, 1, 0.1)
    return [each.data for each in found.messages if b'"n": 1,' in each.data] != []


async def test_by_policy_the_later_messages_of_a_key_are_parked_until_its_dead_letters_are_resolved(
    pushed: PushSubscription, work: Work
) -> None:
    await pushed.add("/script", order_by=OrderBy.KEY, retry=TWICE, after_dead_letter=AfterDeadLetter.PARK_KEY)
    await pushed.write({"uuid": "a"}, {"uuid": "a", "script": [500] * 9}, {"uuid": "b"}, {"uuid": "a"}, {"uuid": "b"})
    await asyncio.gather(work(), work())
    await pushed.drained()
    assert sorted(pushed.acked()) == [1, 3, 5]
    await pushed.write({"uuid": "a"}, {"uuid": "b"})
    await pushed.drained()
    assert sorted(pushed.acked()) == [1, 3, 5, 7]
    letters = await pushed.letters()
    assert [json.loads(each.data)["body"]["new"]["n"] for each in letters] == [2, 4, 6]
    assert "parked with an earlier message about 'a'" in letters[1].reason
    for sequence in await pushed.letter_sequences():
        await pushed.queues.streams.delete_message(DEAD_LETTERS.stream, sequence)
    await pushed.write({"uuid": "a"})
    await pushed.drained()
    assert pushed.acked()[-1] == 8


async def test_messages_of_many_bytes_are_taken_in_several_leases(
    pushed: PushSubscription, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than one lease may hold: each holds some of them, and all arrive."""
    monkeypatch.setattr(transitions, "MAX_LEASE_BYTES", 100_000)
    await pushed.add("/ok")
    await pushed.write(*({"filling": "x" * 40_000} for _ in range(30)))
    await work()
    await pushed.drained()
    assert sorted(pushed.acked()) == list(range(1, 31))

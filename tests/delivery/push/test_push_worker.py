"""Every message of a push subscription reaches its endpoint, or becomes a dead letter: whatever the endpoint does."""

import asyncio
import dataclasses
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from purveyor.delivery import transitions
from purveyor.delivery.push.attempt_log import AttemptLog
from purveyor.delivery.push.blocked_keys import BlockedKeys
from purveyor.delivery.push.push_leases import PushLeases
from purveyor.delivery.push.push_problems import read_problems
from purveyor.delivery.push.push_worker import PushWorker
from purveyor.delivery.state_writer import SharedServices
from purveyor.delivery.subscription_status import read_status
from purveyor.model.delivery_policy import OrderBy, RetryPolicy
from purveyor.model.push_config import AckCodes, AfterDeadLetter
from purveyor.model.registration import RecordState
from purveyor.queues.catalogue import DEAD_LETTERS
from tests.support.push import SWIFT, Desk, Told
from tests.support.waiting import until

Work = Callable[..., Awaitable[PushWorker]]
TWICE = RetryPolicy(max_attempts=2, min_backoff_seconds=0.01, max_backoff_seconds=0.02)


async def test_messages_arrive_with_their_id_and_attempt_and_leave_the_queue(desk: Desk, work: Work) -> None:
    await desk.add("/ok")
    await desk.write(*({"uuid": f"u{number}"} for number in range(40)))
    await work()
    await desk.drained()
    assert sorted(desk.acked()) == list(range(1, 41))
    first = desk.seen()[0]
    body = json.loads(first["body"])
    assert body["subscription"] == desk.name
    assert body["deliveryAttempt"] == 1
    assert first["headers"]["webhook-id"] == body["message"]["messageId"]


async def test_a_message_that_comes_to_an_idle_worker_is_pushed_at_once(desk: Desk, work: Work) -> None:
    await work()
    await desk.add("/ok")
    for number in (1, 2):
        await desk.write({})
        await until(lambda number=number: len(desk.acked()) == number)  # type: ignore[misc]
    await desk.drained()


@pytest.mark.parametrize("path", ["/status/200", "/status/201", "/status/202", "/status/204", "/status/102", "/stream"])
async def test_these_answers_acknowledge(desk: Desk, work: Work, path: str) -> None:
    await desk.add(path)
    await desk.write({}, {})
    await work()
    await desk.drained()
    assert len(desk.seen()) == 2


@pytest.mark.parametrize("path", ["/until-close", "/notice", "/drop", "/long", "/endless"])
async def test_an_answer_counts_by_its_status_however_it_ends(desk: Desk, work: Work, path: str) -> None:
    await desk.add(path)
    await desk.write({})
    await work()
    await desk.drained()
    assert len(desk.seen()) == 1


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
    desk: Desk, work: Work, path: str, words: str
) -> None:
    await desk.add(path, retry=TWICE, ack_deadline_seconds=1 if "within" in words else 60)
    await desk.write({})
    await work()
    await desk.drained()
    (letter,) = await desk.letters()
    assert words in letter.reason
    assert letter.attempts == 2
    log = json.loads(str(letter.details["attempts_log"]))
    assert [set(each) for each in log] == [{"time", "status", "error", "excerpt"}] * 2
    assert json.loads(letter.data)["body"]["new"]["n"] == 1


async def test_all_of_2xx_acknowledge_if_that_is_asked_for(desk: Desk, work: Work) -> None:
    await desk.add("/status/299", ack_codes=AckCodes.ALL)
    await desk.write({})
    await work()
    await desk.drained()
    assert not await desk.letters()


async def test_410_pauses_the_subscription_with_a_reason_and_keeps_its_messages(
    desk: Desk, work: Work, told: Told
) -> None:
    await desk.add("/status/410", retry=TWICE)
    await desk.write({}, {}, {})
    await work()

    async def paused() -> bool:
        return (await desk.subscriptions.get(desk.name)).record.paused

    await until(paused)
    record = (await desk.subscriptions.get(desk.name)).record
    assert record.pause_reason is not None
    assert "410" in record.pause_reason
    assert await desk.waiting() == 3
    assert not await desk.letters()
    resumed = await desk.subscriptions.resume(desk.name)
    assert resumed.pause_reason is None


async def test_retry_after_is_obeyed(desk: Desk, work: Work) -> None:
    await desk.add("/script?retry-after=1")
    await desk.write({"script": [503]})
    await work()
    await desk.drained()
    one, two = desk.seen()
    assert (one["status"], two["status"]) == (503, 204)
    apart = int(two["headers"]["webhook-timestamp"]) - int(one["headers"]["webhook-timestamp"])
    assert apart >= 1


async def test_order_by_key_is_kept_through_retries_while_other_keys_go_on(desk: Desk, work: Work) -> None:
    await desk.add("/script", order_by=OrderBy.KEY)
    for number in range(12):
        failures = [500] * (number % 3)
        await desk.write(*({"uuid": key, "script": failures} for key in ("a", "b", "c", "d")))
    await work()
    await desk.drained()
    acked = [each for each in desk.seen() if each["status"] == 204]
    for key in ("a", "b", "c", "d"):
        numbers = [each["n"] for each in acked if each["key"] == key]
        assert numbers == sorted(numbers)
        assert len(numbers) == 12


async def test_strict_order_is_kept_through_retries(desk: Desk, work: Work) -> None:
    await desk.add("/script", order_by=OrderBy.POSITION)
    await desk.write(*({"script": [500] if number % 7 == 3 else []} for number in range(30)))
    await work()
    await desk.drained()
    assert desk.acked() == list(range(1, 31))
    failed = [each["n"] for each in desk.seen() if each["status"] == 500]
    assert failed == [number + 1 for number in range(30) if number % 7 == 3]


async def test_in_strict_order_a_message_that_fails_for_good_is_parked_and_the_next_goes_on(
    desk: Desk, work: Work
) -> None:
    await desk.add("/script", order_by=OrderBy.POSITION, retry=TWICE)
    await desk.write({}, {"script": [500] * 9}, {}, {})
    await work()
    await desk.drained()
    assert desk.acked() == [1, 3, 4]
    assert [json.loads(each.data)["body"]["new"]["n"] for each in await desk.letters()] == [2]


async def test_several_endpoints_share_the_messages(desk: Desk, work: Work) -> None:
    await desk.add("/slow/0.005?at=a", "/slow/0.005?at=b")
    await desk.write(*({} for _ in range(60)))
    await work()
    await desk.drained()
    assert sorted(desk.acked()) == list(range(1, 61))
    assert {each["path"].split("at=")[1][0] for each in desk.seen()} == {"a", "b"}


async def test_a_dead_endpoint_beside_a_good_one_loses_nothing(desk: Desk, work: Work) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{closed.getsockname()[1]}/"
        await desk.add(urls=(dead, desk.site.url(f"/ok?for={desk.name}")))
        await desk.write(*({} for _ in range(30)))
        await work()
        await desk.drained()
    assert sorted(desk.acked()) == list(range(1, 31))


async def test_while_an_endpoint_is_down_no_attempts_are_spent(desk: Desk, work: Work, told: Told) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{closed.getsockname()[1]}/"
        retry = RetryPolicy(max_attempts=3, min_backoff_seconds=0.01, max_backoff_seconds=0.02)
        await desk.add(urls=(dead,), retry=retry)
        await desk.write(*({} for _ in range(100)))
        worker = await work()
        await until(lambda: any(event == "down" for _, event, _ in told))
        # Two probes more: connections are tried, messages are not.
        (pusher, _) = worker._pushers[desk.name]
        sender = pusher._endpoints._senders[0]
        await until(lambda: sender.health.breaker.openings >= 2)
    assert await desk.waiting() + len(await desk.letters()) == 100
    assert len(await desk.letters()) < 10


async def test_the_window_grows_until_many_are_under_way(desk: Desk, work: Work) -> None:
    await desk.add("/slow/0.05")
    await desk.write(*({} for _ in range(300)))
    worker = await work()
    await desk.drained()
    (pusher, _) = worker._pushers[desk.name]
    assert pusher._endpoints.window > 32
    assert sorted(desk.acked()) == list(range(1, 301))


async def test_a_host_gets_no_more_connections_than_it_may(desk: Desk, work: Work) -> None:
    await desk.add("/slow/0.01")
    await desk.write(*({} for _ in range(60)))
    worker = await work(per_host=3)
    most = 0

    async def gone() -> bool:
        nonlocal most
        most = max(most, *(len(host._connections) for host in worker._http._hosts.values()), 0)
        return await desk.waiting() == 0

    await until(gone)
    assert 0 < most <= 3
    assert sorted(desk.acked()) == list(range(1, 61))


async def test_what_is_changed_counts_from_then_on(desk: Desk, work: Work) -> None:
    await desk.add("/status/500", retry=SWIFT)
    await desk.write({})
    await work()
    await until(lambda: len(desk.seen()) > 1)

    def better(now: Any) -> Any:
        push = dataclasses.replace(now.push, endpoints=(desk.site.url(f"/ok?for={desk.name}"),))
        return dataclasses.replace(now, push=push)

    await desk.subscriptions.redefine(desk.name, better)
    await desk.drained()
    assert desk.seen()[-1]["status"] == 204


async def test_paused_nothing_is_sent_and_resumed_it_goes_on(desk: Desk, work: Work) -> None:
    await desk.add("/ok")
    await desk.subscriptions.pause(desk.name)
    await desk.write({}, {})
    worker = await work()
    assert desk.name not in worker._pushers
    await desk.subscriptions.resume(desk.name)
    await desk.drained()
    assert sorted(desk.acked()) == [1, 2]


async def test_an_address_that_is_not_allowed_is_never_reached(desk: Desk, work: Work, told: Told) -> None:
    await desk.add("/ok", retry=TWICE)
    await desk.write({})
    await work(allowed=())
    await until(lambda: any(event == "refused" for _, event, _ in told))
    assert "PURVEYOR_PUSH_ALLOW" in told[0][2]
    assert await desk.waiting() == 1
    assert not desk.seen()
    await until(lambda: _is_told(desk, "127.0.0.1, which is not a public address"))


async def test_why_it_is_not_pushed_is_told_until_the_cause_is_gone_and_no_attempt_is_spent(
    desk: Desk, work: Work
) -> None:
    await desk.add("/ok", retry=TWICE, secret="env:PURVEYOR_PUSH_SECRET_NONE")
    await desk.write({})
    await work()
    await until(lambda: _is_told(desk, "PURVEYOR_PUSH_SECRET_NONE is not set"))
    await desk.change(secret=None, endpoints=("http://10.0.0.1/", "http://10.0.0.2/"))
    await until(lambda: _is_told(desk, "10.0.0.2"))
    found = await desk.subscriptions.get(desk.name)
    overview = await read_status(desk.queues, await desk.subscriptions.registry(), found)
    assert overview.push_problem is not None
    assert "SECRET" not in overview.push_problem.reason
    assert found.record.state is RecordState.ACTIVE
    await desk.subscriptions.pause(desk.name)  # then that is the reason
    await until(lambda: _is_told(desk, None))
    await desk.subscriptions.resume(desk.name)
    await until(lambda: _is_told(desk, "10.0.0.1"))
    await desk.change(endpoints=(desk.site.url(f"/ok?for={desk.name}"),))
    await desk.drained()
    await until(lambda: _is_told(desk, None))
    assert [json.loads(each["body"])["deliveryAttempt"] for each in desk.seen()] == [1]
    assert not await desk.letters()


async def _is_told(desk: Desk, words: str | None) -> bool:
    """Whether those who look at the subscription see why it is not pushed; None: that nothing is in the way."""
    found = await desk.subscriptions.get(desk.name)
    other = dataclasses.replace(
        found,
        record=dataclasses.replace(found.record, definition=dataclasses.replace(found.record.definition, name="o")),
    )
    trouble = (await read_problems(desk.queues, [found])).get(desk.name)
    if trouble != (await read_problems(desk.queues, [found, other])).get(desk.name):
        return False  # told just now
    return trouble is None if words is None else trouble is not None and words in trouble.reason


async def test_a_secret_that_is_not_there_stops_one_subscription_and_says_so(
    desk: Desk, work: Work, told: Told
) -> None:
    await desk.add("/ok", secret="env:PURVEYOR_PUSH_SECRET_NONE")
    await desk.write({})
    await work()
    await until(lambda: any(event == "stuck" for _, event, _ in told))
    assert "PURVEYOR_PUSH_SECRET_NONE is not set" in told[0][2]
    assert not desk.seen()


async def test_a_variable_that_is_none_for_secrets_stops_one_subscription_and_says_so(desk: Desk, work: Work) -> None:
    """As a definition of an older version may name it; the endpoint gets nothing of it."""
    await desk.add("/ok", bearer_token="env:PATH")
    await desk.write({})
    await work()
    await until(lambda: _is_told(desk, "PATH is not allowed as a secret of push"))
    assert not desk.seen()
    await desk.change(bearer_token=None)
    await desk.drained()
    assert not any("authorization" in each["headers"] for each in desk.seen())


async def test_two_workers_share_the_work_and_each_message_is_sent_once(desk: Desk, work: Work) -> None:
    await desk.add("/slow/0.01", order_by=OrderBy.KEY)
    await desk.write(*({"uuid": f"u{number % 20}"} for number in range(200)))
    one, two = await asyncio.gather(work(), work())
    await desk.drained()
    assert sorted(desk.acked()) == list(range(1, 201))
    for key in {each["key"] for each in desk.seen()}:
        numbers = [each["n"] for each in desk.seen() if each["key"] == key]
        assert numbers == sorted(numbers)
    assert one._services.leases.instance != two._services.leases.instance


async def test_a_worker_that_stops_leaves_no_lease_behind(desk: Desk, work: Work) -> None:
    await desk.add("/slow/0.3", order_by=OrderBy.POSITION)
    await desk.write(*({} for _ in range(20)))
    first = await work()
    await until(lambda: bool(desk.seen()))
    (pusher, task) = first._pushers[desk.name]
    pusher.stop()
    await task
    book = await (await first._services.leases._pull.state_writer(desk.name)).current()
    assert not book.leases
    assert all(count == 0 for count in book.delivery_counts.values())


async def test_by_policy_a_message_that_only_crashes_used_up_parks_the_later_messages_of_its_key_too(
    desk: Desk, work: Work
) -> None:
    await desk.add("/ok", order_by=OrderBy.KEY, retry=TWICE, after_dead_letter=AfterDeadLetter.PARK_KEY)
    await desk.write({"uuid": "a"}, {"uuid": "a"}, {"uuid": "b"})
    attempts, keys = AttemptLog(desk.queues), BlockedKeys(desk.queues)
    for number in range(2):
        async with SharedServices.build(desk.queues) as shared:
            leases = PushLeases(shared, attempts, keys, instance=f"killed-{number}")
            await until(lambda leases=leases: _has_leased(leases, desk.name))  # type: ignore[misc]
    await asyncio.gather(work(), work())
    await desk.drained()
    assert desk.acked() == [3]
    used_up, later = await desk.letters()
    assert [json.loads(each.data)["body"]["new"]["n"] for each in (used_up, later)] == [1, 2]
    assert (used_up.reason, used_up.attempts) == ("not acknowledged after 2 deliveries", 2)
    told = [each["error"] for each in json.loads(str(used_up.details["attempts_log"]))]
    assert told == [f"the lease of instance 'killed-{number}' expired" for number in range(2)]
    assert "parked with an earlier message about 'a'" in later.reason


async def _has_leased(leases: PushLeases, name: str) -> bool:
    """Lease one message and never settle it, as a worker that is killed."""
    found, _ = await leases.lease(name, 1, 0.1)
    return [each.data for each in found.messages if b'"n": 1,' in each.data] != []


async def test_by_policy_the_later_messages_of_a_key_are_parked_with_one_that_failed_until_it_is_seen_to(
    desk: Desk, work: Work
) -> None:
    await desk.add("/script", order_by=OrderBy.KEY, retry=TWICE, after_dead_letter=AfterDeadLetter.PARK_KEY)
    await desk.write({"uuid": "a"}, {"uuid": "a", "script": [500] * 9}, {"uuid": "b"}, {"uuid": "a"}, {"uuid": "b"})
    await asyncio.gather(work(), work())
    await desk.drained()
    assert sorted(desk.acked()) == [1, 3, 5]
    await desk.write({"uuid": "a"}, {"uuid": "b"})
    await desk.drained()
    assert sorted(desk.acked()) == [1, 3, 5, 7]
    letters = await desk.letters()
    assert [json.loads(each.data)["body"]["new"]["n"] for each in letters] == [2, 4, 6]
    assert "parked with an earlier message about 'a'" in letters[1].reason
    for sequence in await desk.letter_sequences():
        await desk.queues.streams.delete_message(DEAD_LETTERS.stream, sequence)
    await desk.write({"uuid": "a"})
    await desk.drained()
    assert desk.acked()[-1] == 8


async def test_messages_of_many_bytes_are_taken_in_several_leases(
    desk: Desk, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than one lease may hold: each holds some of them, and all arrive."""
    monkeypatch.setattr(transitions, "MAX_LEASE_BYTES", 100_000)
    await desk.add("/ok")
    await desk.write(*({"filling": "x" * 40_000} for _ in range(30)))
    await work()
    await desk.drained()
    assert sorted(desk.acked()) == list(range(1, 31))

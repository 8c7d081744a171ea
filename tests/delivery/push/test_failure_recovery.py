"""The loops of push survive every error: the status shows it, and results are kept."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from purveyor.delivery.push import push_reports, push_worker, settlement, subscription_pusher
from purveyor.delivery.push.endpoint_pool import EndpointPool, EndpointSender
from purveyor.delivery.push.http_pool import HostPool
from purveyor.delivery.push.push_leases import PushLeases
from purveyor.delivery.push.push_reports import FailureSeries
from purveyor.delivery.push.push_worker import PushWorker
from purveyor.delivery.push.settlement import Outcome
from purveyor.delivery.subscription_status import read_status
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.model.delivery_policy import PushFormat
from purveyor.model.errors import Refused
from purveyor.model.retries import Backoff
from purveyor.queues.client import Queues
from tests.support import malformed_messages
from tests.support.push import Events, PushSubscription, Site
from tests.support.waiting import until

Work = Callable[..., Awaitable[PushWorker]]


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_reports, "_FAILURE_BACKOFF", Backoff(0.02, 0.1))


class Fault:
    """A function that fails for one subscription as long as `wrong` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, name: str) -> None:
        self.wrong: Exception | None = RuntimeError("out of order")
        self.hits = 0
        whole = getattr(owner, method)

        async def replaced(it: Any, subject: str, *rest: Any) -> Any:
            if self.wrong is not None and subject == name:
                self.hits += 1
                raise self.wrong
            return await whole(it, subject, *rest)

        monkeypatch.setattr(owner, method, replaced)


async def shown(pushed: PushSubscription) -> str:
    registry = await pushed.subscriptions.registry()
    trouble = (await read_status(pushed.queues, registry, await pushed.subscriptions.get(pushed.name))).push_problem
    return "" if trouble is None else trouble.reason


@pytest.fixture
async def other(queues: Queues, subscriptions: Subscriptions, site: Site, unique: str) -> PushSubscription:
    return PushSubscription(queues, subscriptions, site, f"o-{unique}"[:64])


@pytest.mark.parametrize("wrong", [RuntimeError("out of order"), Refused("out of order", fix="mend it")])
async def test_a_subscription_whose_messages_cannot_be_leased_shows_it_and_continues(
    pushed: PushSubscription, other: PushSubscription, work: Work, monkeypatch: pytest.MonkeyPatch, wrong: Exception
) -> None:
    fault = Fault(monkeypatch, PushLeases, "lease", pushed.name)
    fault.wrong = wrong
    for each in (pushed, other):
        await each.add("/ok")
        await each.write({}, {})
    await work()
    await other.drained()
    await until(lambda: fault.hits > 3)

    async def is_shown() -> bool:
        return "leasing messages failed" in (reason := await shown(pushed)) and "out of order" in reason

    await until(is_shown)
    assert not pushed.seen()
    fault.wrong = None
    await pushed.drained()

    async def taken_back() -> bool:
        return await shown(pushed) == ""

    await until(taken_back)
    assert pushed.acked() == [1, 2]
    await other.subscriptions.delete(other.name)


async def test_results_are_kept_while_they_cannot_be_settled(
    pushed: PushSubscription, work: Work, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fault = Fault(monkeypatch, PushLeases, "settle", pushed.name)
    await pushed.add("/ok")
    await pushed.write(*({} for _ in range(4)))
    with caplog.at_level(logging.ERROR, "purveyor.delivery.push.push_reports"):
        await work()
        await until(lambda: len(pushed.seen()) == 4 and fault.hits > 5)

        async def is_shown() -> bool:
            return "settling messages failed" in await shown(pushed)

        await until(is_shown)
        fault.wrong = None
        await pushed.drained()
    assert sorted(pushed.acked()) == [1, 2, 3, 4]
    logged = [each for each in caplog.records if pushed.name in each.getMessage()]
    assert [each.exc_info is not None for each in logged] == [True]  # one reason, logged once


async def test_a_response_that_breaks_the_decision_is_a_failed_attempt(
    pushed: PushSubscription, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    hits: list[Outcome] = []
    original = settlement.decide

    def decide(outcome: Any, push: Any, *rest: Any) -> Any:
        if f"for={pushed.name}" in push.endpoints[0] and len(hits) < 2:
            hits.append(outcome)
            raise OverflowError("a date beyond all dates")
        return original(outcome, push, *rest)

    monkeypatch.setattr(subscription_pusher, "decide", decide)
    await pushed.add("/ok")
    await pushed.write({}, {}, {})
    await work()
    await pushed.drained()
    assert len(hits) == 2
    assert sorted({*pushed.acked()}) == [1, 2, 3]
    assert len(pushed.seen()) == 5


async def test_one_message_that_cannot_be_parked_does_not_delay_the_results_of_others(
    pushed: PushSubscription, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault(monkeypatch, PushLeases, "park", pushed.name)
    await pushed.add("/ok", format=PushFormat.RAW)
    await malformed_messages.put(pushed.queues, f"{pushed.name}.main", malformed_messages.BODIES["half in the key"])
    await pushed.write({}, {})
    await work()

    async def settled() -> bool:
        return await pushed.waiting() == 1 and fault.hits > 1

    await until(settled)
    assert sorted(pushed.acked()) == [1, 2]

    async def is_shown() -> bool:
        return "parking a message failed" in await shown(pushed)

    await until(is_shown)
    assert await pushed.letters() == []
    fault.wrong = None
    await pushed.drained()
    assert len(await pushed.letters()) == 1

    async def taken_back() -> bool:
        return await shown(pushed) == ""

    await until(taken_back)


async def test_an_endpoint_whose_probe_fails_in_an_unknown_way_is_probed_again(
    pushed: PushSubscription, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("purveyor.model.retries.OPEN_BACKOFF", Backoff(0.02, 60.0))
    hits = []
    whole = HostPool.probe

    async def probe(self: HostPool) -> None:
        hits.append(self)
        if len(hits) < 3:
            raise RuntimeError("no such transport")
        await whole(self)

    monkeypatch.setattr(HostPool, "probe", probe)
    down = True

    def request(self: EndpointSender, message: Any) -> bytes:
        path = b"/status/503" if down else b"/ok"
        return b"POST %s?for=%s HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n" % (path, pushed.name.encode())

    monkeypatch.setattr(EndpointSender, "build_request", request)
    await pushed.add("/ok")
    await pushed.write(*({} for _ in range(10)))
    await work()
    await until(lambda: len(hits) >= 3)
    down = False
    await pushed.drained()


async def test_a_pusher_that_cannot_be_created_is_created_later(
    pushed: PushSubscription, other: PushSubscription, work: Work, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, wrong = EndpointPool.__init__, [3]

    def made(self: EndpointPool, name: str, *rest: Any, **more: Any) -> None:
        if name == pushed.name and wrong[0]:
            wrong[0] -= 1
            raise RuntimeError("no room")
        whole(self, name, *rest, **more)

    monkeypatch.setattr(push_worker, "_RETRY_SECONDS", 0.02)
    monkeypatch.setattr(EndpointPool, "__init__", made)
    await work()
    for each in (pushed, other):
        await each.add("/ok")
        await each.write({})
    await other.drained()
    await pushed.drained()
    assert (pushed.name, "failed", "RuntimeError: no room") in events
    await other.subscriptions.delete(other.name)


def test_pauses_double_while_failures_follow_each_other_and_restart_after_a_quiet_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(push_reports, "_FAILURE_BACKOFF", Backoff(1.0, 60.0))
    series, now, pauses = FailureSeries("a loop"), 100.0, []
    for _ in range(8):
        series.add(ValueError("no"), now)
        pauses.append(series.pause_seconds)
        now += series.pause_seconds
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert len(caplog.records) == 1
    series.add(ValueError("another"), now)
    assert len(caplog.records) == 2
    series.add(ValueError("another"), now + 1000)
    assert (series.pause_seconds, len(caplog.records)) == (1, 3)

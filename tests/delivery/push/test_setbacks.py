"""The loops of push go on after any error: it is shown, others are not concerned, and what was answered counts."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from purveyor.delivery.push import push_problems, push_worker, retry_decision, subscription_pusher
from purveyor.delivery.push.endpoint_pool import EndpointPool, EndpointSender
from purveyor.delivery.push.http_pool import HostPool
from purveyor.delivery.push.push_leases import PushLeases
from purveyor.delivery.push.push_problems import FailureSeries
from purveyor.delivery.push.push_worker import PushWorker
from purveyor.delivery.push.retry_decision import Outcome
from purveyor.delivery.subscription_status import read_status
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.model.backoff import Backoff
from purveyor.model.errors import Refused
from purveyor.model.push_config import PushFormat
from purveyor.queues.client import Queues
from tests.support import malformed_messages
from tests.support.push import Desk, Site, Told
from tests.support.waiting import until

Work = Callable[..., Awaitable[PushWorker]]


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push_problems, "_FAILURE_BACKOFF", Backoff(0.02, 0.1))


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


async def shown(desk: Desk) -> str:
    registry = await desk.subscriptions.registry()
    trouble = (await read_status(desk.queues, registry, await desk.subscriptions.get(desk.name))).push_problem
    return "" if trouble is None else trouble.reason


@pytest.fixture
async def other(queues: Queues, subscriptions: Subscriptions, site: Site, unique: str) -> Desk:
    return Desk(queues, subscriptions, site, f"o-{unique}"[:64])


@pytest.mark.parametrize("wrong", [RuntimeError("out of order"), Refused("out of order", fix="mend it")])
async def test_a_subscription_whose_messages_cannot_be_taken_says_so_and_goes_on(
    desk: Desk, other: Desk, work: Work, monkeypatch: pytest.MonkeyPatch, wrong: Exception
) -> None:
    fault = Fault(monkeypatch, PushLeases, "lease", desk.name)
    fault.wrong = wrong
    for each in (desk, other):
        await each.add("/ok")
        await each.write({}, {})
    await work()
    await other.drained()
    await until(lambda: fault.hits > 3)

    async def told() -> bool:
        return "taking messages failed" in (reason := await shown(desk)) and "out of order" in reason

    await until(told)
    assert not desk.seen()
    fault.wrong = None
    await desk.drained()

    async def taken_back() -> bool:
        return await shown(desk) == ""

    await until(taken_back)
    assert desk.acked() == [1, 2]
    await other.subscriptions.delete(other.name)


async def test_what_was_answered_is_kept_while_it_cannot_be_settled(
    desk: Desk, work: Work, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fault = Fault(monkeypatch, PushLeases, "settle", desk.name)
    await desk.add("/ok")
    await desk.write(*({} for _ in range(4)))
    with caplog.at_level(logging.ERROR, "purveyor.delivery.push.push_problems"):
        await work()
        await until(lambda: len(desk.seen()) == 4 and fault.hits > 5)

        async def told() -> bool:
            return "settling messages failed" in await shown(desk)

        await until(told)
        fault.wrong = None
        await desk.drained()
    assert sorted(desk.acked()) == [1, 2, 3, 4]
    logged = [each for each in caplog.records if desk.name in each.getMessage()]
    assert [each.exc_info is not None for each in logged] == [True]  # one reason, logged once


async def test_an_answer_that_breaks_the_judge_is_an_attempt_that_failed(
    desk: Desk, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    hits: list[Outcome] = []
    original = retry_decision.decide

    def decide(outcome: Any, push: Any, *rest: Any) -> Any:
        if f"for={desk.name}" in push.endpoints[0] and len(hits) < 2:
            hits.append(outcome)
            raise OverflowError("a date beyond all dates")
        return original(outcome, push, *rest)

    monkeypatch.setattr(subscription_pusher, "decide", decide)
    await desk.add("/ok")
    await desk.write({}, {}, {})
    await work()
    await desk.drained()
    assert len(hits) == 2
    assert sorted({*desk.acked()}) == [1, 2, 3]
    assert len(desk.seen()) == 5


async def test_one_message_that_cannot_be_parked_does_not_hold_up_the_answers_of_others(
    desk: Desk, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault(monkeypatch, PushLeases, "park", desk.name)
    await desk.add("/ok", format=PushFormat.RAW)
    await malformed_messages.put(desk.queues, f"{desk.name}.main", malformed_messages.BODIES["half in the key"])
    await desk.write({}, {})
    await work()

    async def settled() -> bool:
        return await desk.waiting() == 1 and fault.hits > 1

    await until(settled)
    assert sorted(desk.acked()) == [1, 2]

    async def told() -> bool:
        return "parking a message failed" in await shown(desk)

    await until(told)
    assert await desk.letters() == []
    fault.wrong = None
    await desk.drained()
    assert len(await desk.letters()) == 1

    async def taken_back() -> bool:
        return await shown(desk) == ""

    await until(taken_back)


async def test_an_endpoint_whose_probe_fails_in_an_unknown_way_is_probed_again(
    desk: Desk, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("purveyor.delivery.push.endpoint_health.OPEN_BACKOFF", Backoff(0.02, 60.0))
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
        return b"POST %s?for=%s HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n" % (path, desk.name.encode())

    monkeypatch.setattr(EndpointSender, "build_request", request)
    await desk.add("/ok")
    await desk.write(*({} for _ in range(10)))
    await work()
    await until(lambda: len(hits) >= 3)
    down = False
    await desk.drained()


async def test_a_line_that_cannot_be_made_is_made_later(
    desk: Desk, other: Desk, work: Work, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, wrong = EndpointPool.__init__, [3]

    def made(self: EndpointPool, name: str, *rest: Any, **more: Any) -> None:
        if name == desk.name and wrong[0]:
            wrong[0] -= 1
            raise RuntimeError("no room")
        whole(self, name, *rest, **more)

    monkeypatch.setattr(push_worker, "_RETRY_SECONDS", 0.02)
    monkeypatch.setattr(EndpointPool, "__init__", made)
    await work()
    for each in (desk, other):
        await each.add("/ok")
        await each.write({})
    await other.drained()
    await desk.drained()
    assert (desk.name, "failed", "RuntimeError: no room") in told
    await other.subscriptions.delete(other.name)


def test_pauses_double_while_setbacks_follow_each_other_and_begin_anew_after_a_calm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(push_problems, "_FAILURE_BACKOFF", Backoff(1.0, 60.0))
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

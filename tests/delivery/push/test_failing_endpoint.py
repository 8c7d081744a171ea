"""An endpoint that accepts no messages is shown: since when, how often it was tried, and its last answer."""

from collections.abc import Awaitable, Callable

import pytest

from purveyor.delivery.push.push_reports import EndpointFailure, PushProblem, read_problems
from purveyor.delivery.push.push_worker import PushWorker
from purveyor.model.retries import FAILURES_TO_OPEN
from tests.support.push import PushSubscription
from tests.support.waiting import until

Work = Callable[..., Awaitable[PushWorker]]


async def _problem(pushed: PushSubscription) -> PushProblem | None:
    found = await pushed.subscriptions.get(pushed.name)
    return (await read_problems(pushed.queues, [found])).get(pushed.name)


async def _failing(pushed: PushSubscription) -> EndpointFailure:
    """Wait until the status of the subscription shows one failing endpoint, and return it."""

    async def is_shown() -> bool:
        problem = await _problem(pushed)
        return problem is not None and bool(problem.endpoints)

    await until(is_shown)
    problem = await _problem(pushed)
    assert problem is not None
    (failure,) = problem.endpoints
    assert problem.state == "failing"
    assert problem.since == failure.since
    assert problem.reason == failure.reason
    return failure


async def _is_healthy(pushed: PushSubscription) -> bool:
    return await _problem(pushed) is None


async def test_an_endpoint_that_answers_500_is_shown_until_it_accepts_messages(
    pushed: PushSubscription, work: Work, events: list[tuple[str, str, str]]
) -> None:
    pushed.site.set_status(500)
    await pushed.add("/configured")
    await pushed.write(*({} for _ in range(10)))
    await work()
    failure = await _failing(pushed)
    assert (failure.status, failure.error) == (500, None)
    assert failure.attempts >= FAILURES_TO_OPEN
    assert failure.breaker in ("open", "half open")
    assert failure.window >= 1
    assert failure.reason == f"{failure.endpoint} answers 500"
    pushed.site.set_status(204)
    await pushed.drained()
    await until(lambda: _is_healthy(pushed))
    kinds = [event for _, event, _ in events]
    assert kinds[0] == "down"
    assert kinds[-1] == "recovered"


async def test_a_host_that_does_not_answer_is_shown_with_the_error(pushed: PushSubscription, work: Work) -> None:
    await pushed.add(urls=("http://127.0.0.1:1/",))
    await pushed.write({})
    await work()
    failure = await _failing(pushed)
    assert failure.status is None
    assert failure.error
    assert failure.error in failure.reason


@pytest.mark.parametrize("status", [404, 422])
async def test_an_endpoint_that_rejects_every_message_is_shown_too(
    pushed: PushSubscription, work: Work, status: int
) -> None:
    await pushed.add(f"/status/{status}")
    await pushed.write(*({} for _ in range(10)))
    await work()
    failure = await _failing(pushed)
    assert (failure.status, failure.breaker) == (status, "closed")  # it answers: later messages are tried


async def test_a_single_failure_is_no_problem(pushed: PushSubscription, work: Work) -> None:
    await pushed.add("/script")
    await pushed.write({"script": [500]}, *({} for _ in range(5)))
    await work()
    await pushed.drained()
    assert await _is_healthy(pushed)

"""The attempt log over HTTP and on the command line: the same attempts, searched by key and time, page by page."""

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from purveyor.app.cli.output import to_jsonable
from purveyor.delivery.pull import PullService, open_pull
from purveyor.delivery.push.attempt_history import AttemptHistory
from purveyor.delivery.push.settlement import Action, Decision, Outcome, PushResult
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.delivery.transitions import DeliveredMessage
from purveyor.jetstream.address import Address
from purveyor.model import json_fields
from purveyor.model.delivery_state import SubjectKind
from purveyor.queues.client import Queues
from tests.support.command_line import Cli
from tests.support.running_api import Consumer, RunningApi, event, fill, on_server, problem, subscribe

URL = "https://shop.example/in"
AT = 1_767_225_600  # 2026-01-01T00:00:00Z


@pytest.fixture
def shop(api: RunningApi, admin: httpx.Client, address: Address, name: str) -> Consumer:
    """A push subscription with six attempts, one a second: those of odd messages failed."""
    consumer = subscribe(api, admin, name, delivery="push", push={"endpoint": URL})

    async def write(queues: Queues) -> None:
        incarnation = (await Subscriptions(queues).get(name)).incarnation
        history = AttemptHistory(queues, flush_seconds=0)
        recorder = history.recorder(name, incarnation)
        for number in range(1, 7):
            data = json_fields.dump(event(number))
            message = DeliveredMessage(number, number + 100, SubjectKind.MAIN, data, {}, 1, None, None)
            outcome = Outcome(status=503, body=b"<b>busy</b>\n") if number % 2 else Outcome(status=204)
            action = Action.RETRY if number % 2 else Action.ACKNOWLEDGE
            recorder.record(PushResult(message, outcome, Decision(action), AT + number), URL, 0.25)
        await history.close()

    on_server(address, write)
    return consumer


def sequences(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    return [each["sequence"] for each in answer.json()["attempts"]]


def test_attempts_are_listed_searched_and_paged(shop: Consumer, admin: httpx.Client, cli: Cli) -> None:
    path = f"/v1/subscriptions/{shop.name}/attempts"
    whole = shop.get("attempts").json()
    assert admin.get(path).json() == whole
    reported = cli("subscription", "attempts", shop.name, "--json").ok().json
    assert reported == to_jsonable(whole["attempts"])  # it leaves out what is null
    assert (whole["next"], whole["omitted"]) == (None, 0)
    assert whole["attempts"][1] == {
        "id": f"{AT + 5}000-5-1",
        "time": "2026-01-01T00:00:05.000+00:00",
        "sequence": 5,
        "position": 105,
        "kind": "main",
        "realm": "udm",
        "topic": "users/user",
        "key": "u-5",
        "event_id": f"{shop.name}-5",
        "endpoint": URL,
        "attempt": 1,
        "outcome": "failed",
        "action": "retry",
        "status": 503,
        "error": None,
        "seconds": 0.25,
        "excerpt": "<b>busy</b>",
    }
    assert sequences(shop.get("attempts", params={"key": "U-3"})) == [3]
    assert sequences(shop.get("attempts", params={"outcome": "failed"})) == [5, 3, 1]
    assert sequences(shop.get("attempts", params={"outcome": "acknowledged"})) == [6, 4, 2]
    since, until = "2026-01-01T00:00:02Z", "2026-01-01T01:00:04+01:00"
    assert sequences(shop.get("attempts", params={"since": since, "until": until})) == [4, 3, 2]
    page = shop.get("attempts", params={"limit": 4})
    assert sequences(page) == [6, 5, 4, 3]
    assert sequences(shop.get("attempts", params={"limit": 4, "before": page.json()["next"]})) == [2, 1]

    def listed(*flags: str) -> list[int]:
        return [each["sequence"] for each in cli("subscription", "attempts", shop.name, *flags, "--json").json]

    assert listed("--failed", "--since", since, "--until", until) == [3]
    assert listed("--key", "u-3") == [3]
    shown = cli("subscription", "attempts", shop.name, "--limit", "2")
    assert shown.code == 0
    assert "503: <b>busy</b>" in shown.out
    assert f"continue with --before {AT + 5}000-5-1" in shown.err
    assert listed("--before", f"{AT + 5}000-5-1", "--limit", "1") == [4]


@pytest.mark.parametrize(
    "wrong",
    [
        {"since": "yesterday"},
        {"since": "2026-01-01T00:00:00"},
        {"until": "12"},
        {"outcome": "good"},
        {"limit": "0"},
        {"limit": "100000"},
        {"before": "x"},
        {"before": "1-2"},
        {"key": ""},
        {"more": "1"},
    ],
)
def test_a_rubbish_search_is_422(shop: Consumer, wrong: dict[str, Any]) -> None:
    problem(shop.get("attempts", params=wrong), 422)


def test_a_rubbish_search_on_the_command_line_is_an_error_with_a_fix(cli: Cli, shop: Consumer) -> None:
    cli("subscription", "attempts", shop.name, "--since", "12").refused("is not a time", "2h")
    cli("subscription", "attempts", shop.name, "--since", "tomorrow").refused("tomorrow")
    cli("subscription", "attempts", shop.name, "--before", "x").refused("is not the id of an attempt")
    cli("subscription", "attempts", "no-such-subscription").refused("no-such-subscription")


def test_only_the_subscription_and_administrators_see_attempts(
    api: RunningApi, admin: httpx.Client, events: httpx.Client, shop: Consumer
) -> None:
    path = f"/v1/subscriptions/{shop.name}/attempts"
    other = subscribe(api, admin, f"{shop.name[:50]}-other")
    problem(other.client.get(path), 403)
    problem(events.get(path), 403)
    problem(api.anybody.get(path), 401)
    problem(admin.get("/v1/subscriptions/no-such-subscription/attempts"), 404)
    assert other.get("attempts").json() == {"attempts": [], "next": None, "omitted": 0}


def test_an_administrator_ends_the_delay_of_a_message(
    admin: httpx.Client, events: httpx.Client, address: Address, shop: Consumer
) -> None:
    fill(address, shop.name, [1])
    path = f"/v1/subscriptions/{shop.name}/messages/1/status"
    again = {"status": "retry", "delay": 0}
    problem(admin.patch(path, json=again), 409)  # it was not delivered yet

    def pull(work: Callable[[PullService], Awaitable[Any]]) -> Any:
        async def connected(queues: Queues) -> Any:
            async with open_pull(queues) as service:
                return await work(service)

        return on_server(address, connected)

    def deliver() -> int | None:
        found = pull(lambda service: service.next(shop.name, "push-1"))
        return None if found is None else int(found.num_delivered)

    assert deliver() == 1
    problem(admin.patch(path, json=again), 409)  # an instance has it
    pull(lambda service: service.retry(shop.name, 1, delay=3600, instance="push-1"))
    assert deliver() is None
    problem(events.patch(path, json=again), 401)
    problem(admin.patch(path, json={"status": "ok"}), 401)
    assert admin.patch(path, json=again).status_code == 200
    assert deliver() == 2

"""Push subscriptions from the command line and over HTTP: added, shown without secrets, changed, delivered."""

import asyncio
import json
import os
import stat
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from purveyor.app.http.application import ApiOptions
from purveyor.app.subscription_input import PushInput
from purveyor.delivery.push.attempt_history import read_attempts
from purveyor.delivery.push.attempt_record import AttemptQuery
from purveyor.delivery.push.egress_policy import parse_ranges
from purveyor.delivery.push.push_reports import EndpointFailure, PushProblems
from purveyor.delivery.push.push_request import KEY_FILE_NAME, SecretCipher, generate_secret
from purveyor.delivery.push.push_worker import PushOptions, PushWorker
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.headers import POSITION
from purveyor.jetstream.server import EmbeddedServer, ServerOptions, find_running_server
from purveyor.model.delivery_policy import Push
from purveyor.model.subscription import Subscription
from purveyor.queues.client import connect
from purveyor.queues.permissions import API, PUSH, component_users
from tests.support.command_line import PROGRAM, Cli
from tests.support.metrics_page import MetricsPage
from tests.support.nats_servers import FAST
from tests.support.push import Site, site
from tests.support.running_api import LOGINS, RunningApi
from tests.support.waiting import PATIENCE_SECONDS, until

__all__ = ["site"]  # a fixture
URL = "https://shop.example/events"
TOKEN = "PURVEYOR_PUSH_SECRET_SHOP"


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PURVEYOR_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture(autouse=True)
def _leave_nothing(cli: Cli, unique: str) -> Iterator[None]:
    """A worker of another test would wait for secrets that are not there."""
    yield
    cli("subscription", "delete", unique, "--yes")


def add(cli: Cli, name: str, *more: str) -> Any:
    return cli("subscription", "add", name, "--topic", "shop:.*", *more, "--json").ok().json


def test_a_push_subscription_is_added_once_and_its_secret_is_shown_once(cli: Cli, unique: str, data_dir: Path) -> None:
    policy = ("--ack-deadline", "10", "--max-attempts", "5", "--min-backoff", "1", "--max-backoff", "60")
    flags = ("--push", URL, *policy, "--order-by", "key", "--dead-letter", "--secret")
    reported = add(cli, unique, *flags)
    assert reported["secret"].startswith("whsec_")
    assert reported["delivery"] == "push"
    assert reported["order_by"] == "key"
    assert reported["retry"] == {"max_attempts": 5, "min_backoff_seconds": 1.0, "max_backoff_seconds": 60.0}
    assert reported["push"] == {"endpoint": URL, "secret": "***"}
    again = add(cli, unique, *flags)
    assert again["created"] is False
    assert "secret" not in again
    for command in (("show", unique), ("list",)):
        for form in ((), ("--json",)):
            out = cli("subscription", *command, *form).ok().out
            assert reported["secret"] not in out
            assert "sealed" not in out
    assert stat.S_IMODE((data_dir / KEY_FILE_NAME).stat().st_mode) == 0o600
    assert "Signed" in cli("subscription", "show", unique).ok().out
    cli("subscription", "add", unique, "--topic", "shop:.*", "--push", "https://other.example/").refused(
        "other parameters"
    )


def test_a_push_subscription_is_edited_while_it_runs(cli: Cli, unique: str, data_dir: Path, tmp_path: Path) -> None:
    add(cli, unique, "--push", URL, "--secret")
    secret = tmp_path / "secret"
    secret.write_text(generate_secret() + "\n")
    more = ("--ack-deadline", "30s", "--max-attempts", "9", "--secret-file", str(secret), "--keep-secret", "1h")
    reported = cli("subscription", "edit", unique, *more, "--format", "raw", "--bearer-env", TOKEN, "--json").ok().json
    assert reported["push"]["ack_deadline_seconds"] == 30
    assert reported["push"]["format"] == "raw"
    assert reported["push"]["old_secret"] == "***"
    assert reported["push"]["bearer_token"] == f"env:{TOKEN}"
    assert reported["retry"]["max_attempts"] == 9
    two = ("--push", URL, "--push", f"{URL}/b")
    assert cli("subscription", "edit", unique, *two, "--json").ok().json["push"]["endpoints"] == [URL, f"{URL}/b"]
    assert "Old secret until" in cli("subscription", "show", unique).ok().out
    made = cli("subscription", "edit", unique, "--secret").ok().out
    assert "which is not shown again: whsec_" in made
    cli("subscription", "edit", unique).refused("no change of subscription")


def test_a_secret_does_not_follow_an_endpoint_to_another_host(cli: Cli, unique: str, data_dir: Path) -> None:
    add(cli, unique, "--push", URL, "--secret", "--bearer-env", TOKEN)
    edit = ("subscription", "edit", unique, "--push", "https://other.example/")
    cli(*edit).refused("secret and bearer_token would be sent there")
    cli(*edit, "--secret").refused("bearer_token would be sent there")
    reported = cli(*edit, "--secret", "--bearer-env", TOKEN, "--json").ok().json
    assert reported["push"] == {"endpoint": "https://other.example/", "secret": "***", "bearer_token": f"env:{TOKEN}"}


def test_a_pulled_subscription_is_pushed_when_it_gets_an_endpoint(cli: Cli, unique: str, data_dir: Path) -> None:
    add(cli, unique)
    cli("subscription", "edit", unique, "--ack-deadline", "5").refused("has no endpoint", "--push")
    assert cli("subscription", "edit", unique, "--push", URL, "--json").ok().json["delivery"] == "push"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--ack-deadline", "5"), "--push"),
        (("--push", "http://127.0.0.1:1/"), "PURVEYOR_PUSH_ALLOW"),
        (("--push", "https://10.0.0.1/"), "not a public address"),
        (("--push", "https://u:p@shop.example/"), "leave user and password out"),
        (("--push", "ftp://shop.example/"), "https://host/path"),
        (("--push", URL, "--secret", "--secret-env", "X"), "more than one secret"),
        (("--push", URL, "--secret-env", "PURVEYOR_ADMIN_PASSWORD"), "PURVEYOR_PUSH_SECRET_"),
        (("--push", URL, "--bearer-env", "PATH"), "PURVEYOR_PUSH_SECRET_"),
        (("--push", URL, "--secret-file", "/no/such/file"), "--secret-file"),
        (("--push", URL, "--after-dead-letter", "park_key"), "order_by"),
        (("--push", URL, "--max-attempts", "0"), "0 attempts"),
        (("--push", URL, "--ack-deadline", "1h"), "deadline of 3600"),
    ],
)
def test_invalid_push_settings_are_refused(
    cli: Cli, unique: str, data_dir: Path, flags: tuple[str, ...], words: str
) -> None:
    cli("subscription", "add", unique, "--topic", "shop:.*", *flags).refused(words)


def test_a_pause_with_a_reason_is_shown(cli: Cli, unique: str, data_dir: Path, nats_server: EmbeddedServer) -> None:
    add(cli, unique, "--push", URL)

    async def pause() -> None:
        async with connect(nats_server.address) as queues:
            await Subscriptions(queues).pause(unique, "https://shop.example/events is gone (410)")

    asyncio.run(pause())
    assert "is gone (410)" in cli("subscription", "show", unique).ok().out
    assert cli("subscription", "show", unique, "--json").ok().json["pause_reason"].endswith("(410)")
    cli("subscription", "resume", unique).ok()
    assert "pause_reason" not in cli("subscription", "show", unique, "--json").ok().json


def test_a_push_problem_is_shown_on_every_surface(
    cli: Cli, unique: str, data_dir: Path, nats_server: EmbeddedServer, api: RunningApi
) -> None:
    add(cli, unique, "--push", URL)

    async def tell(reason: str, name: str = unique) -> None:
        async with connect(nats_server.address) as queues:
            incarnation = (await Subscriptions(queues).get(unique)).incarnation
            problems = PushProblems(queues)
            problems.set(name, incarnation, "no such variable")
            problems.set(name, incarnation if reason else "another", reason or "of one that is gone")
            await problems.close()

    def shown() -> list[Any]:
        with api.client("admin", "admin-secret") as admin:
            listed = next(each for each in admin.get("/v1/subscriptions").json() if each["name"] == unique)
            one = admin.get(f"/v1/subscriptions/{unique}").json()
        by_cli = next(each for each in cli("subscription", "list", "--json").ok().json if each["name"] == unique)
        bodies = (listed, one, by_cli, cli("subscription", "show", unique, "--json").ok().json)
        return [each.get("push_trouble", {}).get("reason") for each in bodies]

    assert shown() == [None] * 4
    asyncio.run(tell("10.0.0.1 is no public address"))
    assert shown() == ["10.0.0.1 is no public address"] * 4
    assert "Push problem: 10.0.0.1 is no public address" in cli("subscription", "show", unique).ok().out
    listed = cli("subscription", "list").ok().out
    assert any(row.split()[::2][:2] == [unique, "stuck"] for row in listed.splitlines())
    assert f"{unique} has been stuck since " in listed
    asyncio.run(tell(""))  # by a worker that had to do with a subscription of the same name
    assert shown() == [None] * 4


def test_a_failing_endpoint_is_shown_with_all_that_is_known_of_it(
    cli: Cli, unique: str, data_dir: Path, nats_server: EmbeddedServer, api: RunningApi
) -> None:
    add(cli, unique, "--push", URL)
    failure = EndpointFailure(
        endpoint=URL,
        since=datetime(2026, 1, 1, 12, 3, tzinfo=UTC),
        attempts=14,
        status=503,
        error=None,
        breaker="half open",
        window=2,
    )

    async def fail() -> None:
        async with connect(nats_server.address) as queues:
            incarnation = (await Subscriptions(queues).get(unique)).incarnation
            problems = PushProblems(queues)
            problems.set(unique, incarnation, failure.reason, (failure,))
            await problems.close()

    asyncio.run(fail())
    known = {"endpoint": URL, "attempts": 14, "status": 503, "breaker": "half open", "window": 2}
    with api.client("admin", "admin-secret") as admin:
        bodies = [
            *(each for each in admin.get("/v1/subscriptions").json() if each["name"] == unique),
            admin.get(f"/v1/subscriptions/{unique}").json(),
            admin.get(f"/v1/subscriptions/{unique}/status").json(),
            *(each for each in cli("subscription", "list", "--json").ok().json if each["name"] == unique),
            cli("subscription", "show", unique, "--json").ok().json,
        ]
        page = MetricsPage(admin.get("/metrics").text)
    assert len(bodies) == 5
    for body in bodies:
        assert body["push_trouble"]["since"].startswith("2026-01-01T12:03:00")
        assert known.items() <= body["push_trouble"]["endpoints"][0].items()
    progress = "14 attempts failed, circuit breaker half open, window 2"
    listed = cli("subscription", "list").ok().out
    assert f"{unique} has been failing since 2026-01-01 12:03:00 UTC: {URL} answers 503; {progress}" in listed
    shown = cli("subscription", "show", unique).ok().out
    assert f"Push problem: {URL} answers 503" in shown
    assert f"Failing: {URL}, since 2026-01-01 12:03:00 UTC: {progress}" in shown
    names = ("failed_attempts", "last_status", "breaker_open")
    metrics = {name: page.get(f"push_{name}", subscription=unique) for name in names}
    assert metrics == {"failed_attempts": 14, "last_status": 503, "breaker_open": 1}
    assert (page.get("push_failing_seconds", subscription=unique) or 0) > 0


@pytest.fixture
def api(nats_server: EmbeddedServer) -> Iterator[RunningApi]:
    cipher = SecretCipher("A" * 43 + "=")
    running_api = RunningApi(lambda: nats_server.address)
    push_input = PushInput(lambda: cipher, parse_ranges(["127.0.0.1"]))
    running_api._options = ApiOptions(find_address=lambda: nats_server.address, logins=LOGINS, push=push_input)
    with running_api as found:
        yield found.when_ready()


def test_over_http_it_is_the_same_and_no_secret_is_ever_listed(api: RunningApi, unique: str) -> None:
    admin = httpx.Client(base_url=api.url, auth=("admin", "admin-secret"))
    secret = generate_secret()
    body = {
        "name": unique,
        "realms_topics": [{"realm": "shop", "topic": ".*"}],
        "password": "pw",
        "delivery": "push",
        "retry": {"max_attempts": 5},
        "push": {"endpoint": URL, "secret": secret, "bearer_token": "token-1"},
    }
    with admin:
        made = admin.post("/v1/subscriptions", json=body)
        assert made.status_code == 201, made.text
        assert made.json()["push"] == {"endpoint": URL, "secret": "***", "bearer_token": "***"}
        assert admin.post("/v1/subscriptions", json=body).status_code == 200
        other = {**body, "push": {"endpoint": URL, "secret": generate_secret()}}
        assert admin.post("/v1/subscriptions", json=other).status_code == 409
        path = f"/v1/subscriptions/{unique}"
        for change, wanted in (
            ({"push": {"ack_deadline_seconds": 20}}, {"ack_deadline_seconds": 20.0, "secret": "***"}),
            ({"push": {"secret": generate_secret(), "secret_grace_seconds": 60}}, {"old_secret": "***"}),
            ({"push": {"bearer_token": None}}, {"endpoint": URL}),
            ({"push": {"endpoints": [URL, f"{URL}/b"]}}, {"endpoints": [URL, f"{URL}/b"]}),
            (
                {"push": {"endpoint": "https://b.example/", "secret": generate_secret()}},
                {"endpoint": "https://b.example/"},
            ),
        ):
            reported = admin.patch(path, json=change)
            assert reported.status_code == 200, reported.text
            assert wanted.items() <= reported.json()["push"].items()
        assert "bearer_token" not in reported.json()["push"]
        for broken in (
            {"push": {"endpoint": "https://169.254.169.254/"}},
            {"push": {"secret": "not one"}},
            {"push": {"secret": "sealed:abc"}},
            {"push": {"secret": "env:PURVEYOR_ADMIN_PASSWORD"}},
            {"push": {"endpoint": "https://c.example/"}},
            {"push": {"endpoint": "https://c.example/", "secret": "***"}},
            {"push": {"formt": "raw"}},
            {"push": None},
            {"delivery": "parallel", "order_by": "position"},
        ):
            assert admin.patch(path, json=broken).status_code == 422, broken
        moved = admin.patch(path, json={"push": {"endpoint": "https://c.example/"}}).json()
        assert "secret would be sent there" in moved["detail"]
        assert "give secret again" in moved["fix"]
        listed = admin.get("/v1/subscriptions").text + admin.get(path).text
        assert secret not in listed
        assert "sealed" not in listed
        pulled = admin.patch(path, json={"delivery": "ordered"}).json()
        assert "push" not in pulled
        assert admin.patch(path, json={"push": {"endpoint": URL}}).status_code == 422
        assert admin.patch(path, json={"delivery": "push", "push": {"endpoint": URL}}).status_code == 200
        mine = httpx.patch(f"{api.url}{path}", json={"push": {"endpoint": URL}}, auth=(unique, "pw"))
        assert mine.status_code == 403


async def test_its_own_nats_user_is_enough_to_push_to_park_and_to_pause(
    tmp_path: Path, site: Site, unique: str
) -> None:
    with EmbeddedServer(tmp_path / "nats", ServerOptions(sync=FAST.sync, users=component_users())) as server:
        mine = find_running_server(server.directory, PUSH)
        assert mine is not None
        async with connect(server.address) as admin, connect(mine, patience_seconds=60) as queues:
            subscriptions = Subscriptions(admin)
            for name, path in (("good", "/script"), ("gone", "/status/410")):
                push = Push(endpoints=(site.url(f"{path}?for={unique}-{name}"),))
                retry = {"max_attempts": 2, "min_backoff_seconds": 0.01, "max_backoff_seconds": 0.02}
                topics = [{"realm": "udm", "topic": "none"}]
                given = {"name": name, "realms_topics": topics, "delivery": "push", "retry": retry}
                await subscriptions.add(Subscription.from_json({**given, "push": push.to_json()}))
                for number in range(6):
                    new = {"uuid": f"u{number}", "n": number, "script": [500] * (2 if number == 3 else number % 2)}
                    body = json.dumps({"realm": "udm", "topic": "t", "body": {"old": {}, "new": new}}).encode()
                    await admin.publish(f"{name}.main", body, headers={POSITION: str(number + 10)})
            stop = asyncio.Event()
            reported: list[tuple[str, str, str]] = []
            options = PushOptions(
                cipher=SecretCipher.from_directory(tmp_path),
                allowed=parse_ranges(["127.0.0.1"]),
                on_event=lambda *words: reported.append(words),
            )
            worker = asyncio.create_task(PushWorker(queues, options).run(stop))

            async def drained_and_paused() -> bool:
                drained = (await admin.streams.info("stream:good")).state.messages == 0
                return drained and (await subscriptions.get("gone")).record.paused

            await until(drained_and_paused)
            stop.set()
            await worker
            assert (await admin.streams.info("stream:dead-letters")).state.messages == 1
            assert [event for _, event, _ in reported] == ["disabled"]
            api = find_running_server(server.directory, API)
            assert api is not None
            async with connect(api) as reader:
                page = await read_attempts(reader, await subscriptions.get("good"), AttemptQuery())
            assert len(page.attempts) == 9


def test_serve_push_prints_that_it_is_ready_and_stops_on_a_signal(nats_server: EmbeddedServer, tmp_path: Path) -> None:
    address = nats_server.address
    host, port = address.hosts()[0]
    settings = {
        "PURVEYOR_NATS_URL": f"nats://{address.user}:{address.password}@{host}:{port}",
        "PURVEYOR_DATA_DIR": str(tmp_path),
    }
    with subprocess.Popen(
        [*PROGRAM, "serve", "push", "--json", "--allow", "10.0.0.0/8"],
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        try:
            said = (json.loads(line)["event"] for line in program.stdout or ())
            assert "ready" in said  # after what it says about subscriptions of other tests
            program.terminate()
            assert "stopped" in said
            assert program.wait(PATIENCE_SECONDS) == 0
        finally:
            program.kill()


def test_an_invalid_range_is_refused_before_any_request(cli: Cli) -> None:
    cli("serve", "push", "--allow", "10.0.0.0/99").refused("--allow", "10.0.0.0/8")

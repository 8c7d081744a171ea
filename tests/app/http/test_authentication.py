import base64
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from purveyor.app.http.login_throttle import MAX_FAILURES_PER_PAIR, WINDOW_SECONDS
from purveyor.jetstream.address import Address
from tests.support.nats_servers import OwnServer
from tests.support.running_api import PASSWORD, Consumer, RunningApi, event, problem, subscribe, wanted
from tests.support.waiting import PATIENCE_SECONDS, wait_until


@pytest.fixture
def own_api(address: Address) -> "RunningApi":
    """An API with its own counts of failed logins."""
    return RunningApi(lambda: address)


def status(api: RunningApi, header: str | None, path: str = "/v1/subscriptions") -> httpx.Response:
    return api.anybody.get(path, headers={} if header is None else {"Authorization": header})


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


WRONG = [
    None,
    "",
    "Basic",
    "Basic !!!",
    "Basic " + base64.b64encode(b"no colon").decode(),
    "Basic " + base64.b64encode(b":no user").decode(),
    "Basic " + base64.b64encode(b"\xff\xfe:x").decode(),
    basic("admin", "x" * 1025),
    "Basic " + "A" * 5000,
    "Bearer",
    "Bearer x",
    "Bearer pvr_0123456789abcdef_" + "A" * 43,
    "Digest username=admin",
    "admin:admin-secret",
]


def test_without_a_login_that_is_right_it_is_401_and_says_how(own_api: RunningApi) -> None:
    with own_api as api:
        api.when_ready()
        for header in WRONG:
            answer = status(api, header)
            problem(answer, 401)
            assert answer.headers["WWW-Authenticate"].startswith("Basic ")


def test_a_wrong_password_and_an_unknown_name_look_the_same(
    own_api: RunningApi, admin: httpx.Client, name: str
) -> None:
    assert admin.post("/v1/subscriptions", json=wanted(name)).status_code == 201
    with own_api as api:
        api.when_ready()
        wrong = [
            status(api, basic(user, "wrong"), f"/v1/subscriptions/{name}")
            for user in (name, f"{name}-unknown", "admin", "no.name", "ü")
        ]
    bodies = {answer.text for answer in wrong}
    assert {answer.status_code for answer in wrong} == {401}
    assert len(bodies) == 1
    headers = [{**answer.headers, "date": ""} for answer in wrong]
    assert all(each == headers[0] for each in headers)


def test_too_many_failures_must_wait_and_others_need_not(own_api: RunningApi, admin: httpx.Client, name: str) -> None:
    assert admin.post("/v1/subscriptions", json=wanted(name)).status_code == 201
    with own_api as api:
        api.when_ready()
        before = api.client(name, PASSWORD)
        assert before.get(f"/v1/subscriptions/{name}").status_code == 200
        found = [status(api, basic(name, f"guess {n}")).status_code for n in range(MAX_FAILURES_PER_PAIR + 2)]
        assert found == [401] * MAX_FAILURES_PER_PAIR + [429] * 2
        waiting = status(api, basic(name, "another guess"))
        problem(waiting, 429)
        assert 0 < int(waiting.headers["Retry-After"]) <= WINDOW_SECONDS + 1
        assert status(api, basic("admin", "admin-secret")).status_code == 200
        assert before.get(f"/v1/subscriptions/{name}").status_code == 200


def test_guesses_at_the_same_time_count_as_well(own_api: RunningApi) -> None:
    with own_api as api, ThreadPoolExecutor(20) as threads:
        api.when_ready()
        found = list(threads.map(lambda n: status(api, basic("admin", f"guess {n}")).status_code, range(40)))
    assert found.count(401) == MAX_FAILURES_PER_PAIR
    assert found.count(429) == 40 - MAX_FAILURES_PER_PAIR


def test_a_storm_of_logins_does_not_stall_those_who_are_logged_in(
    own_api: RunningApi, admin: httpx.Client, name: str
) -> None:
    """While hundreds of passwords wait for their check, the API answers other requests in between."""
    assert admin.post("/v1/subscriptions", json=wanted(name)).status_code == 201
    with own_api as api:
        api.when_ready()
        consumer = Consumer(api.client(name, PASSWORD), name)
        assert consumer.next() is None
        checked: list[int] = []
        with ThreadPoolExecutor(20) as threads:
            storm = [
                threads.submit(lambda n=n: checked.append(status(api, basic(f"user-{n}", "x")).status_code))  # type: ignore[misc]
                for n in range(60)
            ]
            answered = 0
            while not all(each.done() for each in storm):
                assert consumer.next() is None
                answered += 1
        assert len(checked) == 60
        assert answered >= 20


def test_a_password_is_changed_without_turning_anybody_away(api: RunningApi, consumer: Consumer) -> None:
    path = f"/v1/subscriptions/{consumer.name}"
    second = api.client(consumer.name, "second")
    third = api.client(consumer.name, "third")
    assert consumer.patch(json={"password": "second", "password_grace_seconds": 600}).status_code == 200
    assert consumer.get().status_code == second.get(path).status_code == 200
    assert second.patch(path, json={"password": "third"}).status_code == 200
    assert third.get(path).status_code == 200
    problem(second.get(path), 401)
    problem(consumer.get(), 401)


def test_a_change_in_one_process_is_known_in_all(own_api: RunningApi, consumer: Consumer) -> None:
    path = f"/v1/subscriptions/{consumer.name}"
    with own_api as other:
        there = other.client(consumer.name, PASSWORD)
        wait_until(lambda: there.get(path).status_code == 200)
        assert consumer.patch(json={"password": "new"}).status_code == 200
        wait_until(lambda: there.get(path).status_code == 401)
        problem(consumer.get(), 401)


def test_tokens_are_exchanged_one_by_one(api: RunningApi, admin: httpx.Client, consumer: Consumer) -> None:
    made = [consumer.client.post("/v1/tokens", json={"label": label}).json() for label in ("a", "b")]
    clients = [api.client(headers={"Authorization": f"Bearer {each['token']}"}) for each in made]
    path = f"/v1/subscriptions/{consumer.name}"
    assert [client.get(path).status_code for client in clients] == [200, 200]
    listed = consumer.client.get("/v1/tokens")
    assert [each["label"] for each in listed.json()] == ["a", "b"]
    assert not any(each["token"] in listed.text for each in made)
    assert clients[0].delete(f"/v1/tokens/{made[0]['id']}").status_code == 200
    problem(clients[0].get(path), 401)
    assert clients[1].get(path).status_code == 200
    problem(clients[1].delete(f"/v1/tokens/{made[0]['id']}"), 404)
    assert admin.get("/v1/tokens", params={"login": consumer.name}).json() == listed.json()[1:]
    problem(consumer.client.get("/v1/tokens", params={"login": "admin"}), 403)
    problem(admin.post("/v1/tokens", json={"login": f"{consumer.name}-x"}), 404)


def test_a_token_of_a_publisher_has_its_realms_and_ends_in_time(api: RunningApi, admin: httpx.Client) -> None:
    made = admin.post("/v1/tokens", json={"login": "shop", "expires_in_seconds": 3600})
    assert made.status_code == 201
    assert made.json()["expires"]
    shop = api.client(headers={"Authorization": f"Bearer {made.json()['token']}"})
    assert shop.post("/v1/messages", json=event(realm="shop")).status_code == 202
    problem(shop.post("/v1/messages", json=event(realm="udm")), 403)
    short = admin.post("/v1/tokens", json={"login": "shop", "expires_in_seconds": 0.2}).json()["token"]
    brief = api.client(headers={"Authorization": f"Bearer {short}"})
    wait_until(lambda: brief.post("/v1/messages", json=event(realm="shop")).status_code == 401)


def test_no_secret_is_logged(api: RunningApi, admin: httpx.Client, name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        consumer = subscribe(api, admin, name)
        token = consumer.client.post("/v1/tokens", json={}).json()["token"]
        status(api, basic(name, "a wrong one"))
        status(api, f"Bearer {token}")
    for secret in (PASSWORD, "admin-secret", token, "a wrong one", base64.b64encode(PASSWORD.encode()).decode()):
        assert secret not in caplog.text


def test_large_bodies_are_413_before_they_are_read(admin: httpx.Client, api: RunningApi) -> None:
    problem(admin.post("/v1/subscriptions", content=b"x" * (257 << 10)), 413)
    problem(api.client().post("/v1/messages", content=b"x" * (17 << 20)), 401)


def test_what_is_not_there_is_404_and_what_is_not_meant_405(admin: httpx.Client) -> None:
    problem(admin.get("/v2/subscriptions"), 404)
    problem(admin.get("/v1/subscriptions/"), 404)
    problem(admin.put("/v1/subscriptions"), 405)


def test_health_needs_no_login(api: RunningApi) -> None:
    anybody = api.client()
    assert anybody.get("/healthz").json() == {"status": "ok"}
    assert anybody.get("/readyz").json().keys() == {"status", "degraded"}  # other tests may have left a backlog
    assert anybody.get("/openapi.json").status_code == 200


def test_before_the_server_is_reached_it_listens_and_says_503(own_server: OwnServer) -> None:
    server = own_server()
    nowhere = Address.parse("nats://127.0.0.1:9")
    there = threading.Event()
    with RunningApi(lambda: server.address if there.is_set() else nowhere, patience_seconds=1) as api:
        anybody, admin = api.client(), api.client("admin", "admin-secret")
        assert anybody.get("/healthz").status_code == 200
        for answer in (anybody.get("/readyz"), admin.get("/v1/subscriptions")):
            problem(answer, 503)
            assert int(answer.headers["Retry-After"]) > 0
        there.set()
        wait_until(lambda: anybody.get("/readyz").status_code == 200)
        assert admin.get("/v1/subscriptions").json() == []


def test_a_stop_answers_long_polls_at_once(own_api: RunningApi, admin: httpx.Client, name: str) -> None:
    assert admin.post("/v1/subscriptions", json=wanted(name)).status_code == 201
    with own_api as api, ThreadPoolExecutor(1) as threads:
        api.when_ready()
        consumer = Consumer(api.client(name, PASSWORD), name)
        assert consumer.next() is None
        polling = threads.submit(consumer.next, timeout=600)
        wait_until(lambda: api.under_way == 1)
        api.stop()
        assert polling.result(PATIENCE_SECONDS) is None

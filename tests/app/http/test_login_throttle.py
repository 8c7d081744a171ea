"""Guessing is throttled, without effect on other clients of the address or on the owner of the login."""

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from purveyor.app.http import login_throttle
from purveyor.app.http.login_throttle import (
    MAX_COUNTS,
    MAX_FAILURES_PER_ADDRESS,
    MAX_FAILURES_PER_LOGIN,
    MAX_FAILURES_PER_PAIR,
    WINDOW_SECONDS,
    Attempt,
    CredentialKind,
    Decision,
    LoginThrottle,
)
from purveyor.delivery.push.egress_policy import parse_ranges
from purveyor.jetstream.address import Address
from tests.support.running_api import PASSWORD, Consumer, RunningApi, problem, subscribe
from tests.support.waiting import wait_until

PROXY = "127.0.0.1"


@pytest.fixture
def own_api(address: Address, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningApi]:
    """An API with its own counts, behind a proxy at the address of the tests.

    It remembers failures for an hour: a busy machine may need more than a minute to check a hundred passwords.
    """
    monkeypatch.setattr(login_throttle, "WINDOW_SECONDS", 3600.0)
    with RunningApi(lambda: address, trusted_proxies=parse_ranges([PROXY])) as api:
        yield api.when_ready()


def bearer(number: int) -> str:
    return f"Bearer pvr_{number:016x}_{'A' * 43}"


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def ask(api: RunningApi, login: str, client: str | None = None, path: str = "/v1/tokens") -> httpx.Response:
    """Ask with a login, through the proxy if an address of a client is given."""
    headers = {"Authorization": login} | ({} if client is None else {"X-Forwarded-For": client})
    return api.anybody.get(path, headers=headers)


def status(api: RunningApi, login: str, client: str | None = None) -> int:
    return ask(api, login, client).status_code


def lock(api: RunningApi, user: str, client: str | None = None) -> None:
    """Fail at a login until it is refused."""
    found = [status(api, basic(user, f"guess {number}"), client) for number in range(MAX_FAILURES_PER_PAIR + 1)]
    assert found == [401] * MAX_FAILURES_PER_PAIR + [429]


def test_wrong_tokens_do_not_lock_out_right_ones(own_api: RunningApi, consumer: Consumer) -> None:
    token = consumer.client.post("/v1/tokens", json={}).json()["token"]
    for number in range(MAX_FAILURES_PER_ADDRESS + 1):
        assert status(own_api, bearer(number)) == 401
    assert status(own_api, f"Bearer {token}") == 200


def test_one_wrong_token_has_to_wait(own_api: RunningApi) -> None:
    found = [ask(own_api, bearer(1)) for _ in range(MAX_FAILURES_PER_PAIR + 1)]
    assert [each.status_code for each in found] == [401] * MAX_FAILURES_PER_PAIR + [429]
    body = problem(found[-1], 429)
    wait = found[-1].headers["Retry-After"]
    assert f"in {wait} seconds" in body["fix"]


def test_wrong_passwords_do_not_lock_out_tokens_of_the_same_address(own_api: RunningApi, consumer: Consumer) -> None:
    token = consumer.client.post("/v1/tokens", json={}).json()["token"]
    lock(own_api, consumer.name)
    assert status(own_api, f"Bearer {token}") == 200


def test_clients_of_a_trusted_proxy_are_told_apart(own_api: RunningApi, consumer: Consumer) -> None:
    lock(own_api, consumer.name, "192.0.2.1")
    right = basic(consumer.name, PASSWORD)
    assert status(own_api, right, "192.0.2.1") == 429
    assert status(own_api, right, "192.0.2.2") == 200


def test_what_a_client_says_of_its_address_is_not_believed(own_api: RunningApi) -> None:
    """A proxy appends the address it sees; the client chooses the addresses before it."""
    found = [
        status(own_api, basic("admin", f"guess {number}"), f"192.0.2.{number}, 198.51.100.1, {PROXY}")
        for number in range(MAX_FAILURES_PER_PAIR + 1)
    ]
    assert found == [401] * MAX_FAILURES_PER_PAIR + [429]


def test_without_a_trusted_proxy_the_header_is_not_read(address: Address) -> None:
    with RunningApi(lambda: address, trusted_proxies=parse_ranges(["192.0.2.0/24"])) as api:
        api.when_ready()
        found = [
            status(api, basic("admin", f"guess {number}"), f"192.0.2.{number}")
            for number in range(MAX_FAILURES_PER_PAIR + 1)
        ]
    assert found == [401] * MAX_FAILURES_PER_PAIR + [429]


def test_networks_of_ipv6_count_as_one_address(own_api: RunningApi) -> None:
    found = [
        status(own_api, basic("admin", f"guess {number}"), f"2001:db8::{number}")
        for number in range(MAX_FAILURES_PER_PAIR + 1)
    ]
    assert found == [401] * MAX_FAILURES_PER_PAIR + [429]
    assert status(own_api, basic("admin", "guess"), "2001:db8:0:1::1") == 401


def test_a_burst_from_one_address_does_not_exceed_the_limit(own_api: RunningApi) -> None:
    with ThreadPoolExecutor(30) as threads:
        found = [
            *threads.map(lambda number: status(own_api, basic(f"user-{number}", "guess"), "192.0.2.1"), range(150))
        ]
    assert found.count(401) == MAX_FAILURES_PER_ADDRESS
    assert found.count(429) == 50


def test_a_burst_of_right_logins_from_one_address_is_served(own_api: RunningApi, consumer: Consumer) -> None:
    """More attempts at once than may fail: each waits for the outcome of others."""
    tokens = [consumer.client.post("/v1/tokens", json={}).json()["token"] for _ in range(40)]
    with ThreadPoolExecutor(40) as threads:
        for number in range(MAX_FAILURES_PER_ADDRESS - 10):
            assert status(own_api, bearer(number), "192.0.2.1") == 401
        found = [*threads.map(lambda token: status(own_api, f"Bearer {token}", "192.0.2.1"), tokens)]
    assert found == [200] * 40


def test_a_login_that_was_right_is_not_locked_out_by_others(own_api: RunningApi, consumer: Consumer) -> None:
    right = basic(consumer.name, PASSWORD)
    assert status(own_api, right) == 200
    lock(own_api, consumer.name)
    own_api.forget_logins()  # as after an outage of the NATS server: all are checked again
    assert status(own_api, right) == 200
    assert status(own_api, basic(consumer.name, "another guess")) == 401  # it was right: the count begins anew


def test_a_password_that_is_right_no_more_is_counted_like_any_other(
    own_api: RunningApi, api: RunningApi, admin: httpx.Client, name: str
) -> None:
    consumer = subscribe(api, admin, name)
    old = basic(name, PASSWORD)
    assert status(own_api, old) == 200
    assert consumer.patch(json={"password": "another"}).status_code == 200
    wait_until(lambda: status(own_api, old) == 401)
    found = [status(own_api, old) for _ in range(MAX_FAILURES_PER_PAIR)]
    assert found == [401] * (MAX_FAILURES_PER_PAIR - 1) + [429]


# The rules.


def password(address: str, login: str = "ox") -> Attempt:
    return Attempt.of(address, CredentialKind.PASSWORD, login)


def fail(throttle: LoginThrottle, attempt: Attempt, times: int, now: float = 0.0) -> None:
    for _ in range(times):
        assert throttle.decide(attempt, now) == (Decision.ADMITTED, 0)
        throttle.begin(attempt, now)
        throttle.record_failure(attempt, now)


def test_failures_are_forgotten_after_a_while() -> None:
    throttle = LoginThrottle()
    fail(throttle, password("a"), MAX_FAILURES_PER_PAIR)
    assert throttle.decide(password("a"), 10.0) == (Decision.REFUSED, WINDOW_SECONDS - 10)
    assert throttle.decide(password("a", "other"), 10.0)[0] is Decision.ADMITTED
    assert throttle.decide(password("b"), 10.0)[0] is Decision.ADMITTED
    assert throttle.decide(password("a"), WINDOW_SECONDS)[0] is Decision.ADMITTED


def test_attempts_under_way_decide_for_those_behind_them() -> None:
    throttle = LoginThrottle()
    for _ in range(MAX_FAILURES_PER_PAIR):
        throttle.begin(password("a"), 0.0)
    assert throttle.decide(password("a"), 0.0)[0] is Decision.WAIT
    throttle.cancel(password("a"), 0.0)
    assert throttle.decide(password("a"), 0.0)[0] is Decision.ADMITTED
    throttle.begin(password("a"), 0.0)
    for _ in range(MAX_FAILURES_PER_PAIR):
        throttle.record_failure(password("a"), 0.0)
    assert throttle.decide(password("a"), 0.0)[0] is Decision.REFUSED
    throttle.begin(password("a"), 0.0)
    throttle.record_success(password("a"), 0.0)
    assert throttle.decide(password("a"), 0.0)[0] is Decision.ADMITTED


def test_an_address_that_fails_at_many_logins_has_to_wait() -> None:
    throttle = LoginThrottle()
    for number in range(MAX_FAILURES_PER_ADDRESS):
        fail(throttle, password("a", f"user-{number}"), 1)
    assert throttle.decide(password("a", "anybody"), 0.0)[0] is Decision.REFUSED
    assert throttle.decide(Attempt.of("a", CredentialKind.TOKEN, "1"), 0.0)[0] is Decision.ADMITTED


def test_many_addresses_can_neither_guess_much_nor_lock_a_login() -> None:
    throttle = LoginThrottle()
    for number in range(MAX_FAILURES_PER_LOGIN // MAX_FAILURES_PER_PAIR):
        fail(throttle, password(f"first-{number}"), MAX_FAILURES_PER_PAIR)
    for number in range(50):
        fail(throttle, password(f"second-{number}"), 1)
        assert throttle.decide(password(f"second-{number}"), 0.0)[0] is Decision.REFUSED
    assert throttle.decide(password("the owner's"), 0.0)[0] is Decision.ADMITTED
    assert throttle.decide(password("second-1"), WINDOW_SECONDS)[0] is Decision.ADMITTED


def test_what_is_kept_has_a_limit() -> None:
    throttle = LoginThrottle()
    for number in range(MAX_COUNTS + 10):
        attempt = password(f"address-{number}", f"{'x' * 3000}-{number}")
        throttle.begin(attempt, 0.0)
        throttle.record_failure(attempt, 0.0)
    assert len(throttle) == 3 * MAX_COUNTS
    idle = LoginThrottle()
    idle.begin(password("a"), 0.0)
    idle.record_success(password("a"), 0.0)
    assert len(idle) == 0

"""Pure rules of push: window, circuit breaker, backoff, decision."""

from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from purveyor.delivery.push.endpoint_pool import LARGEST_WINDOW, SMALLEST_WINDOW, ConcurrencyWindow, is_slow
from purveyor.delivery.push.settlement import (
    Action,
    Outcome,
    backoff_seconds,
    decide,
    retry_after_seconds,
)
from purveyor.model.delivery_policy import LONGEST_DELAY_SECONDS, AckCodes, Push, RetryPolicy
from purveyor.model.retries import FAILURES_TO_OPEN, OPEN_BACKOFF, BreakerState, CircuitBreaker
from tests.support.scale import pick

PUSH = Push(endpoints=("https://shop.example/in",))
POLICY = RetryPolicy(max_attempts=4, min_backoff_seconds=1, max_backoff_seconds=60)
NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("status", range(100, 600))
def test_of_all_status_codes_these_acknowledge(status: int) -> None:
    decision = decide(Outcome(status=status), PUSH, POLICY, 1, 0.5)
    wider = decide(Outcome(status=status), Push(endpoints=PUSH.endpoints, ack_codes=AckCodes.ALL), POLICY, 1, 0.5)
    assert (decision.action is Action.ACKNOWLEDGE) == (status in {102, 200, 201, 202, 204})
    assert (wider.action is Action.ACKNOWLEDGE) == (status == 102 or 200 <= status < 300)
    assert (decision.action is Action.DISABLE) == (status == 410)


def test_after_the_last_attempt_a_message_is_given_up_and_without_an_end_it_never_is() -> None:
    failed = Outcome(status=500)
    assert [decide(failed, PUSH, POLICY, attempt, 0.5).action for attempt in (3, 4, 5)] == [
        Action.RETRY,
        Action.GIVE_UP,
        Action.GIVE_UP,
    ]
    assert decide(failed, PUSH, RetryPolicy(), 10_000, 0.5).action is Action.RETRY


def test_what_was_not_sent_is_no_attempt() -> None:
    assert decide(Outcome(error="no room", sent=False), PUSH, POLICY, 4, 0.5).action is Action.RELEASE


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("120", 120.0),
        ("0", 0.0),
        ("-5", 0.0),
        ("Thu, 01 Jan 2026 00:01:00 GMT", 60.0),
        ("Thu, 01 Jan 2020 00:01:00 GMT", 0.0),
        ("soon", 0.0),
        ("nan", 0.0),
        ("1e300", LONGEST_DELAY_SECONDS),
        ("inf", 0.0),
        (None, 0.0),
        ("", 0.0),
    ],
)
def test_retry_after_is_read_in_both_forms_and_nonsense_is_nothing(text: str | None, seconds: float) -> None:
    assert retry_after_seconds(text, NOW) == seconds


def test_a_longer_wish_of_the_endpoint_than_our_backoff_counts_and_429_and_503_hold_up_all() -> None:
    for status, pause in ((503, 100.0), (429, 100.0), (500, 0.0), (404, 0.0)):
        decision = decide(Outcome(status=status, retry_after="100"), PUSH, POLICY, 1, 0.5)
        assert (decision.delay_seconds, decision.pause_seconds) == (100.0, pause)
    assert decide(Outcome(status=503, retry_after="0"), PUSH, POLICY, 3, 1.0).delay_seconds == 4.0


def test_an_excerpt_is_one_printable_line() -> None:
    assert Outcome(status=500, body=b"no\r\n\x00such \xff table" + b"x" * 5000).excerpt.startswith(
        "no such \ufffd tablexxx"
    )
    assert len(Outcome(status=500, body=b"x" * 5000).excerpt) == 200


@given(st.integers(1, 200), st.floats(0, 1), st.floats(0, 100), st.floats(0, 1000))
def test_a_backoff_is_within_its_bounds(attempt: int, chance: float, least: float, more: float) -> None:
    policy = RetryPolicy(min_backoff_seconds=least, max_backoff_seconds=least + more)
    found = backoff_seconds(policy, attempt, chance)
    assert least <= found <= least + more
    assert found <= policy.backoff_seconds(attempt)


def test_the_window_doubles_by_the_round_then_grows_by_one_and_halves_once_per_failed_round() -> None:
    window = ConcurrencyWindow()
    for expected in (8, 16, 32):
        for _ in range(window.limit):
            window = window.record_success(window.limit)
        assert window.limit == expected
    for _ in range(32):
        window = window.record_failure(0)
    assert window == ConcurrencyWindow(16, 16, 1)
    for _ in range(17):
        window = window.record_success(window.limit)
    assert window.limit == 17
    assert is_slow(6, 10)
    assert not is_slow(4, 10)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 300)), max_size=200))
def test_the_window_stays_within_its_bounds(events: list[tuple[bool, int]]) -> None:
    window = ConcurrencyWindow()
    for good, number in events:
        before = window
        window = window.record_success(number) if good else window.record_failure(window.round)
        assert SMALLEST_WINDOW <= window.size <= LARGEST_WINDOW
        assert window.size >= before.size if good else window.size <= before.size


class Endpoint(RuleBasedStateMachine):
    """A breaker and a retry policy before an endpoint that is up or down, as time goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.breaker = CircuitBreaker()
        self.up = True
        self.attempts = 0
        self.waits_until = 0.0
        self.sent_while_open = 0
        self.given_up = False

    @rule(seconds=st.floats(0.001, 90))
    def time_goes_on(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def it_goes_down_or_comes_up(self) -> None:
        self.up = not self.up

    @precondition(lambda self: not self.given_up and self.now >= self.waits_until and self.breaker.may_send(self.now))
    @rule(chance=st.floats(0, 1), after=st.sampled_from([None, "5", "30"]))
    def a_message_is_sent(self, chance: float, after: str | None) -> None:
        state = self.breaker.state(self.now)
        assert state is not BreakerState.OPEN
        if state is BreakerState.HALF_OPEN:
            self.breaker = self.breaker.start_probe()
            assert not self.breaker.may_send(self.now)
        self.attempts += 1
        outcome = Outcome(status=204) if self.up else Outcome(status=503, retry_after=after)
        decision = decide(outcome, PUSH, POLICY, self.attempts, chance)
        if self.up:
            assert decision.action is Action.ACKNOWLEDGE
            self.breaker = self.breaker.record_success()
            assert self.breaker.state(self.now) is BreakerState.CLOSED
            self.attempts = 0
            return
        self.breaker = self.breaker.record_failure(self.now, chance)
        if state is BreakerState.HALF_OPEN:
            assert self.breaker.state(self.now) is BreakerState.OPEN
        if decision.pause_seconds:
            self.breaker = self.breaker.pause(self.now, decision.pause_seconds)
            assert not self.breaker.may_send(self.now + decision.pause_seconds * 0.99)
        if decision.action is Action.GIVE_UP:
            assert self.attempts == POLICY.max_attempts
            self.given_up = True
        else:
            assert decision.action is Action.RETRY
            self.waits_until = self.now + decision.delay_seconds

    @precondition(lambda self: self.given_up)
    @rule()
    def the_next_message_comes(self) -> None:
        self.given_up, self.attempts, self.waits_until = False, 0, 0.0

    @precondition(lambda self: self.breaker.open_until is not None)
    @rule(chance=st.floats(0, 1))
    def one_that_was_under_way_fails_late(self, chance: float) -> None:
        if not self.breaker.is_probing:
            assert self.breaker.record_failure(self.now, chance) == self.breaker

    @invariant()
    def it_never_waits_for_ever(self) -> None:
        assert self.attempts <= 4
        assert self.breaker.failures < FAILURES_TO_OPEN
        if self.breaker.open_until is not None:
            assert self.breaker.open_until - self.now <= max(OPEN_BACKOFF.longest_seconds, 30)
            assert self.breaker.may_send(self.breaker.open_until) or self.breaker.is_probing


Endpoint.TestCase.settings = settings(max_examples=pick(40, 1000), stateful_step_count=pick(30, 100))
TestEndpoint = Endpoint.TestCase


def test_a_success_in_between_keeps_the_breaker_closed_and_an_unused_probe_is_cancelled() -> None:
    breaker = CircuitBreaker()
    for _ in range(3):
        for _ in range(FAILURES_TO_OPEN - 1):
            breaker = breaker.record_failure(0, 0.5)
        breaker = breaker.record_success()
    assert breaker.state(0) is BreakerState.CLOSED
    for _ in range(FAILURES_TO_OPEN):
        breaker = breaker.record_failure(0, 1.0)
    assert breaker.open_until == 1.0
    probing = breaker.start_probe()
    assert not probing.may_send(5)
    assert probing.cancel_probe().may_send(5)
    assert probing.record_failure(5, 1.0).open_until == 7.0

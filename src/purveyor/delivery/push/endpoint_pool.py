"""The endpoints of one subscription: choose one for each message, probe those that are down, build the requests.

An endpoint that is down gets no messages until its circuit breaker (`model/retries.py`) is half open. Then the pool
opens a connection before any message is leased for it, so that no attempt is spent on a host that does not answer. An
endpoint that asks for a pause (Retry-After) opens the breaker too.

The concurrency window limits the pushes in flight, as in TCP: slow start doubles the window with every round until a
threshold, from there on it grows by one per round. A failure halves it, once per round: an attempt that was sent before
the window shrank says nothing about the smaller window.

The window is pure: each event returns the next value. The status of the subscription shows an endpoint that accepted
no message for several attempts: since when, the last answer, the breaker and the window.
"""

import asyncio
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from purveyor import __version__
from purveyor.delivery.push.http_pool import HostPool, HttpPool, describe_connect_error
from purveyor.delivery.push.push_reports import EndpointFailure, PushReporter
from purveyor.delivery.push.push_request import CONTENT_TYPE, PushSecrets, SecretCipher, encode, read_envelope
from purveyor.delivery.push.settlement import Action, Decision, Outcome
from purveyor.delivery.transitions import DeliveredMessage
from purveyor.model.delivery_policy import HIDDEN, Endpoint, Push
from purveyor.model.errors import Refused
from purveyor.model.retries import FAILURES_TO_OPEN, BreakerState, CircuitBreaker, random_jitter
from purveyor.model.tracing import carrier_from_headers

INITIAL_WINDOW: Final = 4.0
SMALLEST_WINDOW: Final = 1.0
LARGEST_WINDOW: Final = 256.0
_SLOW_SHARE_OF_DEADLINE: Final = 0.5
_SHRINK_FACTOR: Final = 0.5
_USER_AGENT: Final = f"purveyor/{__version__}"
_REFUSED_PAUSE_SECONDS: Final = 30.0
_OTHER_PROBE_SECONDS: Final = 1.0
"""How long a subscription waits while another one probes the same endpoint."""


@dataclass(frozen=True, slots=True)
class FailureRun:
    """Failed attempts in a row, and how the last one ended."""

    attempts: int = 0
    since: datetime | None = None
    status: int | None = None
    error: str | None = None

    def plus(self, status: int | None, error: str | None) -> "FailureRun":
        """Add an attempt that failed now."""
        return FailureRun(self.attempts + 1, self.since or datetime.now(UTC), status, error)


class EndpointHealth:
    """The circuit breaker of one endpoint, shared by all subscriptions that push there."""

    def __init__(self) -> None:
        self.breaker = CircuitBreaker()
        self.listeners: set[Callable[[], None]] = set()
        """Called when the breaker closes."""
        self.refusal = ""
        """Why the egress policy refused the endpoint, if that was the last outcome."""
        self.failures = FailureRun()
        """The attempts of all subscriptions that found the endpoint down since the last success."""

    def state(self, now: float) -> BreakerState:
        """Return the state of the breaker."""
        return self.breaker.state(now)

    def record_success(self) -> None:
        """Close the breaker, and call the listeners if it was open."""
        if self.breaker.open_until is not None or self.breaker.failures:
            was_open = self.breaker.open_until is not None
            self.breaker, self.refusal, self.failures = self.breaker.record_success(), "", FailureRun()
            if was_open:
                for listener in [*self.listeners]:
                    listener()

    def record_failure(self, now: float) -> None:
        """Count a failure."""
        self.breaker = self.breaker.record_failure(now, random_jitter())

    def pause(self, now: float, seconds: float) -> None:
        """Open the breaker for the pause that the endpoint asks for."""
        self.breaker = self.breaker.pause(now, seconds)


@dataclass(frozen=True, slots=True)
class ConcurrencyWindow:
    """How many pushes may be in flight. `round` counts how often the window shrank."""

    size: float = INITIAL_WINDOW
    threshold: float = LARGEST_WINDOW
    round: int = 0

    @property
    def limit(self) -> int:
        """The number of pushes that may be in flight."""
        return int(self.size)

    def record_success(self, in_flight: int) -> "ConcurrencyWindow":
        """Grow after a success while `in_flight` were in flight, if at least half of the window was in use.

        >>> ConcurrencyWindow(4, 8).record_success(4), ConcurrencyWindow(8, 8).record_success(2).size
        (ConcurrencyWindow(size=5, threshold=8, round=0), 8)
        >>> ConcurrencyWindow(8, 8).record_success(8)
        ConcurrencyWindow(size=8.125, threshold=8, round=0)
        """
        if in_flight * 2 < self.size or self.size >= LARGEST_WINDOW:
            return self
        grown = self.size + (1 if self.size < self.threshold else 1 / self.size)
        return ConcurrencyWindow(min(grown, LARGEST_WINDOW), self.threshold, self.round)

    def record_failure(self, sent_in_round: int) -> "ConcurrencyWindow":
        """Shrink after an attempt that failed, or was slow, unless it was sent before the window last shrank.

        >>> ConcurrencyWindow(20, 256).record_failure(0)
        ConcurrencyWindow(size=10.0, threshold=10.0, round=1)
        >>> ConcurrencyWindow(20, 256).record_failure(0).record_failure(0)
        ConcurrencyWindow(size=10.0, threshold=10.0, round=1)
        """
        if sent_in_round < self.round:
            return self
        smaller = max(self.size * _SHRINK_FACTOR, SMALLEST_WINDOW)
        return ConcurrencyWindow(smaller, smaller, self.round + 1)


def is_slow(seconds: float, deadline_seconds: float) -> bool:
    """Return whether an acknowledgement came so late that more concurrent pushes would miss the deadline."""
    return seconds > deadline_seconds * _SLOW_SHARE_OF_DEADLINE


class EarliestTimer:
    """A timer that fires once, at the earliest of the times it is set to."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self._at = float("inf")
        self._handle: asyncio.Handle | None = None

    def set(self, seconds: float) -> None:
        """Fire after this many seconds, unless it fires earlier anyway."""
        at = self._loop.time() + seconds
        if at < self._at:
            self.cancel()
            self._at = at
            self._handle = self._loop.call_later(seconds, self._fire)

    def cancel(self) -> None:
        """Do not fire."""
        if self._handle is not None:
            self._handle.cancel()
        self._at, self._handle = float("inf"), None

    def _fire(self) -> None:
        self._at, self._handle = float("inf"), None
        self._callback()


class EndpointSender:
    """One subscription's access to one endpoint: requests, concurrency window and health."""

    def __init__(self, endpoint: Endpoint, health: EndpointHealth, host: HostPool) -> None:
        self.endpoint = endpoint
        self.health = health
        self.host = host
        self.window = ConcurrencyWindow()
        self.in_flight = 0
        self.is_probing = False
        """Whether it may send one message to test an endpoint whose breaker is half open."""
        self.failures = FailureRun()
        """The failed attempts of this subscription since the endpoint accepted its last message."""
        self.is_reported = False
        """Whether the status of the subscription shows a problem of the endpoint."""

    def configure(self, subscription: str, push: Push, secrets: PushSecrets) -> None:
        """Apply new settings; the window and the health stay."""
        self._subscription = subscription
        self._format = push.format
        self._secrets = secrets
        self._signer = secrets.signer(time.time())
        self._signer_valid_until = secrets.old_until if time.time() < secrets.old_until else float("inf")
        bearer = "" if secrets.bearer_token is None else f"authorization: Bearer {secrets.bearer_token}\r\n"
        self._head = (
            f"POST {self.endpoint.path} HTTP/1.1\r\nhost: {self.endpoint.authority}\r\nuser-agent: {_USER_AGENT}\r\n"
            f"accept: */*\r\ncontent-type: {CONTENT_TYPE}\r\n{bearer}"
        ).encode("latin-1")

    def capacity(self, now: float) -> int:
        """Return how many more messages may be sent."""
        if self.health.state(now) is BreakerState.CLOSED:
            return max(self.window.limit - self.in_flight, 0)
        return 1 if self.is_probing and not self.in_flight else 0

    def has_capacity(self, now: float) -> bool:
        """Return whether another message may be sent. It runs for every message, so it is fast."""
        if self.health.breaker.open_until is None:
            return self.window.size - self.in_flight >= 1
        return self.capacity(now) > 0

    def end_probe(self) -> None:
        """End a probe that was not used, or whose outcome is known."""
        if self.is_probing:
            self.is_probing = False
            self.health.breaker = self.health.breaker.cancel_probe()

    def build_request(self, message: DeliveredMessage) -> bytes:
        """Return the bytes of the request for a message."""
        now = time.time()
        if now >= self._signer_valid_until:
            self._signer, self._signer_valid_until = self._secrets.signer(now), float("inf")
        envelope = read_envelope(message, self._subscription)
        body, headers = encode(self._format, message, envelope, self._subscription)
        signature = self._signer.headers(envelope.id, int(now), body)
        found = carrier_from_headers(message.headers)
        trace = b"".join(b"%s: %s\r\n" % (name.encode(), value.encode()) for name, value in found.items())
        return b"%s%s%s%scontent-length: %d\r\n\r\n%s" % (self._head, headers, trace, signature, len(body), body)

    def without_secrets(self, outcome: Outcome) -> Outcome:
        """Remove the bearer token from an answer: some endpoints return the headers of the request."""
        token = self._secrets.bearer_token
        if token is None or not outcome.body:
            return outcome
        return outcome._replace(body=outcome.body.replace(token.encode(), HIDDEN.encode()))


class EndpointFactory:
    """Creates endpoint senders. All subscriptions of a worker share connections, and the health of each URL."""

    def __init__(self, http: HttpPool, cipher: SecretCipher) -> None:
        self._http = http
        self._cipher = cipher
        self._health: weakref.WeakValueDictionary[str, EndpointHealth] = weakref.WeakValueDictionary()

    def create_sender(self, endpoint: Endpoint) -> EndpointSender:
        """Create a sender for one endpoint."""
        health = self._health.get(endpoint.url)
        if health is None:
            health = self._health[endpoint.url] = EndpointHealth()
        return EndpointSender(endpoint, health, self._http.host(endpoint))

    def decrypt_secrets(self, push: Push) -> PushSecrets:
        """Decrypt the secrets of a definition; raise InvalidInput if one is not available."""
        return PushSecrets.decrypt(push, self._cipher)


class EndpointPool:
    """The endpoints of one subscription.

    It calls `wake` when there may be capacity that was not there before, and sets `timer` to when there may be.
    """

    def __init__(
        self,
        name: str,
        factory: EndpointFactory,
        reporter: PushReporter,
        *,
        wake: Callable[[], None],
        timer: EarliestTimer,
    ) -> None:
        self._name = name
        self._factory = factory
        self._reporter = reporter
        self._wake = wake
        self._timer = timer
        self._loop = asyncio.get_running_loop()
        self._senders: list[EndpointSender] = []
        self._probes: set[asyncio.Task[None]] = set()

    @property
    def window(self) -> int:
        """How many messages may be in flight to all endpoints."""
        return sum(sender.window.limit for sender in self._senders)

    def configure(self, push: Push) -> None:
        """Apply settings, and keep the state of endpoints that stay. Raise InvalidInput if a secret is missing."""
        known: dict[str, EndpointSender] = {sender.endpoint.url: sender for sender in self._senders}
        for sender in self._senders:
            sender.health.listeners.discard(self._wake)
        self._senders = []
        secrets = self._factory.decrypt_secrets(push)
        for endpoint in push.targets:
            found = known.pop(endpoint.url, None)
            sender = self._factory.create_sender(endpoint) if found is None else found
            sender.configure(self._name, push, secrets)
            sender.health.listeners.add(self._wake)
            self._senders.append(sender)
        for removed in known.values():
            removed.end_probe()
            self._reporter.clear_failing(removed.endpoint.url)

    def capacity(self) -> int:
        """Return how many messages can be sent now, and start probes of endpoints that are down."""
        now = self._loop.time()
        total = 0
        for sender in self._senders:
            if sender.health.state(now) is not BreakerState.CLOSED and not sender.is_probing:
                self._probe_when_due(sender, now)
            if sender.is_reported or sender.failures.attempts or sender.health.breaker.open_until is not None:
                self._report(sender, now)
            total += sender.capacity(now)
        return total

    def _report(self, sender: EndpointSender, now: float) -> None:
        """Show in the status of the subscription why an endpoint gets no messages, or that it accepts them again."""
        health = sender.health
        failures = sender.failures if sender.failures.attempts else health.failures
        state = health.state(now)
        if health.refusal:
            self._reporter.set_problem(sender.endpoint.url, health.refusal)
        elif failures.since and (failures.attempts >= FAILURES_TO_OPEN or state is not BreakerState.CLOSED):
            failure = EndpointFailure(
                endpoint=sender.endpoint.url,
                since=failures.since,
                attempts=failures.attempts,
                status=failures.status,
                error=failures.error,
                breaker=state.value,
                window=sender.window.limit,
            )
            self._reporter.set_failing(failure)
        elif sender.is_reported and state is BreakerState.CLOSED:
            self._reporter.clear_failing(sender.endpoint.url)
            sender.is_reported = False
            return
        else:
            return
        sender.is_reported = True

    def choose(self, now: float) -> EndpointSender | None:
        """Return the endpoint with the most capacity; None if there is none."""
        if len(self._senders) == 1:
            only = self._senders[0]
            return only if only.has_capacity(now) else None
        found = max(self._senders, key=lambda sender: sender.capacity(now), default=None)
        return found if found is not None and found.capacity(now) else None

    def record(
        self, sender: EndpointSender, outcome: Outcome, decision: Decision, *, sent_in_round: int, is_slow: bool
    ) -> None:
        """Update window and health after an attempt. `sent_in_round`: the round of the window when it was sent."""
        if decision.action is Action.ACKNOWLEDGE:
            if is_slow:
                sender.window = sender.window.record_failure(sent_in_round)
            else:
                sender.window = sender.window.record_success(sender.in_flight)
            sender.health.record_success()
            sender.is_probing = False
            if sender.failures.attempts:
                sender.failures = FailureRun()
            return
        now, health = self._loop.time(), sender.health
        if outcome.refused:
            health.pause(now, _REFUSED_PAUSE_SECONDS)
            health.refusal = outcome.summary
            self._reporter.report_event("refused", outcome.summary)
        elif outcome.sent:
            health.refusal = ""
            sender.window = sender.window.record_failure(sent_in_round)
            sender.failures = sender.failures.plus(outcome.status, outcome.error)
            if outcome.is_endpoint_down:
                health.record_failure(now)
                health.failures = health.failures.plus(outcome.status, outcome.error)
            else:  # it answers, and rejects this message
                health.record_success()
            if decision.pause_seconds:
                health.pause(now, decision.pause_seconds)
            if health.state(now) is BreakerState.OPEN:
                self._reporter.report_event("down", f"{sender.endpoint.url}: {outcome.summary}")
        sender.end_probe()

    def end_probes(self) -> None:
        """End probes that no message can use, because the queue is empty."""
        for sender in self._senders:
            if not sender.in_flight:
                sender.end_probe()

    async def close(self) -> None:
        """Cancel probes and stop listening to the health of the endpoints."""
        for probe in self._probes:
            probe.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        for sender in self._senders:
            sender.health.listeners.discard(self._wake)
            sender.end_probe()

    def _probe_when_due(self, sender: EndpointSender, now: float) -> None:
        breaker = sender.health.breaker
        if breaker.open_until is not None and now < breaker.open_until:
            self._timer.set(breaker.open_until - now + 0.001)
        elif breaker.may_send(now):
            sender.health.breaker = breaker.start_probe()
            task = self._loop.create_task(self._probe(sender))
            self._probes.add(task)
            task.add_done_callback(self._probes.discard)
        else:
            self._timer.set(_OTHER_PROBE_SECONDS)

    async def _probe(self, sender: EndpointSender) -> None:
        health = sender.health
        try:
            await sender.host.probe()
        except Exception as error:  # noqa: BLE001 - a probe without an outcome would keep the breaker half open forever
            health.record_failure(self._loop.time())
            reason = describe_connect_error(error)
            health.refusal = reason if isinstance(error, Refused) else ""
            health.failures = health.failures.plus(None, reason)
            sender.failures = sender.failures.plus(None, reason)
            event = "refused" if health.refusal else "down"
            self._reporter.report_event(event, f"{sender.endpoint.url}: {reason}")
        except asyncio.CancelledError:
            health.breaker = health.breaker.cancel_probe()
            raise
        else:
            sender.is_probing, health.refusal = True, ""
        self._wake()

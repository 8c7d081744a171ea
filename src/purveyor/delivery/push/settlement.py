"""Decide about a message after an attempt to push it, and settle it.

`decide` decides from the outcome: acknowledge, retry later, give up. It is pure. `ResultSettler` collects the results
of a subscription, logs failures, parks messages that are given up, and commits the delivery state.
"""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Final, NamedTuple

from purveyor.delivery.dead_letters.park import MAX_EXCERPT_CHARACTERS
from purveyor.delivery.push.push_leases import PushLeases, Settlement
from purveyor.delivery.push.push_reports import AttemptLog, PushReporter
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.delivery.transitions import DeliveredMessage, to_ack_target
from purveyor.model.delivery_policy import LONGEST_DELAY_SECONDS, Push, RetryPolicy
from purveyor.model.errors import PurveyorError, UnknownSubscription
from purveyor.model.json_fields import Json
from purveyor.model.subscription import Subscription

_STATUS_GONE: Final = 410
_STATUSES_BUSY: Final = frozenset({408, 425, 429})
_STATUSES_ASKING_FOR_PAUSE: Final = frozenset({429, 503})


class Action(Enum):
    """The ways to settle a message."""

    ACKNOWLEDGE = "acknowledge"
    RETRY = "retry"
    GIVE_UP = "give up"
    DISABLE = "disable"
    """The endpoint is gone for good: pause the subscription, and keep the message in its queue."""
    RELEASE = "release"
    """The message was not sent: this does not count as an attempt."""


class Outcome(NamedTuple):
    """How an attempt ended: with a status, or without one and with an error."""

    status: int | None = None
    error: str | None = None
    retry_after: str | None = None
    """The Retry-After header as received."""
    body: bytes = b""
    """The beginning of the response body."""
    sent: bool = True
    refused: bool = False
    """Whether the egress policy refused the endpoint."""

    @property
    def is_endpoint_down(self) -> bool:
        """Whether the outcome says something about the endpoint rather than about the message."""
        return self.status is None or self.status >= 500 or self.status in _STATUSES_BUSY

    @property
    def excerpt(self) -> str:
        """The beginning of the response body as one printable line."""
        text = self.body[: MAX_EXCERPT_CHARACTERS * 4].decode("utf-8", "replace")
        printable = "".join(char if char.isprintable() else " " for char in text)
        return " ".join(printable.split())[:MAX_EXCERPT_CHARACTERS]

    @property
    def summary(self) -> str:
        """The error, or the status."""
        return self.error or (f"status {self.status}" if self.status is not None else "no answer")

    @property
    def summary_with_excerpt(self) -> str:
        """The summary and the beginning of the response, as the reason of a dead letter quotes them."""
        return f"{self.summary}: {self.excerpt}" if self.excerpt else self.summary

    def to_log_entry(self, at: datetime) -> Json:
        """Return the entry for the attempt log of a dead letter."""
        return {"time": at.isoformat(), "status": self.status, "error": self.error, "excerpt": self.excerpt}


@dataclass(frozen=True, slots=True)
class Decision:
    """The action. `delay_seconds`: before the retry. `pause_seconds`: the endpoint asks for no requests this long."""

    action: Action
    delay_seconds: float = 0.0
    pause_seconds: float = 0.0


_ACKNOWLEDGE: Final = Decision(Action.ACKNOWLEDGE)


def decide(outcome: Outcome, push: Push, retry: RetryPolicy, attempt: int, jitter: float) -> Decision:
    """Decide. `attempt` counts this one; `jitter` from 0 to 1 spreads messages that failed at the same time."""
    status = outcome.status
    if status is not None and push.ack_codes.acknowledges(status):
        return _ACKNOWLEDGE
    if not outcome.sent:
        return Decision(Action.RELEASE)
    if status == _STATUS_GONE:
        return Decision(Action.DISABLE)
    requested = retry_after_seconds(outcome.retry_after, datetime.now(UTC))
    pause = requested if status in _STATUSES_ASKING_FOR_PAUSE else 0.0
    if retry.max_attempts is not None and attempt >= retry.max_attempts:
        return Decision(Action.GIVE_UP, pause_seconds=pause)
    return Decision(Action.RETRY, max(backoff_seconds(retry, attempt, jitter), requested), pause)


def backoff_seconds(retry: RetryPolicy, attempt: int, jitter: float) -> float:
    """Return the delay before the next attempt: doubled each time, with up to half of it random.

    >>> policy = RetryPolicy(min_backoff_seconds=1.0, max_backoff_seconds=60.0)
    >>> [backoff_seconds(policy, attempt, 0.0) for attempt in (1, 2, 3, 10)]
    [1.0, 1.0, 2.0, 30.0]
    >>> [backoff_seconds(policy, attempt, 1.0) for attempt in (1, 2, 3, 10)]
    [1.0, 2.0, 4.0, 60.0]
    """
    full = retry.backoff_seconds(attempt)
    return max(full * (0.5 + jitter / 2), min(retry.min_backoff_seconds, full))


def retry_after_seconds(text: str | None, now: datetime) -> float:
    """Return the delay that a `Retry-After` header asks for, in seconds or as a date; 0 if it is not readable.

    >>> retry_after_seconds("120", datetime(2026, 1, 1, tzinfo=UTC))
    120.0
    >>> retry_after_seconds("Thu, 01 Jan 2026 00:00:30 GMT", datetime(2026, 1, 1, tzinfo=UTC))
    30.0
    """
    if not text:
        return 0.0
    try:
        seconds = float(text)
    except ValueError:
        try:
            at = parsedate_to_datetime(text)
        except (ValueError, TypeError, OverflowError):
            return 0.0
        seconds = ((at if at.tzinfo else at.replace(tzinfo=UTC)) - now).total_seconds()
    if not math.isfinite(seconds):
        return 0.0
    return min(max(seconds, 0.0), LONGEST_DELAY_SECONDS)


_PARKING: Final = "parking a message"
_FAILURES: Final = (Action.RETRY, Action.GIVE_UP, Action.DISABLE)
_ACKED: Final = (Action.ACKNOWLEDGE, Action.GIVE_UP)
_RELEASED: Final = (Action.DISABLE, Action.RELEASE)


@dataclass(slots=True, eq=False)
class PushResult:
    """The result of an attempt until it is settled. `at` is a Unix time."""

    message: DeliveredMessage
    outcome: Outcome
    decision: Decision
    at: float
    is_logged: bool = False
    is_parked: bool = False

    @property
    def is_failure(self) -> bool:
        """Whether an attempt failed."""
        return self.decision.action in _FAILURES

    @property
    def ends_attempt_log(self) -> bool:
        """Whether the attempt log of the message is no longer needed."""
        action = self.decision.action
        return action is Action.GIVE_UP or (action is Action.ACKNOWLEDGE and self.message.num_delivered > 1)


class ResultSettler:
    """Settles the results of one subscription."""

    def __init__(
        self, reporter: PushReporter, *, leases: PushLeases, attempts: AttemptLog, subscriptions: Subscriptions
    ) -> None:
        self._reporter = reporter
        self._name = reporter.name
        self._incarnation = reporter.incarnation
        self._leases = leases
        self._attempts = attempts
        self._subscriptions = subscriptions

    async def settle(
        self,
        results: Sequence[PushResult],
        released: Sequence[int],
        definition: Subscription,
        *,
        renew_milliseconds: int | None,
    ) -> Settlement:
        """Settle results, and release messages that were leased and not sent. The caller repeats it if it fails.

        1. Log the attempts that failed. 2. Park the messages that are given up. 3. Pause the subscription if its
        endpoint is gone. 4. Commit the delivery state. Afterwards `delete_logs` deletes attempt logs that are no longer
        needed. A crash before 4 leaves a lease that expires: the message is sent, or parked, again.
        """
        await self._log_failures(results)
        await self._park(results, retry_seconds=definition.retry.max_backoff_seconds)
        if any(each.decision.action is Action.DISABLE for each in results):
            endpoints = () if definition.push is None else definition.push.endpoints
            reason = f"{', '.join(endpoints)} is gone (410)"
            await self._subscriptions.pause(self._name, reason)
            self._reporter.report_event("disabled", reason)
        settlement = build_settlement(results, released, self._leases.instance, renew_milliseconds)
        await self._leases.settle(self._name, self._incarnation, settlement)
        return settlement

    async def delete_logs(self, results: Sequence[PushResult]) -> None:
        """Delete the attempt logs of messages that are acknowledged or parked."""
        done = [each.message.sequence for each in results if each.ends_attempt_log]
        await asyncio.gather(*(self._attempts.delete(self._name, sequence) for sequence in done))

    async def _log_failures(self, results: Sequence[PushResult]) -> None:
        await asyncio.gather(*(self._log(each) for each in results if each.is_failure and not each.is_logged))

    async def _log(self, result: PushResult) -> None:
        message = result.message
        entry = result.outcome.to_log_entry(datetime.fromtimestamp(result.at, UTC))
        await self._attempts.append(self._name, self._incarnation, message.sequence, message.num_delivered, entry)
        result.is_logged = True

    async def _park(self, results: Sequence[PushResult], retry_seconds: float) -> None:
        """Park messages that are given up. If that fails for one, retry it later: the other results are settled."""
        given_up = [each for each in results if each.decision.action is Action.GIVE_UP]
        for each in given_up:
            if not each.is_parked:
                await self._park_one(each, retry_seconds)
        if all(each.is_parked for each in given_up):
            self._reporter.clear_failure(_PARKING)

    async def _park_one(self, result: PushResult, retry_seconds: float) -> None:
        message, outcome = result.message, result.outcome
        if outcome.sent:
            reason = (
                f"not acknowledged after {message.num_delivered} deliveries; the last: {outcome.summary_with_excerpt}"
            )
        else:
            reason = outcome.summary
        try:
            if not await self._leases.park(self._name, self._incarnation, message, reason):
                result.decision = Decision(Action.RELEASE)  # another instance has leased it, and decides about it
            result.is_parked = True
        except UnknownSubscription:
            raise
        except Exception as error:
            if isinstance(error, PurveyorError) and error.retryable:
                raise
            self._reporter.report_failure(_PARKING, error)
            result.decision = Decision(Action.RETRY, retry_seconds)


def build_settlement(
    results: Sequence[PushResult], released: Sequence[int], instance: str, renew_milliseconds: int | None
) -> Settlement:
    """Combine results and released messages into one settlement."""
    return Settlement(
        instance=instance,
        acked=[to_ack_target(each.message) for each in results if each.decision.action in _ACKED],
        retry_delays={
            each.message.sequence: round(each.decision.delay_seconds * 1000)
            for each in results
            if each.decision.action is Action.RETRY
        },
        released=[*released, *(each.message.sequence for each in results if each.decision.action in _RELEASED)],
        renew_milliseconds=renew_milliseconds,
    )

"""Settle the results of push attempts: log failures, park messages that are given up, commit the delivery state."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from purveyor.delivery.push.attempt_log import AttemptLog
from purveyor.delivery.push.push_leases import PushLeases, Settlement
from purveyor.delivery.push.push_problems import PushReporter
from purveyor.delivery.push.retry_decision import Action, Decision, Outcome
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.delivery.transitions import DeliveredMessage, to_ack_target
from purveyor.model.errors import PurveyorError, UnknownSubscription
from purveyor.model.subscription import Subscription

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

"""Messages of one subscription that an endpoint did not take: notes of the attempts, and dead letters."""

import asyncio
from collections.abc import Sequence
from typing import Final

from purveyor.delivery.push.answer import Answer
from purveyor.delivery.push.attempt_log import note
from purveyor.delivery.push.endpoint_sender import utc
from purveyor.delivery.push.push_metrics import Reports
from purveyor.delivery.push.push_services import Shop
from purveyor.delivery.push.retry_decision import Verdict, What
from purveyor.model.errors import PurveyorError, UnknownSubscription

_PARKING: Final = "parking a message"


class Failures:
    """See the module."""

    def __init__(self, shop: Shop, reports: Reports, name: str, incarnation: str) -> None:
        self._shop = shop
        self._reports = reports
        self._name = name
        self._incarnation = incarnation

    async def note(self, answers: Sequence[Answer]) -> None:
        """Note the attempts that failed, each once."""
        await asyncio.gather(*(self._note(each) for each in answers if each.is_failure and not each.noted))

    async def park(self, answers: Sequence[Answer], again_seconds: float) -> None:
        """Park what is given up. One that cannot be parked is sent again later: the other answers are settled."""
        given_up = [each for each in answers if each.verdict.what is What.GIVE_UP]
        for each in given_up:
            if not each.parked:
                await self._park(each, again_seconds)
        if all(each.parked for each in given_up):
            self._reports.recovered(_PARKING)

    async def forget(self, answers: Sequence[Answer]) -> None:
        """Remove notes of messages that are done with."""
        done = [each.message.sequence for each in answers if each.needs_no_notes]
        await asyncio.gather(*(self._shop.attempts.forget(self._name, each, failed_before=True) for each in done))

    async def _note(self, answer: Answer) -> None:
        message = answer.message
        entry = answer.outcome.log_entry(utc(answer.at))
        await self._shop.attempts.add(self._name, self._incarnation, message.sequence, message.num_delivered, entry)
        answer.noted = True

    async def _park(self, answer: Answer, again_seconds: float) -> None:
        message = answer.message
        reason = f"not acknowledged after {message.num_delivered} deliveries; the last: {note(answer.outcome)}"
        if not answer.outcome.sent:
            reason = answer.outcome.words
        try:
            if not await self._shop.counter.park(self._name, self._incarnation, message, reason):
                answer.verdict = Verdict(What.RELEASE)  # another has it: what becomes of it is for that one to say
            answer.parked = True
        except UnknownSubscription:
            raise
        except Exception as error:
            if isinstance(error, PurveyorError) and error.retryable:
                raise
            self._reports.setback(_PARKING, error)
            answer.verdict = Verdict(What.RETRY, again_seconds)

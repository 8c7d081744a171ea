"""What came back for a message, until that stands in the book; and many of those as one change of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from purveyor.delivery.push.retry_decision import Outcome, Verdict, What
from purveyor.delivery.push.settlement import Answers
from purveyor.delivery.transitions import Delivered, acked

_FAILURES: Final = (What.RETRY, What.GIVE_UP, What.DISABLE)
_DONE: Final = (What.ACKNOWLEDGE, What.GIVE_UP)
_UNUSED: Final = (What.DISABLE, What.RELEASE)


@dataclass(slots=True, eq=False)
class Answer:
    """See the module. `at` is a time of the wall clock."""

    message: Delivered
    outcome: Outcome
    verdict: Verdict
    at: float
    noted: bool = False
    parked: bool = False

    @property
    def is_failure(self) -> bool:
        """Whether an attempt failed."""
        return self.verdict.what in _FAILURES

    @property
    def needs_no_notes(self) -> bool:
        """Whether what failed before is of no use any more."""
        what = self.verdict.what
        return what is What.GIVE_UP or (what is What.ACKNOWLEDGE and self.message.num_delivered > 1)


def together(answers: Sequence[Answer], unused: Sequence[int], instance: str, renew: int | None) -> Answers:
    """Answers and messages that were not used, as the book takes them. `renew` as there."""
    return Answers(
        instance=instance,
        acknowledged=[acked(each.message) for each in answers if each.verdict.what in _DONE],
        again={
            each.message.sequence: round(each.verdict.delay_seconds * 1000)
            for each in answers
            if each.verdict.what is What.RETRY
        },
        unused=[*unused, *(each.message.sequence for each in answers if each.verdict.what in _UNUSED)],
        renew=renew,
    )

"""What the push of one subscription tells operators: events for the log, the reason why it is hindered, setbacks.

A setback is an exception that nothing in the loop expects. The loop goes on after a pause; pauses double while setbacks
follow each other. The first setback of a series, and each with a new reason, is logged with its traceback. Until the
same work succeeds again, the reason is shown in the status of the subscription.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from purveyor.delivery.push.push_problems import Troubles
from purveyor.model.errors import PurveyorError, describe

_log = logging.getLogger(__name__)
AWAY_SECONDS: Final = 1.0
"""The pause after an error that a second attempt may cure: the server is away."""
_FIRST_PAUSE_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 60.0
_CALM_SECONDS: Final = 60.0
"""After this time without a setback a new series begins."""


class Setbacks:
    """The series of unexpected exceptions of one loop. `what` names the loop in the log."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._count = 0
        self._last_at = float("-inf")
        self._logged = ""

    def add(self, error: BaseException, now: float) -> str:
        """Count an exception, log it if it is new, and return it in words."""
        if now - self._last_at > self.pause_seconds + _CALM_SECONDS:
            self._count, self._logged = 0, ""
        self._count += 1
        self._last_at = now
        words = describe(error)
        if words != self._logged:
            self._logged = words
            _log.error("%s failed, and goes on after a pause: %s", self._what, words, exc_info=error)
        return words

    @property
    def pause_seconds(self) -> float:
        """How long the loop pauses now."""
        if not self._count:
            return 0.0
        return min(_FIRST_PAUSE_SECONDS * 2.0 ** min(self._count - 1, 16), _LONGEST_PAUSE_SECONDS)


class Reports:
    """See the module. `tell` gets the subscription, an event in a word, and words."""

    def __init__(self, name: str, incarnation: str, troubles: Troubles, tell: Callable[[str, str, str], None]) -> None:
        self._name = name
        self._incarnation = incarnation
        self._troubles = troubles
        self._tell = tell
        self._said = ""
        self._hindrances: dict[str, str] = {}
        """Why nothing is sent to an endpoint, or to none; by what is hindered."""
        self._setbacks: dict[str, Setbacks] = {}

    def say(self, event: str, words: str) -> None:
        """Tell an event; the same words are told once."""
        if words != self._said:
            self._said = words
            self._tell(self._name, event, words)

    def said_nothing(self) -> None:
        """Messages are delivered: tell the next event even if its words are the last ones."""
        self._said = ""

    def hindered(self, what: str, words: str) -> None:
        """Show in the status why something is hindered; without words: it no longer is."""
        if words:
            self._hindrances[what] = words
        elif self._hindrances.pop(what, None) is None:
            return
        reason = "; ".join(dict.fromkeys(self._hindrances.values()))
        self._troubles.tell(self._name, self._incarnation, reason)

    def setback(self, what: str, error: Exception) -> float:
        """Report that `what` failed, and return the seconds to pause before it is tried again."""
        if isinstance(error, PurveyorError) and error.retryable:
            self.say("trouble", str(error))
            return AWAY_SECONDS
        series = self._setbacks.setdefault(what, Setbacks(f"push of subscription {self._name}: {what}"))
        words = f"{what} failed: {series.add(error, asyncio.get_running_loop().time())}"
        self.say("failed", words)
        self.hindered(what, words)
        return series.pause_seconds

    def recovered(self, what: str) -> None:
        """Take back what was shown about a setback of `what`."""
        if what in self._hindrances:
            self.hindered(what, "")

    def close(self) -> None:
        """Take back all that is shown."""
        self._troubles.tell(self._name, self._incarnation, "")

"""The restart rule of everything that is supervised: the parts of `up`, the embedded server, the parts of the pipeline.

    a run ends by itself ──▶ RestartAfter a delay that grows while runs are short
                        └──▶ GiveUp: another start would end the same way

A supervisor makes one `Restarts` for each thing that it runs, reports the end of each run to it, and acts on the
decision. `Restarts` starts nothing and reads no clock.
"""

from collections import deque
from dataclasses import dataclass

from purveyor.model.backoff import Backoff
from purveyor.model.errors import InvalidConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Restart with growing pauses; give up after `max_deaths` deaths within `window_seconds`."""

    max_deaths: int | None = 5
    """None: any number of deaths is followed by another start."""
    window_seconds: float = 60.0
    """A run of at least this length was healthy: the pauses begin again with the first one."""
    first_pause_seconds: float = 0.1
    max_pause_seconds: float = 5.0

    def __post_init__(self) -> None:
        too_few = self.max_deaths is not None and self.max_deaths < 1
        if too_few or min(self.window_seconds, self.first_pause_seconds, self.max_pause_seconds) < 0:
            raise InvalidConfig(f"invalid restart policy {self}", fix="allow at least one death, and no negative times")

    @property
    def backoff(self) -> Backoff:
        """The pauses between short runs."""
        return Backoff(self.first_pause_seconds, self.max_pause_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How one run ended, although the supervisor did not stop it."""

    ran_seconds: float
    was_ready: bool = True
    """It did its work, at least for a moment."""
    exit_code: int | None = None
    """Of a process: positive if it ended by itself with an error, negative if a signal ended it."""
    is_permanent: bool = False
    """It failed with an error that no other attempt can cure."""


@dataclass(frozen=True, slots=True)
class RestartAfter:
    """Start it again after a pause."""

    pause_seconds: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Do not start it again, after this many deaths within the window of the policy."""

    deaths: int


class Restarts:
    """The deaths of one supervised thing, and the decision after each of them."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._was_ready = False
        self._short_runs = 0
        self._deaths = deque[float](maxlen=policy.max_deaths or 1)

    def decide(self, end: RunEnd, now: float) -> RestartAfter | GiveUp:
        """Decide what follows a run that ended at `now`, in seconds of a clock that never goes back.

        >>> restarts = Restarts(RestartPolicy(max_deaths=3, first_pause_seconds=0.1))
        >>> [restarts.decide(RunEnd(ran_seconds=1.0), now) for now in (10.0, 11.0, 12.0)]
        [RestartAfter(pause_seconds=0.1), RestartAfter(pause_seconds=0.2), GiveUp(deaths=3)]

        A process that exits with an error before it was ever ready says what is wrong, and would say the same again:

        >>> Restarts(RestartPolicy()).decide(RunEnd(ran_seconds=1.0, was_ready=False, exit_code=2), 10.0)
        GiveUp(deaths=1)
        """
        policy = self._policy
        self._was_ready = self._was_ready or end.was_ready
        self._deaths.append(now)
        recent = sum(1 for death in self._deaths if death >= now - policy.window_seconds)
        never_worked = not self._was_ready and end.exit_code is not None and end.exit_code > 0
        too_often = policy.max_deaths is not None and recent >= policy.max_deaths
        if end.is_permanent or never_worked or too_often:
            return GiveUp(recent)
        self._short_runs = 1 if end.ran_seconds >= policy.window_seconds else self._short_runs + 1
        return RestartAfter(policy.backoff.delay_seconds(self._short_runs))


__all__ = ["GiveUp", "RestartAfter", "RestartPolicy", "Restarts", "RunEnd"]

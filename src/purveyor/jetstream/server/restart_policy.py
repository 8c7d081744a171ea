"""When a dead server is started again, and when that is no longer worth trying. Pure: decides, and does nothing."""

from collections.abc import Sequence
from dataclasses import dataclass

from purveyor.model.errors import InvalidConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """Start again with growing pauses, unless it died `max_deaths` times within `window_seconds`."""

    max_deaths: int = 5
    window_seconds: float = 60.0
    first_pause_seconds: float = 0.1
    max_pause_seconds: float = 5.0

    def __post_init__(self) -> None:
        if self.max_deaths < 1 or min(self.window_seconds, self.first_pause_seconds, self.max_pause_seconds) < 0:
            raise InvalidConfig(f"invalid restart policy {self}", fix="allow at least one death, and no negative times")


@dataclass(frozen=True, slots=True)
class RestartAfter:
    """Start the server again after a pause."""

    pause_seconds: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Leave it dead: it died too often in too short a time."""

    deaths: int


Decision = RestartAfter | GiveUp


def decide(policy: RestartPolicy, deaths: Sequence[float]) -> Decision:
    """What to do after the last of these deaths (monotonic seconds, oldest first).

    >>> decide(RestartPolicy(max_deaths=3, first_pause_seconds=0.1), [10.0, 11.0])
    RestartAfter(pause_seconds=0.2)
    >>> decide(RestartPolicy(max_deaths=3), [10.0, 11.0, 12.0])
    GiveUp(deaths=3)
    """
    recent = sum(1 for death in deaths if death >= deaths[-1] - policy.window_seconds)
    if recent >= policy.max_deaths:
        return GiveUp(recent)
    return RestartAfter(min(policy.first_pause_seconds * 2 ** (recent - 1), policy.max_pause_seconds))


__all__ = ["Decision", "GiveUp", "RestartAfter", "RestartPolicy", "decide"]

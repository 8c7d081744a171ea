"""When a part that died is started again, and when it is not worth trying. Pure: decides, and does nothing."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Pauses that grow with each death, until a life has lasted for a while."""

    first_seconds: float = 0.5
    longest_seconds: float = 30.0
    calm_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class Life:
    """How one life of a part ended without our asking: its exit code (negative: a signal), and how long it was."""

    code: int
    seconds: float
    came_up: bool


@dataclass(frozen=True, slots=True)
class Past:
    """What counts of the lives before: whether one of them came up, and how many ended soon, one after another."""

    came_up: bool = False
    short: int = 0


@dataclass(frozen=True, slots=True)
class Again:
    """Start it again after a pause."""

    pause_seconds: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """It ended by itself before it ever worked: it says what is wrong, and another start would say the same."""


def after(past: Past, life: Life, backoff: Backoff) -> tuple[Past, Again | GiveUp]:
    """What to do when a life is over.

    >>> past, decision = after(Past(), Life(-9, 3.0, came_up=True), Backoff())
    >>> decision
    Again(pause_seconds=0.5)
    >>> after(past, Life(1, 3.0, came_up=False), Backoff())[1]
    Again(pause_seconds=1.0)
    >>> after(Past(), Life(1, 3.0, came_up=False), Backoff())[1]
    GiveUp()
    """
    past = replace(past, came_up=past.came_up or life.came_up)
    if not past.came_up and life.code > 0:
        return past, GiveUp()
    short = 1 if life.seconds >= backoff.calm_seconds else past.short + 1
    # The exponent has a limit of its own: a number of deaths has none.
    pause = min(backoff.first_seconds * 2 ** min(short - 1, 16), backoff.longest_seconds)
    return replace(past, short=short), Again(pause)

"""How long a part of the pipeline that ended with an error waits before it is started again. Pure."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Pauses that double from `first_seconds` to `longest_seconds`; whoever was well for long enough begins anew."""

    first_seconds: float = 1.0
    longest_seconds: float = 30.0
    healthy_seconds: float = 60.0
    failures: int = 0

    def failed(self, ran_seconds: float) -> "Backoff":
        """After one more failure, of a part that had run for so long."""
        return replace(self, failures=1 if ran_seconds >= self.healthy_seconds else self.failures + 1)

    @property
    def pause_seconds(self) -> float:
        """How long to wait now.

        >>> tries = [Backoff(failures=number).pause_seconds for number in range(8)]
        >>> tries
        [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
        """
        if self.failures == 0:
            return 0.0
        doublings = min(self.failures - 1, 30)  # a part may fail for years: keep the power small
        return min(self.first_seconds * 2.0**doublings, self.longest_seconds)

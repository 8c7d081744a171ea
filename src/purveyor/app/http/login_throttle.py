"""How often logins may fail before they have to wait. Pure; the time is given in.

Failures of the last minute, and attempts whose outcome is not known yet, are counted three times:

    for one login from one address   10; 1 while the login fails from everywhere
    for one address                  100, passwords and tokens apart
    for one login from everywhere    100; it refuses nobody by itself, but makes the first limit strict

So an address cannot try many passwords, many addresses together can try few, and whoever fails at a login never locks
it for another address.
"""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

WINDOW_SECONDS: Final = 60.0
MOST_PER_PAIR: Final = 10
MOST_PER_PAIR_UNDER_ATTACK: Final = 1
MOST_PER_ADDRESS: Final = 100
MOST_PER_LOGIN: Final = 100
MOST_KEPT: Final = 20_000
"""Counts of each kind; the oldest give way."""


class Kind(Enum):
    """What a client logs in with."""

    PASSWORD = "password"
    TOKEN = "token"


@dataclass(frozen=True, slots=True)
class Attempt:
    """A login from an address. The name of a login is the client's choice, so only its digest is kept."""

    address: str
    kind: Kind
    login: bytes

    @classmethod
    def of(cls, address: str, kind: Kind, login: str) -> "Attempt":
        """Return the attempt of a user, or of the id of a token."""
        name = f"{kind.value}:{login}".encode("utf-8", "surrogatepass")
        return cls(address, kind, hashlib.blake2b(name, digest_size=16).digest())


class Ruling(Enum):
    """What becomes of an attempt."""

    ADMITTED = auto()
    AFTER_OTHERS = auto()
    """If those under way fail, it is refused; if not, it is admitted."""
    REFUSED = auto()


@dataclass(slots=True)
class _Count:
    since: float = 0.0
    failures: int = 0
    under_way: int = 0

    def forget_old(self, now: float) -> None:
        if now - self.since >= WINDOW_SECONDS:
            self.failures = 0

    def ruling(self, most: int) -> Ruling:
        if self.failures >= most:
            return Ruling.REFUSED
        return Ruling.AFTER_OTHERS if self.failures + self.under_way >= most else Ruling.ADMITTED


class _Counts:
    """The counts of one kind, with a limit of how many there are."""

    def __init__(self) -> None:
        self._kept: OrderedDict[object, _Count] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: object, now: float) -> _Count:
        """Return the count of a key for reading."""
        found = self._kept.get(key)
        if found is None:
            return _Count()
        found.forget_old(now)
        return found

    def begin(self, key: object, now: float) -> None:
        """Count an attempt whose outcome is not known."""
        found = self._kept.setdefault(key, _Count())
        found.forget_old(now)
        found.under_way += 1
        self._kept.move_to_end(key)
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)

    def end(self, key: object, now: float, *, failed: bool) -> None:
        """Count the outcome of an attempt."""
        found = self._kept.get(key)
        if found is None:  # it had to give way
            return
        found.forget_old(now)
        found.under_way = max(found.under_way - 1, 0)
        if failed:
            found.since = found.since if found.failures else now
            found.failures += 1
        elif not found.failures and not found.under_way:
            del self._kept[key]

    def forgive(self, key: object) -> None:
        """Forget the failures of a key."""
        if key in self._kept:
            self._kept[key].failures = 0


class LoginLimits:
    """See the module."""

    def __init__(self) -> None:
        self._pairs = _Counts()
        self._addresses = _Counts()
        self._logins = _Counts()

    def __len__(self) -> int:
        """Return how many counts there are."""
        return len(self._pairs) + len(self._addresses) + len(self._logins)

    def ask(self, attempt: Attempt, now: float) -> tuple[Ruling, float]:
        """Decide about an attempt, and return after how many seconds one that is refused may be made again."""
        login = self._logins.get(attempt.login, now)
        attacked = login.failures + login.under_way >= MOST_PER_LOGIN
        found = (
            (self._pairs.get(_pair(attempt), now), MOST_PER_PAIR_UNDER_ATTACK if attacked else MOST_PER_PAIR),
            (self._addresses.get(_address(attempt), now), MOST_PER_ADDRESS),
        )
        rulings = [count.ruling(most) for count, most in found]
        if Ruling.REFUSED in rulings:
            until = max(
                count.since for (count, _), ruling in zip(found, rulings, strict=True) if ruling is Ruling.REFUSED
            )
            return Ruling.REFUSED, until + WINDOW_SECONDS - now
        return Ruling.AFTER_OTHERS if Ruling.AFTER_OTHERS in rulings else Ruling.ADMITTED, 0.0

    def begin(self, attempt: Attempt, now: float) -> None:
        """Count an attempt before it is known how it ends: a thousand at once are a thousand."""
        for counts, key in self._of(attempt):
            counts.begin(key, now)

    def failed(self, attempt: Attempt, now: float) -> None:
        """Count that it was wrong."""
        self._end(attempt, now, failed=True)

    def succeeded(self, attempt: Attempt, now: float) -> None:
        """Count that it was right, and forget what went wrong with this login at this address before."""
        self._pairs.forgive(_pair(attempt))
        self._end(attempt, now, failed=False)

    def undecided(self, attempt: Attempt, now: float) -> None:
        """Count no more that it could not be checked."""
        self._end(attempt, now, failed=False)

    def _end(self, attempt: Attempt, now: float, *, failed: bool) -> None:
        for counts, key in self._of(attempt):
            counts.end(key, now, failed=failed)

    def _of(self, attempt: Attempt) -> tuple[tuple[_Counts, object], ...]:
        return (
            (self._pairs, _pair(attempt)),
            (self._addresses, _address(attempt)),
            (self._logins, attempt.login),
        )


def _pair(attempt: Attempt) -> object:
    return (attempt.address, attempt.login)


def _address(attempt: Attempt) -> object:
    return (attempt.address, attempt.kind)

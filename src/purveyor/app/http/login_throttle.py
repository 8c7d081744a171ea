"""Limits for failed logins. Pure: the caller passes the time.

The throttle counts failures of the last minute, and attempts in progress, in three ways:

    for one login from one address   at most 10; 1 while the login is under attack
    for one address                  at most 100 failed passwords; tokens have no such limit
    for one login, all addresses     from 100 on the login is under attack; this alone refuses no attempt

So one address cannot try many passwords, many addresses together can try only a few, and failures at a login never
lock it for another address. A token is a long random secret, and its check is cheap: a limit for all tokens of an
address would only lock out other clients behind the same proxy.
"""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

WINDOW_SECONDS: Final = 60.0
MAX_FAILURES_PER_PAIR: Final = 10
MAX_FAILURES_PER_PAIR_UNDER_ATTACK: Final = 1
MAX_FAILURES_PER_ADDRESS: Final = 100
MAX_FAILURES_PER_LOGIN: Final = 100
MAX_COUNTS: Final = 20_000
"""The number of counts of each sort; the throttle drops the oldest beyond it."""


class CredentialKind(Enum):
    """The kind of credential with which a client logs in."""

    PASSWORD = "password"
    TOKEN = "token"


@dataclass(frozen=True, slots=True)
class Attempt:
    """A login from an address. A client chooses the name of the login, so the attempt keeps only a digest of it."""

    address: str
    kind: CredentialKind
    login: bytes

    @classmethod
    def of(cls, address: str, kind: CredentialKind, login: str) -> "Attempt":
        """Return the attempt of a user, or of a token by its id."""
        name = f"{kind.value}:{login}".encode("utf-8", "surrogatepass")
        return cls(address, kind, hashlib.blake2b(name, digest_size=16).digest())


class Decision(Enum):
    """The decision about an attempt."""

    ADMITTED = auto()
    WAIT = auto()
    """The outcome of the attempts in progress decides: it is refused if they fail."""
    REFUSED = auto()


@dataclass(slots=True)
class _Count:
    first_failure_at: float = 0.0
    failures: int = 0
    in_progress: int = 0

    def drop_expired(self, now: float) -> None:
        if now - self.first_failure_at >= WINDOW_SECONDS:
            self.failures = 0

    def decide(self, limit: int) -> Decision:
        if self.failures >= limit:
            return Decision.REFUSED
        return Decision.WAIT if self.failures + self.in_progress >= limit else Decision.ADMITTED


class _Counts:
    """The counts of one sort, at most `MAX_COUNTS`."""

    def __init__(self) -> None:
        self._counts: OrderedDict[object, _Count] = OrderedDict()

    def __len__(self) -> int:
        return len(self._counts)

    def get(self, key: object, now: float) -> _Count:
        """Return the count of a key for reading."""
        found = self._counts.get(key)
        if found is None:
            return _Count()
        found.drop_expired(now)
        return found

    def begin(self, key: object, now: float) -> None:
        """Count an attempt in progress."""
        found = self._counts.setdefault(key, _Count())
        found.drop_expired(now)
        found.in_progress += 1
        self._counts.move_to_end(key)
        while len(self._counts) > MAX_COUNTS:
            self._counts.popitem(last=False)

    def end(self, key: object, now: float, *, failed: bool) -> None:
        """Count the outcome of an attempt."""
        found = self._counts.get(key)
        if found is None:  # dropped by `begin`
            return
        found.drop_expired(now)
        found.in_progress = max(found.in_progress - 1, 0)
        if failed:
            found.first_failure_at = found.first_failure_at if found.failures else now
            found.failures += 1
        elif not found.failures and not found.in_progress:
            del self._counts[key]

    def reset_failures(self, key: object) -> None:
        """Set the failures of a key to zero."""
        if key in self._counts:
            self._counts[key].failures = 0


class LoginThrottle:
    """Counts failed logins and decides about new attempts."""

    def __init__(self) -> None:
        self._pairs = _Counts()
        self._addresses = _Counts()
        self._logins = _Counts()

    def __len__(self) -> int:
        """Return the number of counts."""
        return len(self._pairs) + len(self._addresses) + len(self._logins)

    def decide(self, attempt: Attempt, now: float) -> tuple[Decision, float]:
        """Decide about an attempt. For a refused one, return also the seconds until the client may try again."""
        login = self._logins.get(attempt.login, now)
        is_attacked = login.failures + login.in_progress >= MAX_FAILURES_PER_LOGIN
        pair_limit = MAX_FAILURES_PER_PAIR_UNDER_ATTACK if is_attacked else MAX_FAILURES_PER_PAIR
        found = [(self._pairs.get(_pair_key(attempt), now), pair_limit)]
        if attempt.kind is CredentialKind.PASSWORD:
            found.append((self._addresses.get(attempt.address, now), MAX_FAILURES_PER_ADDRESS))
        decisions = [count.decide(limit) for count, limit in found]
        if Decision.REFUSED in decisions:
            since = max(
                count.first_failure_at
                for (count, _), decision in zip(found, decisions, strict=True)
                if decision is Decision.REFUSED
            )
            return Decision.REFUSED, since + WINDOW_SECONDS - now
        return Decision.WAIT if Decision.WAIT in decisions else Decision.ADMITTED, 0.0

    def begin(self, attempt: Attempt, now: float) -> None:
        """Count an attempt before its outcome is known: so a thousand at once count as a thousand."""
        for counts, key in self._counts_of(attempt):
            counts.begin(key, now)

    def record_failure(self, attempt: Attempt, now: float) -> None:
        """Count a failed attempt."""
        self._end(attempt, now, failed=True)

    def record_success(self, attempt: Attempt, now: float) -> None:
        """End a successful attempt, and reset the failures of this login at this address."""
        self._pairs.reset_failures(_pair_key(attempt))
        self._end(attempt, now, failed=False)

    def cancel(self, attempt: Attempt, now: float) -> None:
        """End an attempt that could not be checked, without counting it."""
        self._end(attempt, now, failed=False)

    def _end(self, attempt: Attempt, now: float, *, failed: bool) -> None:
        for counts, key in self._counts_of(attempt):
            counts.end(key, now, failed=failed)

    def _counts_of(self, attempt: Attempt) -> tuple[tuple[_Counts, object], ...]:
        counts: tuple[tuple[_Counts, object], ...] = (
            (self._pairs, _pair_key(attempt)),
            (self._logins, attempt.login),
        )
        by_address = ((self._addresses, attempt.address),) if attempt.kind is CredentialKind.PASSWORD else ()
        return (*counts, *by_address)


def _pair_key(attempt: Attempt) -> object:
    return (attempt.address, attempt.login)

"""Links for those who need one for a while: an idle one if there is one, else a new one, within their patience.

Python workers of Spark are used again for the next task, so idle links are kept per process and address. A link is
never shared: who takes it owns it until it is given back. A forked child finds none of its parent's.
"""

import atexit
import os
import random
import threading
import time
from typing import Final

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk.net.connect import Server, dial, servers
from purveyor.jetstream.bulk.net.connection import Link, LinkLost
from purveyor.model.errors import PurveyorError, ServerUnavailable

_MOST_IDLE: Final = 4
_ATTEMPT_SECONDS: Final = 5.0
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 2.0

_lock = threading.Lock()
_idle: dict[tuple[int, Address], list[Link]] = {}
_discovered: dict[Address, tuple[str, ...]] = {}


class OutOfPatience(ServerUnavailable):
    """The caller's patience is over."""


class Patience:
    """How long to go on after failures: counted from the first one since there was progress."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: float | None = None
        self._pause = _FIRST_PAUSE

    def progress(self) -> None:
        """Something worked: the next failure starts a new count."""
        self._since, self._pause = None, _FIRST_PAUSE

    def failed(self, error: PurveyorError) -> None:
        """Pause before the next attempt, a little longer each time, or give up with that error."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        left = self._since + self._seconds - now
        if left <= 0:
            raise OutOfPatience(
                f"gave up after {self._seconds:g} s: {error.message}", fix=error.fix or "is the server up?"
            ) from error
        # Jitter, so that many workers that lost one server do not come back in one moment.
        time.sleep(min(left, self._pause * random.uniform(0.5, 1.0)))  # noqa: S311 - not for secrets
        self._pause = min(self._pause * 2, _LONGEST_PAUSE)

    def attempt_seconds(self) -> float:
        """How long a single attempt may take."""
        return min(_ATTEMPT_SECONDS, max(self._seconds, 0.1))


def connect(address: Address, patience: Patience) -> Link:
    """A link that works at this moment. Wrong credentials or a server of no use are told at once."""
    link = _take_idle(address)
    while link is None:
        try:
            link = _dial_any(address, patience.attempt_seconds())
        except ServerUnavailable as error:
            patience.failed(error)
    return link


def give_back(address: Address, link: Link) -> None:
    """Keep a link for the next one. Only for links on which nothing is under way."""
    with _lock:
        kept = _idle.setdefault((os.getpid(), address), [])
        if len(kept) < _MOST_IDLE:
            kept.append(link)
            return
    link.close()


def close_idle() -> None:
    """Close all idle links of this process."""
    with _lock:
        mine = [key for key in _idle if key[0] == os.getpid()]
        links = [link for key in mine for link in _idle.pop(key)]
    for link in links:
        link.close()


def _take_idle(address: Address) -> Link | None:
    while True:
        with _lock:
            kept = _idle.get((os.getpid(), address))
            if not kept:
                return None
            link = kept.pop()
        try:
            # Whatever came while nobody looked: a PING to answer, or the end of the connection.
            while link.pump(0.0):
                link.receive()
            link.receive()
        except PurveyorError:
            link.close()
            continue
        return link


def _dial_any(address: Address, timeout: float) -> Link:
    """Each known server once, beginning with the one that worked last."""
    known = servers(address, _discovered.get(address, ()))
    failures: list[str] = []
    for server in _rotated(address, known):
        try:
            link = dial(address, server, timeout)
        except LinkLost as error:
            failures.append(error.message)
            continue
        _discovered[address] = link.info.others
        _last_good[address] = server
        return link
    raise ServerUnavailable("; ".join(failures), fix="is the server up, and is this its address?")


_last_good: dict[Address, Server] = {}


def _rotated(address: Address, known: list[Server]) -> list[Server]:
    last = _last_good.get(address)
    if last in known:
        start = known.index(last)
        return known[start:] + known[:start]
    return known


atexit.register(close_idle)

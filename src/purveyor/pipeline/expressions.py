"""Tries the regular expressions of subscriptions on topics, with a limit of processor time. Runs in Python workers.

Spark's own `rlike` is not used for them: Java follows a repeated group by recursion, so a long topic ends in a
StackOverflowError, which ends the whole JVM; and an expression that takes minutes cannot be stopped there. Python's
engine needs no stack, looks for signals while it works, and is the one that `model.topics` states the rule with.

A worker process is also what Spark can kill. So an expression that exceeds its limit costs its own subscription, and
nothing else.
"""

import re
import signal
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Final, NamedTuple, TypeAlias

from purveyor.model.topics import topic_matches

Pair: TypeAlias = tuple[str, str]
"""A realm and a topic, or a realm and an expression."""

LIMIT_SECONDS: Final = 1.0
"""Processor time that one expression may take on one topic. A usual one takes a millionth of that."""
MOST_LEARNED: Final = 20_000
"""Where every event has a topic of its own, it is of no use to keep what came of trying them."""
_TICKS: Final = 4
_NONE: Final[frozenset[int]] = frozenset()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome for one topic: the numbers of the patterns that match it, and of those that came to no result."""

    matching: frozenset[int]
    failed: frozenset[int] = _NONE


class Choice(NamedTuple):
    """What one target asks for, if there are patterns in it: their numbers, and the pairs that it names exactly."""

    patterns: tuple[int, ...] = ()
    exact: tuple[Pair, ...] = ()


class Interests:
    """Who gets events of which topic, of all targets that have patterns. Targets are known by their numbers."""

    def __init__(self, patterns: Sequence[Pair], choices: Sequence[Choice]) -> None:
        self._of_pattern: list[set[int]] = [set() for _ in patterns]
        self._of_realm: dict[str, set[int]] = defaultdict(set)
        self._exact: dict[Pair, set[int]] = defaultdict(set)
        for target, choice in enumerate(choices):
            for number in choice.patterns:
                self._of_pattern[number].add(target)
                self._of_realm[patterns[number][0]].add(target)
            for pair in choice.exact:
                self._exact[pair].add(target)
        self._refused: dict[tuple[str, frozenset[int]], frozenset[int]] = {}

    def refused(self, pair: Pair, verdict: Verdict) -> frozenset[int]:
        """The targets with a pattern for this realm that do not get the events, or of which that is not known.

        >>> interests = Interests([("r", "a.*"), ("r", "b.*")], [Choice((0,)), Choice((1,), (("r", "a"),)), Choice()])
        >>> interests.refused(("r", "ab"), Verdict(frozenset({0}))), interests.refused(("r", "a"), Verdict(frozenset()))
        (frozenset({1}), frozenset({0}))
        """
        key = pair[0], verdict.matching  # of many topics most are matched by the same patterns
        found = self._refused.get(key)
        if found is None:
            taking = set[int]().union(*(self._of_pattern[number] for number in verdict.matching))
            found = self._refused[key] = frozenset(self._of_realm.get(pair[0], set()) - taking)
        return found - self._exact[pair] if pair in self._exact else found

    def undecided(self, pair: Pair, verdict: Verdict) -> dict[int, int]:
        """Of the targets that are refused those that a pattern without a result decides about, and that pattern."""
        refused = self.refused(pair, verdict) if verdict.failed else frozenset()
        return {target: number for number in verdict.failed for target in self._of_pattern[number] & refused}


class Expressions:
    """Patterns, each a realm and an expression, known by their numbers. Each topic is tried once."""

    def __init__(self, patterns: Sequence[Pair], *, limit_seconds: float = LIMIT_SECONDS) -> None:
        self._patterns = tuple(patterns)
        self._limit_seconds = limit_seconds
        self._of_realm: dict[str, list[int]] = defaultdict(list)
        for number, (realm, _) in enumerate(self._patterns):
            self._of_realm[realm].append(number)
        self._known: dict[Pair, Verdict] = {}
        self.failures: dict[int, str] = {}
        """Why a pattern came to no result, by its number. It is not tried again."""

    def verdicts(self, pairs: Iterable[Pair]) -> dict[Pair, Verdict]:
        """Try all patterns of a realm on each of its topics."""
        wanted = set(pairs)
        with _LIMIT.of(self._limit_seconds):
            for realm, topic in wanted - self._known.keys():
                self._known[realm, topic] = self._tried(self._of_realm.get(realm, ()), topic)
        return {pair: self._known[pair] for pair in wanted}

    def _tried(self, numbers: Sequence[int], topic: str) -> Verdict:
        matching, failed = set(), set()
        for number in numbers:
            expression = self._patterns[number][1]
            try:
                if number not in self.failures and _LIMIT.run(expression, topic):
                    matching.add(number)
            except _TooSlow:
                self.failures[number] = (
                    f"the expression {_short(expression)} takes more than {self._limit_seconds:g} s "
                    f"on the topic {_short(topic)}"
                )
            except (re.error, RecursionError, OverflowError, MemoryError) as error:
                self.failures[number] = f"the expression {_short(expression)} cannot be tried: {error!r}"
            if number in self.failures:
                failed.add(number)
        return Verdict(frozenset(matching), frozenset(failed))


class _TooSlow(Exception):
    """Raised by the timer in the middle of a match."""


class _Limit:
    """A timer of the process that ends a match. There is one timer, so there is one of these."""

    def __init__(self) -> None:
        self._ticks = 0
        self._trying = False

    @contextmanager
    def of(self, seconds: float) -> Iterator[None]:
        """Limit each match within the block. Only the main thread gets signals: elsewhere there is no limit.

        The handler stays in place afterwards, because the default action of the signal is to end the process.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signal.signal(signal.SIGVTALRM, self._tick)
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds / _TICKS, seconds / _TICKS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    def run(self, expression: str, topic: str) -> bool:
        """Match, or raise _TooSlow."""
        self._ticks = 0
        self._trying = True
        try:
            return topic_matches(expression, topic)
        finally:
            self._trying = False

    def _tick(self, _number: int, _frame: FrameType | None) -> None:
        self._ticks += 1
        if self._trying and self._ticks > _TICKS:
            raise _TooSlow


_LIMIT: Final = _Limit()


def _short(text: str) -> str:
    return repr(text) if len(text) <= 80 else f"{text[:80]!r}... ({len(text)} characters)"

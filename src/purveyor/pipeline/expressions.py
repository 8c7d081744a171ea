"""Tries the regular expressions of subscriptions on topics, with a limit of processor time. Runs in Python workers.

Spark's `rlike` is not used: Java follows a repeated group by recursion, so a long topic ends in a StackOverflowError,
which ends the whole JVM; and an expression that takes minutes cannot be stopped there. Python's engine needs no stack,
checks for signals while it works, and is the one by which `model.name_rules` defines the rule.

Spark can also kill a worker process. So an expression that exceeds its limit affects its own subscription, and nothing
else.
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

from purveyor.model.errors import SetupError
from purveyor.model.name_rules import topic_matches

Pair: TypeAlias = tuple[str, str]
"""A realm and a topic, or a realm and an expression."""

MATCH_LIMIT_SECONDS: Final = 1.0
"""Processor time that one expression may take on one topic. A usual one takes a millionth of that."""
MAX_KNOWN_TOPICS: Final = 20_000
"""How many topics are remembered. Where every event has another topic, remembering them is of no use."""
_TICKS: Final = 4
_NONE: Final[frozenset[int]] = frozenset()


@dataclass(frozen=True, slots=True)
class TopicMatch:
    """The result for one topic: the numbers of the patterns that match it, and of those without a result."""

    matching: frozenset[int]
    failed: frozenset[int] = _NONE


class TargetTopics(NamedTuple):
    """The topics of one target, if it has patterns: their numbers, and the pairs that it names exactly."""

    patterns: tuple[int, ...] = ()
    exact: tuple[Pair, ...] = ()


class TopicInterests:
    """Which targets get events of which topic, for all targets that have patterns. Targets are numbers."""

    def __init__(self, patterns: Sequence[Pair], target_topics: Sequence[TargetTopics]) -> None:
        self._of_pattern: list[set[int]] = [set() for _ in patterns]
        self._of_realm: dict[str, set[int]] = defaultdict(set)
        self._exact: dict[Pair, set[int]] = defaultdict(set)
        for target, wanted in enumerate(target_topics):
            for number in wanted.patterns:
                self._of_pattern[number].add(target)
                self._of_realm[patterns[number][0]].add(target)
            for pair in wanted.exact:
                self._exact[pair].add(target)
        self._non_matching: dict[tuple[str, frozenset[int]], frozenset[int]] = {}

    def non_matching(self, pair: Pair, match: TopicMatch) -> frozenset[int]:
        """Return the targets with a pattern for this realm that do not get the events, or for which that is not known.

        >>> patterns = [("r", "a.*"), ("r", "b.*")]
        >>> targets = [TargetTopics((0,)), TargetTopics((1,), (("r", "a"),)), TargetTopics()]
        >>> interests = TopicInterests(patterns, targets)
        >>> interests.non_matching(("r", "ab"), TopicMatch(frozenset({0})))
        frozenset({1})
        >>> interests.non_matching(("r", "a"), TopicMatch(frozenset()))
        frozenset({0})
        """
        key = pair[0], match.matching  # the same patterns match most of many topics
        found = self._non_matching.get(key)
        if found is None:
            taking = set[int]().union(*(self._of_pattern[number] for number in match.matching))
            found = self._non_matching[key] = frozenset(self._of_realm.get(pair[0], set()) - taking)
        return found - self._exact[pair] if pair in self._exact else found

    def undecided(self, pair: Pair, match: TopicMatch) -> dict[int, int]:
        """Return the non-matching targets that depend on a pattern without a result, each with that pattern."""
        non_matching = self.non_matching(pair, match) if match.failed else frozenset()
        return {target: number for number in match.failed for target in self._of_pattern[number] & non_matching}


class Expressions:
    """Patterns, each a realm and an expression, identified by their numbers. Each topic is tried once."""

    def __init__(self, patterns: Sequence[Pair], *, limit_seconds: float = MATCH_LIMIT_SECONDS) -> None:
        self._patterns = tuple(patterns)
        self._limit_seconds = limit_seconds
        self._of_realm: dict[str, list[int]] = defaultdict(list)
        for number, (realm, _) in enumerate(self._patterns):
            self._of_realm[realm].append(number)
        self._known: dict[Pair, TopicMatch] = {}
        self.failures: dict[int, str] = {}
        """Why a pattern has no result, by its number. It is not tried again."""

    def match_topics(self, pairs: Iterable[Pair]) -> dict[Pair, TopicMatch]:
        """Try all patterns of a realm on each of its topics."""
        wanted = set(pairs)
        with _TIMER.limit_each(self._limit_seconds):
            for realm, topic in wanted - self._known.keys():
                self._known[realm, topic] = self._try_patterns(self._of_realm.get(realm, ()), topic)
        return {pair: self._known[pair] for pair in wanted}

    def _try_patterns(self, numbers: Sequence[int], topic: str) -> TopicMatch:
        matching, failed = set(), set()
        for number in numbers:
            expression = self._patterns[number][1]
            try:
                if number not in self.failures and _TIMER.run(expression, topic):
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
        return TopicMatch(frozenset(matching), frozenset(failed))


class _TooSlow(Exception):
    """The timer raises it in the middle of a match."""


class _MatchTimer:
    """The timer that ends a match. A process has one timer, so there is one instance."""

    def __init__(self) -> None:
        self._ticks = 0
        self._trying = False

    @contextmanager
    def limit_each(self, seconds: float) -> Iterator[None]:
        """Limit each match within the block.

        Only the main thread gets signals, and no match may run without a limit: another thread gets a SetupError.
        Spark runs the code of a task in the main thread of its worker process. The handler stays in place afterwards,
        because the default action of the signal is to end the process.
        """
        if threading.current_thread() is not threading.main_thread():
            raise SetupError(
                "an expression is tried outside the main thread of a process, where it has no time limit",
                fix="use the version of Spark that Purveyor requires",
            )
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


_TIMER: Final = _MatchTimer()


def _short(text: str) -> str:
    return repr(text) if len(text) <= 80 else f"{text[:80]!r}... ({len(text)} characters)"

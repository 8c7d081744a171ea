"""Decides in the writing task who gets events of topics on which expressions were not tried before.

Spark names every subscription that may get them (see `matching`). Here the expressions are tried, once for each topic,
and those that do not match are left out. An expression that comes to no result stops its subscription at the first
position that depends on it: what lies before is written, nothing behind it is. The other subscriptions do not wait.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from purveyor.pipeline.dispatch.subscriber_messages import pair_of
from purveyor.pipeline.expressions import Choice, Expressions, Interests, Pair
from purveyor.pipeline.topic_batches import Indices, Load

_NONE: Final = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Stop:
    """The first position that a target cannot be given, and why."""

    position: int
    reason: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """What was decided about a load: pairs of packs and targets that do not belong together, and who stops where."""

    left_out: Indices = field(default_factory=lambda: _NONE)
    stops: Mapping[int, Stop] = field(default_factory=dict)


class Resolver:
    """The decisions of one run of a task. `topics` has what was found: to each pair the patterns that match it.

    Positions up to its floor are not for a target, whatever they hold.
    """

    def __init__(self, patterns: Sequence[Pair], choices: Sequence[Choice], floors: Sequence[int]) -> None:
        self._expressions = Expressions(patterns)
        self._interests = Interests(patterns, choices)
        self._floors = floors
        self.topics: dict[Pair, frozenset[int]] = {}

    def resolve(self, load: Load) -> Resolved:
        """Decide for all packs whose topic is unseen."""
        unseen = np.flatnonzero(pc.struct_field(load.packs.column("matched"), "unseen"))
        if not len(unseen):
            return Resolved()
        some = load.packs.take(pa.array(unseen))
        pairs = list(zip(some.column("realm").to_pylist(), some.column("topic").to_pylist(), strict=True))
        verdicts = self._expressions.verdicts(pairs)
        self.topics |= {pair: found.matching for pair, found in verdicts.items() if not found.failed}
        left_out = []
        stops: dict[int, Stop] = {}
        for pack, pair in zip(unseen.tolist(), pairs, strict=True):
            targets = self._interests.refused(pair, verdicts[pair])
            left_out.append(pair_of(np.full(len(targets), pack), np.fromiter(targets, np.int64, len(targets))))
            for target, number in self._interests.undecided(pair, verdicts[pair]).items():
                positions = load.rows.column("position").to_numpy()[load.of_pack == pack]
                for position in positions[positions > self._floors[target]][:1].tolist():
                    stop = Stop(position, self._expressions.failures[number])
                    stops[target] = min(stops.get(target, stop), stop, key=lambda each: each.position)
        return Resolved(np.concatenate(left_out), stops)

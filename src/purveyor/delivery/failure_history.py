"""How the deliveries of a message ended that was not handled at once: what its dead letter tells. Pure.

The notes lie in the book of a subscription, which is written with every message: a message that is acknowledged when it
is delivered first has none, and the notes of all others together are bounded. They are a record for people; how often a
message was delivered is counted apart from them.
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, assert_never

from purveyor.delivery.done import numbers, runs
from purveyor.delivery.state import End, Ended
from purveyor.model.json_fields import Json

KEPT: Final = 20
"""Of one message so many attempts are kept, the last ones."""
MOST_KEPT: Final = 1000
"""And of all messages of a subscription so many."""
EXCERPT: Final = 200
"""So many characters of an answer are kept."""
_LONGEST_NAME: Final = 60
_KNOWN: Final = frozenset(how.value for how in Ended)

Ends = Mapping[int, tuple[End, ...]]


def noted(ends: Ends, ended: Iterable[tuple[Iterable[int], End]]) -> Ends:
    """With the ends of more deliveries, each of some messages.

    When there are many messages each keeps fewer of its ends, and at last those that were noted first keep none.
    """
    after = dict(ends)
    for sequences, end in ended:
        short = end._replace(instance=end.instance[:_LONGEST_NAME])
        for sequence in sequences:
            after[sequence] = (*after.pop(sequence, ()), short)
    each = min(max(MOST_KEPT // max(len(after), 1), 1), KEPT)
    last = [*after.items()][-MOST_KEPT:]
    return {sequence: found[-each:] for sequence, found in last}


def to_json(ends: Ends) -> list[Any]:
    """As they lie in the book, by time: messages that were in one lease ended alike, and are told together."""
    alike: dict[End, list[int]] = {}
    for sequence, found in ends.items():
        for end in found:
            alike.setdefault(end, []).append(sequence)
    return [
        [end.at, end.how.value, end.instance, runs(sorted(alike[end]))]
        for end in sorted(alike, key=lambda end: (end.at, end.how.value, end.instance))
    ]


def from_json(data: Iterable[Any]) -> Ends:
    """Back; ValueError or TypeError if they cannot be read. An end of a kind that is not known here is left out."""
    ends: dict[int, tuple[End, ...]] = {}
    for at, how, instance, sequences in data:
        if how in _KNOWN:
            end = End(int(at), Ended(how), str(instance))
            for sequence in numbers(sequences):
                ends[sequence] = (*ends.get(sequence, ()), end)
    return ends


def log(ends: Iterable[End]) -> list[Json]:
    """As a dead letter tells them: with the fields of an attempt to push."""
    return [entry(end.at, _words(end)) for end in ends]


def entry(at: int, error: str, excerpt: str = "") -> Json:
    """One attempt that ended without a status."""
    moment = datetime.fromtimestamp(at / 1000, UTC)
    return {"time": moment.isoformat(), "status": None, "error": error, "excerpt": excerpt[:EXCERPT]}


def _words(end: End) -> str:
    match end.how:
        case Ended.RAN_OUT:
            return f"the lease of instance {end.instance!r} ran out"
        case Ended.ASKED_AGAIN:
            return f"instance {end.instance!r} asked for the next one without an answer to this one"
        case Ended.RETRY:
            return f"instance {end.instance!r} gave it back, to be delivered again"
        case _:
            assert_never(end.how)

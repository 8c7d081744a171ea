"""Redrive: put dead letters back to where they were given up, each once, despite crashes and concurrent callers.

Into the queue of a subscription, for a batch of dead letters at a time:

1. The delivery state records that their redrive is under way. A crash after this leaves them in that record.
2. Each dead letter and its receipt are read: whether it exists, and whether it was redriven or discarded before.
3. They are stored on `<subscription>.retry`, under new ids. Those that an earlier attempt had recorded are
   searched for in the queue first: one that is neither there nor acknowledged (the record says so) was not stored. The
   ids catch what two processes do at the same moment.
4. Each gets its receipt.
5. The delivery state records the highest sequence of a redriven message, so that every process reads up to it before it
   leases anything else, and that the redrive is over. Before this step the messages need not be found: they are still
   dead letters.
6. The dead letters are deleted. After a crash between 4 and 6, the receipt says what was done, and only 5 and 6 are
   repeated.

Into other queues, which have no delivery state: steps 2, 3, 4 and 6. A message that a crash between 3 and 4 left behind
is recognised by the duplicate window of the server; stages recognise it in their inbox, without a time limit.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from purveyor.delivery.dead_letters.redrive_target import RedriveTarget, check_accepts, redrive_target
from purveyor.delivery.message_buffer import dead_letter_id
from purveyor.delivery.state_writer import StateWriter, StateWriterCache, Transition
from purveyor.jetstream.publisher import Expect
from purveyor.model.delivery_state import DeliveryState
from purveyor.model.errors import (
    PurveyorError,
    Refused,
    Unavailable,
    UnknownMessage,
    UnknownSubscription,
    UnreadableRecord,
)
from purveyor.queues.client import Queues
from purveyor.queues.dead_letters.store import DeadLetterStore, ParkedMessage, Resolution, SettlementReceipt
from purveyor.queues.registry import Registered
from purveyor.queues.subscription_queues import create_queue

_LOOKUP_VALID_SECONDS: Final = 60.0
"""How long the result of a lookup is used: half of the server's duplicate window."""


class CrashPoint(Enum):
    """Where tests make a redrive crash."""

    RECORDED = "recorded"
    STORED = "stored"
    SETTLED = "settled"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class RedriveResult:
    """The result for one dead letter. `gone`: another process redrove or discarded it. `error`: why it stays."""

    id: int
    gone: bool = False
    error: PurveyorError | None = None


@dataclass(frozen=True, slots=True)
class _Redrive:
    """A dead letter and its target. `sequence` is where it was stored; 0 before that."""

    parked: ParkedMessage
    target: RedriveTarget
    sequence: int = 0


class Redriver:
    """Puts dead letters back. `reach` is called at each crash point."""

    def __init__(
        self,
        queues: Queues,
        store: DeadLetterStore,
        state_writers: StateWriterCache,
        *,
        replicas: int = 1,
        reach: Callable[[CrashPoint], None] = lambda _point: None,
    ) -> None:
        self._queues = queues
        self._store = store
        self._state_writers = state_writers
        self._replicas = replicas
        self._reach = reach

    async def to_subscription(self, registered: Registered, letters: Sequence[int]) -> list[RedriveResult]:
        """Put dead letters of a subscription back into its queue, in the given order."""
        writer = await self._state_writers.get(registered)
        await create_queue(
            self._queues,
            registered.name,
            registered.incarnation,
            check_owner=lambda: _refuse_replaced(registered.name),
            replicas=self._replicas,
        )
        begun = time.monotonic()
        recorded = await writer.commit(lambda state: _record_redrive(state, letters))  # 1
        self._reach(CrashPoint.RECORDED)
        results: dict[int, RedriveResult] = {}
        redrives = await self._prepare(letters, results, registered)  # 2
        if time.monotonic() - begun > _LOOKUP_VALID_SECONDS:
            raise Unavailable("the server answered too slowly about dead letters", fix="try again")
        redrives = await self._find_stored(writer, redrives, recorded)
        stored = await self._publish_all(redrives, results)  # 3
        self._reach(CrashPoint.STORED)
        await self._write_receipts(stored)  # 4
        self._reach(CrashPoint.SETTLED)
        newest = max((each.sequence for each in stored), default=0)
        await writer.commit(lambda state: _finish_redrive(state, letters, newest))  # 5
        self._reach(CrashPoint.FINISHED)
        await self._delete(stored, results)  # 6
        return [results[letter] for letter in letters]

    async def to_other_queue(self, letters: Sequence[int]) -> list[RedriveResult]:
        """Put dead letters of other parts back, in the given order."""
        results: dict[int, RedriveResult] = {}
        stored = await self._publish_all(await self._prepare(letters, results), results)
        await self._write_receipts(stored)
        await self._delete(stored, results)
        return [results[letter] for letter in letters]

    async def _prepare(
        self, letters: Sequence[int], results: dict[int, RedriveResult], registered: Registered | None = None
    ) -> list[_Redrive]:
        redrives: list[_Redrive] = []
        for letter, parked in zip(letters, await asyncio.gather(*map(self._store.find, letters)), strict=True):
            if parked is None:
                results[letter] = RedriveResult(letter, gone=True)
                continue
            try:
                target = redrive_target(parked)
                if registered is not None:
                    check_accepts(parked, registered)
            except (Refused, UnreadableRecord) as error:
                results[letter] = RedriveResult(letter, error=error)
                continue
            redrives.append(_Redrive(parked, target))
        receipts = await asyncio.gather(*(self._read_receipt(each.parked, results) for each in redrives))
        for each, receipt in zip(redrives, receipts, strict=True):
            if (
                receipt is not None and receipt.resolution is Resolution.DISCARDED
            ):  # its deletion is under way, or a crash cut it off
                await self._store.remove(each.parked.id)
                results[each.parked.id] = RedriveResult(each.parked.id, gone=True)
        return [
            replace(each, sequence=receipt.redriven_to if receipt is not None else 0)
            for each, receipt in zip(redrives, receipts, strict=True)
            if each.parked.id not in results
        ]

    async def _read_receipt(self, parked: ParkedMessage, results: dict[int, RedriveResult]) -> SettlementReceipt | None:
        try:
            return await self._store.find_receipt(parked)
        except UnreadableRecord as error:
            results[parked.id] = RedriveResult(parked.id, error=error)
            return None

    async def _find_stored(
        self, writer: StateWriter, redrives: Sequence[_Redrive], recorded: frozenset[int]
    ) -> list[_Redrive]:
        """Add the sequences of dead letters that an earlier attempt has stored.

        The queue is read before the state: a message that is acknowledged in between is seen in one or the other. A
        record that is gone means that another process has completed the redrive.
        """
        doubtful = {each.parked.id for each in redrives if not each.sequence and each.parked.id in recorded}
        if not doubtful:
            return list(redrives)
        sequences = await self._stored_sequences(writer.name, redrives[0].target)
        state = await writer.current()
        for letter in doubtful - sequences.keys():
            if state.redriving.get(letter, True):
                sequences[letter] = max(state.retry.last, state.redriven_up_to)
        return [
            replace(each, sequence=sequences.get(each.parked.id, 0)) if each.parked.id in doubtful else each
            for each in redrives
        ]

    async def _stored_sequences(self, name: str, target: RedriveTarget) -> dict[int, int]:
        """Ask the leader for the sequence of each redriven message that is not acknowledged, by dead letter."""
        found: dict[int, int] = {}
        at = 1
        with contextlib.suppress(UnknownMessage):
            while True:
                message = await self._queues.streams.get_next(target.stream, at, f"{name}.retry")
                found[dead_letter_id(message.headers)] = message.sequence
                at = message.sequence + 1
        return found

    async def _publish_all(self, redrives: Sequence[_Redrive], results: dict[int, RedriveResult]) -> list[_Redrive]:
        """Publish all at once; the server stores them in the order in which they are sent."""
        answers = await asyncio.gather(*(self._publish(each) for each in redrives), return_exceptions=True)
        stored: list[_Redrive] = []
        for each, answer in zip(redrives, answers, strict=True):
            if isinstance(answer, PurveyorError) and not answer.retryable:
                results[each.parked.id] = RedriveResult(each.parked.id, error=answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                stored.append(replace(each, sequence=answer))
        return stored

    async def _publish(self, redrive: _Redrive) -> int:
        """Publish a message and return its sequence, unless an earlier attempt has stored it."""
        if redrive.sequence:
            return redrive.sequence
        target = redrive.target
        receipt = await self._queues.publish(
            target.subject,
            target.data,
            headers=dict(target.headers),
            msg_id=target.msg_id,
            expect=Expect(stream=target.stream),
        )
        return receipt.sequence

    async def _write_receipts(self, stored: Sequence[_Redrive]) -> None:
        await asyncio.gather(*(self._store.settle(each.parked, Resolution.RETRIED, each.sequence) for each in stored))

    async def _delete(self, stored: Sequence[_Redrive], results: dict[int, RedriveResult]) -> None:
        removed = await asyncio.gather(*(self._store.remove(each.parked.id) for each in stored))
        for each, was_there in zip(stored, removed, strict=True):
            results[each.parked.id] = RedriveResult(each.parked.id, gone=not was_there)


def _record_redrive(state: DeliveryState, letters: Sequence[int]) -> Transition[frozenset[int]]:
    """Record that a redrive is under way; return the dead letters that were recorded before."""
    before = frozenset(letters).intersection(state.redriving)
    added = {letter: False for letter in letters if letter not in before}
    after = state._replace(redriving={**state.redriving, **added}) if added else None
    return Transition(value=before, state=after, needs_fresh_state=after is None)


def _finish_redrive(state: DeliveryState, letters: Sequence[int], newest: int) -> Transition[None]:
    """Record that dead letters are back in the queue, up to a sequence."""
    redriving = {letter: acked for letter, acked in state.redriving.items() if letter not in letters}
    after = state._replace(redriving=redriving, redriven_up_to=max(state.redriven_up_to, newest))
    return Transition(value=None, state=after if after != state else None, notifies=True)


async def _refuse_replaced(name: str) -> None:
    raise UnknownSubscription(
        f"subscription {name!r} was deleted meanwhile", fix="check whether another subscription has its name"
    )

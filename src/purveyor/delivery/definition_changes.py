"""Changes of a definition. What a subscription selects changes at an exact position of the log; other options at once.

A change of topics, filter or hidden fields is a sequence of steps, as `Subscriptions.add` is. A crash may cut it off
anywhere; the same call makes the change again.

1. The record gets the change as *pending*, with a new id. The definition in force is still the old one. A change that
   was pending before is void from here on: it was cut off, and its caller got no answer. Its id is noted, because its
   control event may be in the log. If the earlier change has taken effect in the meantime, this write fails by its
   revision, and the call begins again. A crash after this step leaves the old definition in force.
2. The control event is stored in `incoming`. Its position L is the boundary: events up to L are selected by the old
   definition, events behind L by the new one. After a crash here the dispatcher does the rest, when it reaches L.
3. The position is stored in the record, which makes the new definition the one in force, and keeps the old one as
   *past*, up to L. The dispatcher does this if it reads the event first; the first write is final. If another change
   has voided this one, this one begins again behind it.
4. If the new topics are to be prefilled, the dispatcher sets the prefill to *pending* when it reaches L, before it is
   done with L (see `dispatch.topic_prefill`). So the consumer gets the backlog of the old topics until then, and no
   event of a new topic before the object that it changes.

A past selection is dropped by the next change, when no reader needs it any more: every group of dispatchers has passed
it, the queue lacks nothing before it, its last message from before it is acknowledged, and its prefill is done. At most
`MAX_PAST_SELECTIONS` wait for that; then a change is refused.
"""

import asyncio
import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from purveyor.delivery.subscription_jobs import MAX_ATTEMPTS, changed_too_often, deleted_meanwhile, not_registered
from purveyor.jetstream.headers import POSITION, number
from purveyor.jetstream.publisher import Expect
from purveyor.model import json_fields
from purveyor.model.control_events import CONTROL_SUBJECT, ControlEvent, ControlKind
from purveyor.model.errors import (
    InvalidInput,
    Refused,
    UnknownMessage,
    UnknownStream,
    WrongRevision,
)
from purveyor.model.registration import PastSelection, PendingChange, PrefillStatus, Record, RecordState
from purveyor.model.selection import Selection, may_overlap, new_topics
from purveyor.model.subscription import Subscription
from purveyor.model.subscription_limits import LARGEST_SUBSCRIPTION_BYTES, check_options, check_topics
from purveyor.queues.catalogue import RECEIPTS, incoming, subscription_queue
from purveyor.queues.client import Queues
from purveyor.queues.registry import Registered, Registry

Change = Callable[[Subscription], Subscription]
MAX_PAST_SELECTIONS: Final = 32
_NOT_DISPATCHERS: Final = ("archive", RECEIPTS)
_RETRY_SECONDS: Final = 0.01


@dataclass(frozen=True, slots=True)
class DefinitionChanged:
    """A record after a change. `position` is the boundary; None if the selection is as it was."""

    record: Record
    position: int | None = None


class DefinitionChanges:
    """Changes the definitions of subscriptions."""

    def __init__(self, queues: Queues, *, replicas: int = 1) -> None:
        self._queues = queues
        self._replicas = replicas

    async def change(
        self, registry: Registry, found: Registered, change: Change, *, prefill: bool = False
    ) -> DefinitionChanged:
        """Change a definition. With `prefill` the objects of topics that are new are delivered first, as of L."""
        for attempt in range(MAX_ATTEMPTS):
            now = await registry.get(found.name)
            if now.incarnation != found.incarnation:
                raise deleted_meanwhile(found.name)
            record = now.record
            if record.state is not RecordState.ACTIVE:
                raise not_registered(found.name)
            wanted = _check_change(record.definition, change(record.definition))
            before, after = Selection.of(record.definition), Selection.of(wanted)
            if after.is_same_as(before) and (record.pending is None or not wanted.is_same_as(record.definition)):
                if prefill and not (record.past and record.past[-1].prefill):
                    raise _nothing_to_prefill(found.name)
                if await self._put(registry, record, replace(record, definition=wanted), now.revision):
                    return DefinitionChanged(replace(record, definition=wanted))
                continue
            past = await self._needed_past(now)
            if prefill and not after.is_same_as(before):
                await asyncio.to_thread(_check_prefill, found.name, before, after, past)  # it matches expressions
            done = await self._change_selection(
                registry, replace(now, record=replace(record, past=past)), wanted, prefill
            )
            if done is not None:
                return done
            await asyncio.sleep(random.uniform(0, _RETRY_SECONDS * (attempt + 1)))  # noqa: S311 - no secret
        raise changed_too_often(found.name)

    async def _put(self, registry: Registry, before: Record, after: Record, revision: int) -> bool:
        """Write a record; return False if another process wrote since it was read."""
        if after.pending is not None:
            after.pending.selection.apply_to(after.definition)  # raises what the pending change would fail on
        if after != before:
            try:
                await registry.put_record(after, revision)
            except WrongRevision:
                return False
        return True

    async def _change_selection(
        self, registry: Registry, now: Registered, wanted: Subscription, prefill: bool
    ) -> DefinitionChanged | None:
        """Do the steps 1 to 3; None if another change came between."""
        record = now.record
        voided = record.pending
        pending = PendingChange(
            change=str(uuid.uuid4()),
            selection=Selection.of(wanted),
            prefill=prefill,
            voids=() if voided is None else (*voided.voids, voided.change),
        )
        try:
            unchanged_yet = Selection.of(record.definition).apply_to(wanted)
        except InvalidInput as error:
            raise InvalidInput(
                f"the other options cannot change before the filter and the hidden fields do: {error.message}",
                fix="change the filter and the hidden fields first, then the other options",
            ) from error
        changed = replace(record, definition=unchanged_yet, pending=pending)
        _check_size(changed)
        (await self._queues.ensure(incoming(), replicas=self._replicas)).require_usable()
        if not await self._put(registry, record, changed, now.revision):
            return None
        event = ControlEvent(kind=ControlKind.CHANGED, name=record.name, incarnation=record.incarnation, change=pending)
        receipt = await self._queues.publish(
            CONTROL_SUBJECT, event.encode(), msg_id=event.msg_id, expect=Expect(stream=incoming().stream)
        )
        settled = await registry.settle_change(record.name, record.incarnation, pending.change, receipt.sequence)
        if settled is None or settled.state is RecordState.DELETING:
            raise deleted_meanwhile(record.name)
        until = next((each.until for each in settled.past if each.change == pending.change), None)
        return None if until is None else DefinitionChanged(settled, until)

    async def _needed_past(self, now: Registered) -> tuple[PastSelection, ...]:
        """Return the past selections that a reader still needs; Refused if they are too many."""
        past = now.record.past
        if not past:
            return past
        passed = await self._passed(now)
        needed = tuple(each for each in past if each.until > passed)
        if len(needed) >= MAX_PAST_SELECTIONS:
            raise Refused(
                f"{len(needed)} changes of subscription {now.name!r} are not dispatched and delivered completely; the "
                f"first is at position {needed[0].until}, and everything up to {passed} is",
                fix="start the pipeline and the consumer; `purveyor consumer ls stream:incoming` lists the dispatchers",
                code=409,
            )
        return needed

    async def _passed(self, now: Registered) -> int:
        """Return the position up to which no reader needs to know what was selected."""
        if now.prefill is not None and not now.prefill.is_replay and now.prefill.status is not PrefillStatus.DONE:
            return 0
        readers = await self._queues.consumers.list(incoming().stream)
        passed = min((each.ack_floor.stream_seq for each in readers if each.name not in _NOT_DISPATCHERS), default=0)
        if now.dispatch is not None:
            passed = min(passed, now.dispatch.next - 1)
        queue = subscription_queue(now.name)
        try:
            oldest = number((await self._queues.streams.get_next(queue.stream, 1, queue.subjects[0])).headers, POSITION)
        except (UnknownMessage, UnknownStream):
            oldest = None
        if oldest is not None:
            passed = min(passed, oldest - 1)
        prefilled = 0 if now.prefill is None else max(now.prefill.position, now.prefill.through or 0)
        for each in now.record.past:
            if each.prefill and each.until > prefilled:
                return min(passed, each.until - 1)
        return passed


def _check_change(before: Subscription, after: Subscription) -> Subscription:
    """Return the changed definition, or raise InvalidInput."""
    if (after.name, after.request_prefill) != (before.name, before.request_prefill):
        raise InvalidInput(
            f"the name and the first prefill of subscription {before.name!r} cannot change",
            fix="delete it and add it again",
        )
    if after.realms_topics != before.realms_topics:
        check_topics(after.realms_topics)
    return check_options(after)


def _check_prefill(name: str, before: Selection, after: Selection, past: Sequence[PastSelection]) -> None:
    """Raise for a prefill that would be empty, or that would bring an older state behind a newer one.

    A topic that was removed and is added again may have older messages in the queue, which would be delivered behind
    the prefill.
    """
    added = new_topics(before, after)
    if not added:
        raise _nothing_to_prefill(name)
    for each in reversed(past):  # the newest that has a topic names the position at which it was removed
        removed = [topic for topic in each.selection.realms_topics if topic not in before.realms_topics]
        for topic in removed:
            if any(may_overlap(topic, wanted) for wanted in added):
                raise Refused(
                    f"{topic.realm}:{topic.topic} was removed at position {each.until}, and messages from before may "
                    f"still be undelivered: a prefill would overtake them",
                    fix="let the consumer acknowledge its backlog first, or change the topics without a prefill",
                    code=409,
                )


def _nothing_to_prefill(name: str) -> InvalidInput:
    return InvalidInput(
        f"the change adds no topic to subscription {name!r}, so there is nothing to prefill",
        fix="leave out the prefill, or use a replay for events of topics that it has",
    )


def _check_size(record: Record) -> None:
    """Raise Refused if the record with everything that is past would become too large for the registry."""
    size = len(json_fields.dump({"past": [each.to_json() for each in record.past]}))
    if size > LARGEST_SUBSCRIPTION_BYTES:
        raise Refused(
            f"the selections of subscription {record.name!r} that are not dispatched completely have {size} bytes",
            fix="start the pipeline and the consumer, or make fewer changes at a time",
            code=409,
        )

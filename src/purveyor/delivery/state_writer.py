"""State writers: one per subscription, each with the delivery state in memory and a buffer of the queue.

A transition computes the next delivery state from the current one. The state writer stores the result by
compare-and-set. Transitions that are requested while a write is under way are computed together and stored with the
next write, so a hundred consumers of a subscription cost little more than one. If another process has written in
between, the state writer reads the state again and computes the same transitions again.

The steps of an acknowledgement, and what a crash between them means:

1. The state is written: the message is acknowledged, its lease has ended, its position is recorded. After a crash
   before this, the message is delivered again. After this write the message is acknowledged, and the caller gets the
   answer.
2. The message is deleted from the queue, soon after and together with others (`after_ack`). After a crash before
   this, the message stays there. It is not delivered, because the state has it as acknowledged, and the next process
   that opens the subscription deletes it.
"""

import asyncio
import contextlib
import logging
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Generic, NamedTuple, Self, TypeVar

from purveyor.delivery import lease_rules
from purveyor.delivery.after_ack import AckedCleanup, Prefetcher
from purveyor.delivery.lease_types import AckTarget
from purveyor.delivery.message_buffer import MemoryBudget, MessageBuffer
from purveyor.delivery.subscription_changes import Notifier, RegistrationCache
from purveyor.jetstream.key_value import Bucket, BucketConfig
from purveyor.model.delivery_policy import OrderBy
from purveyor.model.delivery_state import DeliveryState, SubjectKind, decode, encode
from purveyor.model.errors import PurveyorError, Refused, Unavailable, UnknownStream, UnknownSubscription, WrongRevision
from purveyor.model.subscription import Subscription
from purveyor.queues.client import Queues
from purveyor.queues.registry import ACKNOWLEDGED, Registered

_log = logging.getLogger(__name__)

_MAX_ATTEMPTS: Final = 100
_MAX_STATE_WRITERS: Final = 2000
_CLOSE_SECONDS: Final = 5.0
_HEADER_BYTES: Final = 512
"""The maximum size of the headers of a stored state."""
_V = TypeVar("_V")


class Transition(NamedTuple, Generic[_V]):
    """The result of a transition: the answer to the caller, and the next state."""

    value: _V
    state: DeliveryState | None = None
    """The next state; None if nothing changes."""
    acked: Sequence[AckTarget] = ()
    shortfall: int = 0
    """How many more messages it would have used if the buffer had them."""
    notifies: bool = False
    """Whether waiters may get a message now that they could not get before."""
    needs_fresh_state: bool = False
    """Whether the answer counts only on a state that was read just now: it is empty, or it reports the state."""
    undo: Callable[[DeliveryState], DeliveryState] | None = None
    """Reverts the change if the caller has gone before it got the answer."""


@dataclass(slots=True, eq=False)
class _Request(Generic[_V]):
    transition: Callable[[DeliveryState], Transition[_V]]
    answer: "asyncio.Future[_V]"
    interchangeable: bool = False


class SharedServices:
    """The objects that all delivery services of a process share. Build one per connection, in the wiring."""

    def __init__(
        self,
        queues: Queues,
        *,
        notifier: Notifier,
        registrations: RegistrationCache,
        memory: MemoryBudget,
        replicas: int = 1,
    ) -> None:
        self.queues = queues
        self.notifier = notifier
        self.registrations = registrations
        self.memory = memory
        self.replicas = replicas
        self.state_writers = StateWriterCache(self)

    @classmethod
    def build(cls, queues: Queues, *, replicas: int = 1, memory: MemoryBudget | None = None) -> Self:
        """Build the shared objects of a process."""
        notifier = Notifier(queues.connection)
        return cls(
            queues,
            notifier=notifier,
            registrations=RegistrationCache(queues, on_change=notifier.notify, replicas=replicas),
            memory=memory or MemoryBudget(),
            replicas=replicas,
        )

    async def close(self) -> None:
        """Stop watching the registry, and wait until acknowledged messages are deleted from the queues."""
        await self.registrations.close()
        await self.state_writers.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class StateWriter:
    """Reads and writes the delivery state of one incarnation of a subscription."""

    def __init__(self, shared: SharedServices, states: Bucket, registered: Registered) -> None:
        self.name = registered.name
        self.incarnation = registered.incarnation
        self._shared = shared
        self._states = states
        self._registered = registered
        self.buffer = self._new_buffer(registered)
        self._state: DeliveryState | None = None
        self._revision = 0
        self._is_new_key = False
        self._generation = shared.queues.connection.generation
        self._requests: list[_Request[Any]] = []
        self._task: asyncio.Task[None] | None = None
        self._cleanup = AckedCleanup(shared.queues, self.name, self.incarnation, lambda: self._state)
        self.prefetcher = Prefetcher(self._cancel_lease)

    def update(self, registered: Registered) -> None:
        """Use a changed registration: the order may be different, or a prefill may have changed the queue."""
        if registered is self._registered:
            return
        before = self._registered
        if registered.prefill != before.prefill or registered.record.definition != before.record.definition:
            self.buffer.clear()
            self.buffer = self._new_buffer(registered)
        self._registered = registered

    def _new_buffer(self, registered: Registered) -> MessageBuffer:
        keys = registered.record.definition.order_by is OrderBy.KEY
        return MessageBuffer(self._shared.queues, registered.name, self._shared.memory, keys=keys)

    @property
    def definition(self) -> Subscription:
        """The definition of the subscription."""
        return self._registered.record.definition

    @property
    def max_state_bytes(self) -> int:
        """How large leases may make the stored state. The rest is for answers, which are always accepted."""
        return self._shared.queues.connection.max_payload * 7 // 8

    @property
    def is_stale(self) -> bool:
        """Whether the connection was lost since the state was read: state and buffer have to be read again."""
        return self._shared.queues.connection.generation != self._generation

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way, so that the state writer may be dropped."""
        return (self._task is None or self._task.done()) and self._cleanup.is_idle

    async def commit(
        self, transition: Callable[[DeliveryState], Transition[_V]], *, interchangeable: bool = False
    ) -> _V:
        """Commit a transition with compare-and-set. It is a pure function and may be called several times.

        When one of several interchangeable transitions is empty, the others are too: they are not computed.
        """
        request = _Request(transition, asyncio.get_running_loop().create_future(), interchangeable)
        self._add_request(request)
        answer: _V = await request.answer
        return answer

    async def current(self) -> DeliveryState:
        """Read the current state."""
        return await self.commit(lambda state: Transition(value=state, needs_fresh_state=True))

    def _cancel_lease(self, lease_id: str) -> None:
        """Cancel a prefetched lease that was not claimed."""
        self._add_request(_unanswered(lambda state: lease_rules.cancel_lease(state, lease_id)))

    def _add_request(self, request: _Request[Any]) -> None:
        self._requests.append(request)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._process_requests())

    async def _process_requests(self) -> None:
        while self._requests:
            requests = [request for request in self._requests if not request.answer.done()]
            self._requests = []
            try:
                await self._commit_all(requests)
            except Exception as error:  # noqa: BLE001 - the callers get any error
                self._state = None  # read again what was written, if anything was
                _fail(requests, error)
            except asyncio.CancelledError:
                _fail(requests + self._requests, Unavailable("this process is about to end", fix="ask again"))
                raise

    async def _commit_all(self, requests: list[_Request[Any]]) -> None:
        """Compute all requests on one state, and write the result."""
        self._forget_if_reconnected()
        more, fresh, pages = True, False, 0
        for attempt in range(_MAX_ATTEMPTS):
            if self._state is None:
                await self._load()
                fresh = True
            assert self._state is not None
            if self.buffer.has_unread_redrives(self._state):
                await self._fetch_redriven(self._state)
            results, state = _compute(requests, self._state)
            shortfall = sum(result.shortfall for result in results if isinstance(result, Transition))
            if shortfall and more:
                more = await self._fetch_more(self._state, shortfall << min(pages, 10))
                pages += 1
                continue
            if not fresh and any(isinstance(each, PurveyorError) or each.needs_fresh_state for each in results):
                self._state = None  # a refusal counts only if no other process has written since
                continue
            if state is not self._state and not await self._write(state):
                fresh = False
                await asyncio.sleep(random.random() * 0.002 * attempt)  # noqa: S311 - only to get out of step
                continue
            self._finish(requests, results)
            return
        raise Unavailable(
            f"other processes change the state of subscription {self.name!r} faster than it can be read",
            fix="try again",
        )

    def _finish(self, requests: list[_Request[Any]], results: list[Transition[Any] | PurveyorError]) -> None:
        notifies = False
        for request, result in zip(requests, results, strict=True):
            if isinstance(result, PurveyorError):
                if not request.answer.done():
                    request.answer.set_exception(result)
                continue
            notifies = notifies or result.notifies or bool(result.acked)
            acked: dict[SubjectKind, set[int]] = {}
            for message in result.acked:
                acked.setdefault(message.kind, set()).add(message.sequence)
            for kind, sequences in acked.items():
                self.buffer.forget(kind, sequences)
                self._cleanup.add(kind, sequences)
            if not request.answer.done():
                request.answer.set_result(result.value)
            elif result.undo is not None:
                self._requests.append(_unanswered(result.undo))
        if notifies:
            self._shared.notifier.notify(self.name)
        self._cleanup.schedule()

    def _forget_if_reconnected(self) -> None:
        """Read everything again after a reconnect: the server may have lost its last writes."""
        if self.is_stale:
            self._generation, self._state = self._shared.queues.connection.generation, None
            self.buffer.clear()

    async def _load(self) -> None:
        entry = await self._states.newest(self.name)
        state = DeliveryState(incarnation=self.incarnation)
        self._revision, self._is_new_key = 0 if entry is None else entry.revision, True
        if entry is not None and not entry.deleted:
            found = decode(entry.value, f"subscription {self.name!r}")
            if found.incarnation == self.incarnation:
                state, self._is_new_key = found, False
        self._state = state
        self.buffer.drop_acked(state)
        self._cleanup.schedule()

    async def _fetch_more(self, state: DeliveryState, count: int) -> bool:
        try:
            return await self.buffer.fetch_more(state, count)
        except UnknownStream:
            return False  # the next writer creates the queue again; until then it is empty
        finally:
            self._delete_leftover()

    async def _fetch_redriven(self, state: DeliveryState) -> None:
        with contextlib.suppress(UnknownStream):
            await self.buffer.fetch_redriven(state)
        self._delete_leftover()

    def _delete_leftover(self) -> None:
        for kind, sequences in self.buffer.take_leftover().items():
            self._cleanup.add(kind, sequences)

    async def _write(self, state: DeliveryState) -> bool:
        """Write the state; return False if another process has changed it.

        The revision proves that it is the state of this incarnation: deleting a subscription removes its state before
        another subscription of the same name can be added. If there was no state to remove, the registry is read again.
        """
        state, value = self._fit_payload(state)
        try:
            self._revision = await self._states.update(self.name, value, self._revision)
        except WrongRevision:
            self._state = None
            return False
        self._state = state
        if self._is_new_key:
            registered = await self._shared.registrations.refresh(self.name)
            if registered.incarnation != self.incarnation:
                raise UnknownSubscription(f"subscription {self.name!r} was deleted meanwhile", fix="ask again")
            self._is_new_key = False
        return True

    def _fit_payload(self, state: DeliveryState) -> tuple[DeliveryState, bytes]:
        """Return the state and its bytes, without the record of failures if the server would not accept it."""
        value = encode(state)
        limit = self._shared.queues.connection.max_payload - _HEADER_BYTES
        if len(value) > limit and state.failures:
            _log.warning("the delivery state of subscription %s has no room for failed deliveries", self.name)
            state = state._replace(failures={})
            value = encode(state)
        if len(value) > limit:
            raise Refused(
                f"the delivery state of subscription {self.name!r} has {len(value)} bytes; the server accepts {limit}",
                fix="raise max_payload of the NATS server",
            )
        return state, value

    async def close(self) -> None:
        """Wait until nothing is under way. Cancel what takes too long because the server does not answer."""
        if (lease_id := self.prefetcher.close()) is not None:
            self._cancel_lease(lease_id)
        tasks = {task for task in (self._task, self._cleanup.task) if task is not None and not task.done()}
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self.buffer.clear()


class StateWriterCache:
    """The state writers of a process. Drops the least recently used ones; all they know can be read again."""

    def __init__(self, shared: SharedServices) -> None:
        self._shared = shared
        self._states: Bucket | None = None
        self._writers: OrderedDict[str, StateWriter] = OrderedDict()

    async def get(self, registered: Registered) -> StateWriter:
        """Return the state writer of a subscription; a new one if it was deleted and added again."""
        states = self._states or await self._open()
        name, incarnation = registered.record.definition.name, registered.record.incarnation
        writer = self._writers.get(name)
        if writer is None or writer.incarnation != incarnation:
            writer = self._writers[name] = StateWriter(self._shared, states, registered)
        writer.update(registered)
        self._writers.move_to_end(name)
        writer.buffer.touch()
        self._make_room(writer)
        return writer

    async def close(self) -> None:
        """Close all state writers."""
        await asyncio.gather(*(writer.close() for writer in self._writers.values()))
        self._writers.clear()

    def _make_room(self, in_use: StateWriter) -> None:
        memory = self._shared.memory
        if len(self._writers) <= _MAX_STATE_WRITERS and not memory.is_exceeded:
            return
        for name, writer in [*self._writers.items()]:
            if not writer.is_idle or writer is in_use:
                continue
            if len(self._writers) > _MAX_STATE_WRITERS:
                writer.buffer.clear()
                del self._writers[name]
            elif memory.is_exceeded:
                writer.buffer.clear()
            else:
                break

    async def _open(self) -> Bucket:
        if self._states is None:
            config = BucketConfig(name=ACKNOWLEDGED, replicas=self._shared.replicas)
            self._states = await self._shared.queues.bucket(config)
        return self._states


def _compute(
    requests: list[_Request[Any]], state: DeliveryState
) -> tuple[list[Transition[Any] | PurveyorError], DeliveryState]:
    """Apply all requests in a row; return their results and the last state."""
    results: list[Transition[Any] | PurveyorError] = []
    empty: Transition[Any] | None = None
    for request in requests:
        if empty is not None and request.interchangeable:
            results.append(empty)
            continue
        try:
            result = request.transition(state)
        except PurveyorError as error:  # it concerns this caller only
            results.append(error)
            continue
        results.append(result)
        if result.state is not None:
            state, empty = result.state, None
        elif result.needs_fresh_state and request.interchangeable:
            empty = result._replace(shortfall=0)
    return results, state


def _fail(requests: Iterable[_Request[Any]], error: Exception) -> None:
    for request in requests:
        if not request.answer.done():
            request.answer.set_exception(error)


def _unanswered(change: Callable[[DeliveryState], DeliveryState]) -> _Request[None]:
    """Return a request for a change without a caller that waits for the answer."""
    answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    answer.add_done_callback(lambda done: done.cancelled() or done.exception())
    return _Request(lambda state: Transition(value=None, state=change(state), notifies=True), answer)

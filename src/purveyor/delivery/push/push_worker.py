"""The push worker: one process that delivers all push subscriptions. Any number of them may run at once.

It follows the registry, and has a line for each subscription that is pushed, active and not paused. A line that has
nothing to do costs memory and nothing else: it is woken by a message, by the registry, or by the time of a retry.
"""

import asyncio
import contextlib
import logging
import os
import socket
import uuid
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from purveyor.delivery.push.attempt_log import Attempts
from purveyor.delivery.push.blocked_keys import ParkedKeys
from purveyor.delivery.push.egress_policy import Network
from purveyor.delivery.push.endpoint_sender import Health
from purveyor.delivery.push.http_pool import PER_HOST, Sender
from purveyor.delivery.push.push_leases import Counter
from purveyor.delivery.push.push_metrics import Setbacks
from purveyor.delivery.push.push_problems import Troubles
from purveyor.delivery.push.push_services import Shop
from purveyor.delivery.push.secret_encryption import SecretBox
from purveyor.delivery.push.subscription_pusher import Line
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.key_value import Entry
from purveyor.model.delivery_policy import Delivery
from purveyor.model.errors import PurveyorError, describe
from purveyor.model.registration import Record, RecordState
from purveyor.queues.client import Queues
from purveyor.queues.registrations import Registered, Unreadable, assemble
from purveyor.queues.registry import SUBSCRIPTIONS

_log = logging.getLogger(__name__)
_AGAIN_SECONDS: Final = 1.0
_TICK_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 300
"""Every line looks for messages by itself after so long: whatever should have woken it, and did not."""
_OPENINGS: Final = 32
Tell = Callable[[str, str, str], None]


def _unheard(_name: str, _event: str, _words: str) -> None:
    """Nobody listens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOptions:
    """What can be chosen about a worker."""

    box: SecretBox
    allowed: Sequence[Network] = ()
    per_host: int = PER_HOST
    replicas: int = 1
    grace_seconds: float = 15.0
    """So long it waits for answers when it is told to stop."""
    tell: Tell = _unheard


class Worker:
    """See the module. `run` until `stop` is set; `ready` when every subscription is known."""

    def __init__(self, queues: Queues, options: PushOptions) -> None:
        self._queues = queues
        self._options = options
        self.ready = asyncio.Event()
        self._lines: dict[str, tuple[Line, asyncio.Task[None]]] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}
        """Lines that wait for their last answers: until then no other takes messages for the same subscription."""
        self._records: dict[str, Record] = {}
        self._unread: dict[str, Unreadable] = {}
        """Subscriptions that this worker does not understand, and leaves alone."""
        self._setbacks: dict[str, Setbacks] = {}
        self._registry_setbacks = Setbacks("the watch of the registry")
        self._sweep_setbacks = Setbacks("the sweep of idle connections")
        self._health: weakref.WeakValueDictionary[str, Health] = weakref.WeakValueDictionary()
        attempts = Attempts(queues, replicas=options.replicas)
        parked = ParkedKeys(queues, replicas=options.replicas)
        instance = f"push-{socket.gethostname()[:60]}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._shop = Shop(
            connection=queues.connection,
            counter=Counter(queues, attempts, parked, instance=instance, replicas=options.replicas),
            subscriptions=Subscriptions(queues, replicas=options.replicas),
            sender=Sender(options.allowed, per_host=options.per_host),
            attempts=attempts,
            parked=parked,
            troubles=Troubles(queues, replicas=options.replicas),
            box=options.box,
            health=self._health_of,
            tell=options.tell,
            openings=asyncio.Semaphore(_OPENINGS),
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Deliver. What is under way when it is told to stop is waited for, for a while."""
        work = [asyncio.create_task(self._follow()), asyncio.create_task(self._tick())]
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([*work, stopped], return_when=asyncio.FIRST_COMPLETED)
            for task in work:
                if task.done():
                    task.result()
        finally:
            stopped.cancel()
            for task in work:
                task.cancel()
            await asyncio.gather(*work, stopped, return_exceptions=True)
            await self._close()

    async def _close(self) -> None:
        for line, _ in self._lines.values():
            line.stop()
        self._records.clear()
        tasks = [task for _, task in self._lines.values()] + [*self._ending.values()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self._options.grace_seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._shop.sender.close()
        await self._shop.troubles.close()
        await self._shop.counter.close()

    async def _follow(self) -> None:
        """The registry, without end."""
        while True:
            pause = _AGAIN_SECONDS
            try:
                await (await self._shop.subscriptions.registry()).list()  # makes its buckets if there are none
                bucket = await self._queues.bucket(SUBSCRIPTIONS)
                async with contextlib.aclosing(bucket.watch()) as changes:
                    async for entry in changes:
                        if entry is None:
                            self.ready.set()
                        else:
                            self._heard(entry)
            except PurveyorError as error:
                _log.warning("the registry of subscriptions cannot be followed: %s", error)
            except Exception as error:  # noqa: BLE001 - without it no subscription would begin or end any more
                self._registry_setbacks.add(error, asyncio.get_running_loop().time())
                pause = self._registry_setbacks.pause_seconds
            await asyncio.sleep(pause)

    def _heard(self, entry: Entry) -> None:
        name, _, part = entry.key.rpartition(".")
        if part == "prefill":
            if name in self._lines:
                self._lines[name][0].look_again()
        elif part == "definition":
            self._records.pop(name, None)
            if entry.deleted:
                self._setbacks.pop(name, None)
            before = self._unread.pop(name, None)
            match assemble(name, {"definition": (entry.revision, None if entry.deleted else entry.value)}):
                case Registered() as found:
                    self._records[name] = found.record
                case Unreadable() as found:
                    self._unread[name] = found
                    self._options.tell(name, "unreadable", found.reason)
                case None:
                    pass
            if before is not None and name not in self._unread:
                self._shop.troubles.tell(name, before.incarnation or "", "")
            self._arrange(name)

    def _arrange(self, name: str) -> None:
        """A line if there should be one, none if not; tried again if that fails."""
        try:
            self._arrange_line(name)
        except Exception as error:  # noqa: BLE001 - the other subscriptions are not concerned
            asyncio.get_running_loop().call_later(self._failed(name, error), self._arrange, name)

    def _arrange_line(self, name: str) -> None:
        record = self._records.get(name)
        wanted = record if record is not None and _is_pushed(record) else None
        line, task = self._lines.get(name, (None, None))
        if line is not None and (wanted is None or wanted.incarnation != line.incarnation):
            line.stop()
            assert task is not None
            self._ending[name] = task
            del self._lines[name]
            task.add_done_callback(lambda _: self._ended(name))
            line = None
        if wanted is None or name in self._ending:
            return
        found = Registered(record=wanted, revision=0)
        if line is not None:
            self._shop.counter.forget(name)
            line.update(found)
            return
        self._shop.counter.forget(name)
        line = Line(self._shop, found)
        task = asyncio.create_task(line.run())
        task.add_done_callback(lambda done: self._line_over(name, done))
        self._lines[name] = (line, task)

    def _ended(self, name: str) -> None:
        self._ending.pop(name, None)
        self._arrange(name)

    def _line_over(self, name: str, task: "asyncio.Task[None]") -> None:
        """A line has ended by itself: its subscription is gone or paused, which the registry tells; or by a defect."""
        if self._lines.get(name, (None, None))[1] is not task:
            return
        incarnation = self._lines.pop(name)[0].incarnation
        error = None if task.cancelled() else task.exception()
        if error is not None:
            pause = self._failed(name, error)
            self._shop.troubles.tell(name, incarnation, describe(error))
            asyncio.get_running_loop().call_later(pause, self._arrange, name)

    def _failed(self, name: str, error: BaseException) -> float:
        """Report a defect in the delivery of a subscription, and return the seconds to pause."""
        series = self._setbacks.setdefault(name, Setbacks(f"push of subscription {name}"))
        self._options.tell(name, "failed", series.add(error, asyncio.get_running_loop().time()))
        return series.pause_seconds

    async def _tick(self) -> None:
        """See to what nobody wakes us for: connections not used for long, and a server that came back."""
        generation, turn = self._queues.connection.generation, 0
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            turn += 1
            for name, found in self._unread.items():
                self._shop.troubles.tell(name, found.incarnation or "", found.reason)
            again = self._queues.connection.generation != generation
            generation = self._queues.connection.generation
            for number, (line, _) in enumerate([*self._lines.values()]):
                if again or (number + turn) % _LOOK_SECONDS == 0:
                    line.look_again()
            if turn % 10 == 0:
                try:
                    self._shop.sender.sweep()
                except Exception as error:  # noqa: BLE001 - connections that are not closed now are closed later
                    self._sweep_setbacks.add(error, asyncio.get_running_loop().time())

    def _health_of(self, url: str) -> Health:
        found = self._health.get(url)
        if found is None:
            found = self._health[url] = Health()
        return found


def _is_pushed(record: Record) -> bool:
    pushed = record.definition.delivery is Delivery.PUSH
    return pushed and record.state is RecordState.ACTIVE and not record.paused

"""The push worker: one process that delivers all push subscriptions. Any number of workers may run at once.

It watches the registry and runs a pusher for each subscription that is pushed, active and not paused. An idle pusher
costs only memory: a new message, a change of the registry or a retry time wakes it.
"""

import asyncio
import contextlib
import logging
import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from purveyor.delivery.push.attempt_history import AttemptHistory
from purveyor.delivery.push.egress_policy import Network
from purveyor.delivery.push.endpoint_pool import EndpointFactory
from purveyor.delivery.push.http_pool import DEFAULT_CONNECTIONS_PER_HOST, HttpPool
from purveyor.delivery.push.push_leases import BlockedKeys, PushLeases
from purveyor.delivery.push.push_reports import AttemptLog, EventCallback, FailureSeries, PushProblems
from purveyor.delivery.push.push_request import SecretCipher
from purveyor.delivery.push.subscription_pusher import PushServices, SubscriptionPusher
from purveyor.delivery.state_writer import SharedServices
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.key_value import Entry
from purveyor.model.delivery_policy import Delivery
from purveyor.model.errors import PurveyorError, describe
from purveyor.model.file_lock import process_exists
from purveyor.model.json_fields import Json
from purveyor.model.metrics import PUSH_ATTEMPTS
from purveyor.model.registration import Record, RecordState
from purveyor.queues.client import Queues
from purveyor.queues.registrations import Registered, Unreadable, assemble
from purveyor.queues.registry import SUBSCRIPTIONS
from purveyor.queues.status_board import delete_notice, read_notices, write_notice

_log = logging.getLogger(__name__)
_RETRY_SECONDS: Final = 1.0
_TICK_SECONDS: Final = 1.0
_CHECK_INTERVAL_TICKS: Final = 300
"""Every pusher checks its queue after this many ticks, in case a notification was lost."""
_CLOSE_IDLE_INTERVAL_TICKS: Final = 10
_CONCURRENT_FIRST_LEASES: Final = 32
_REPORT_INTERVAL_SECONDS: Final = 2.0
_LAST_REPORT_SECONDS: Final = 2.0


def _ignore_event(_name: str, _event: str, _description: str) -> None:
    """Ignore an event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOptions:
    """The options of a worker."""

    cipher: SecretCipher
    allowed: Sequence[Network] = ()
    per_host: int = DEFAULT_CONNECTIONS_PER_HOST
    replicas: int = 1
    grace_seconds: float = 15.0
    """How long a worker that stops waits for responses."""
    on_event: EventCallback = _ignore_event


class PushWorker:
    """Delivers all push subscriptions: `run` until `stop` is set. `ready` is set when every subscription is known."""

    def __init__(self, queues: Queues, options: PushOptions) -> None:
        self._queues = queues
        self._options = options
        self.ready = asyncio.Event()
        self._pushers: dict[str, tuple[SubscriptionPusher, asyncio.Task[None]]] = {}
        self._stopping: dict[str, asyncio.Task[None]] = {}
        """Pushers that wait for their last responses: until then no other leases messages of the subscription."""
        self._records: dict[str, Record] = {}
        self._unreadable: dict[str, Unreadable] = {}
        """Subscriptions whose registration this worker does not understand. It does not push them."""
        self._failures: dict[str, FailureSeries] = {}
        self._registry_failures = FailureSeries("the watch of the registry")
        self._idle_failures = FailureSeries("closing idle connections")
        self._http = HttpPool(options.allowed, per_host=options.per_host)
        self._shared = SharedServices.build(queues, replicas=options.replicas)
        attempts = AttemptLog(queues, replicas=options.replicas)
        blocked_keys = BlockedKeys(queues, replicas=options.replicas)
        instance = f"push-{socket.gethostname()[:60]}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._notice_key = f"push.{instance.removeprefix('push-').replace('.', '_')}"
        self._services = PushServices(
            connection=queues.connection,
            leases=PushLeases(self._shared, attempts, blocked_keys, instance=instance),
            subscriptions=Subscriptions(queues, replicas=options.replicas),
            endpoints=EndpointFactory(self._http, options.cipher),
            attempts=attempts,
            history=AttemptHistory(queues, replicas=options.replicas),
            blocked_keys=blocked_keys,
            problems=PushProblems(queues, replicas=options.replicas),
            on_event=options.on_event,
            first_leases=asyncio.Semaphore(_CONCURRENT_FIRST_LEASES),
        )

    async def run(self, stop: asyncio.Event) -> None:
        """Deliver until `stop` is set; then wait for the messages in flight, up to `grace_seconds`."""
        work = [asyncio.create_task(each) for each in (self._watch_registry(), self._tick(), self._report_status())]
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
        for pusher, _ in self._pushers.values():
            pusher.stop()
        self._records.clear()
        tasks = [task for _, task in self._pushers.values()] + [*self._stopping.values()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self._options.grace_seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._http.close()
        await asyncio.gather(self._services.problems.close(), self._services.history.close())
        with contextlib.suppress(PurveyorError, TimeoutError):
            async with asyncio.timeout(_LAST_REPORT_SECONDS):
                await delete_notice(self._queues, self._notice_key, replicas=self._options.replicas)
        await self._shared.close()

    async def _watch_registry(self) -> None:
        """Watch the registry forever."""
        while True:
            pause = _RETRY_SECONDS
            try:
                await (await self._services.subscriptions.registry()).list()  # creates its buckets if there are none
                bucket = await self._queues.bucket(SUBSCRIPTIONS)
                async with contextlib.aclosing(bucket.watch()) as changes:
                    async for entry in changes:
                        if entry is None:
                            self.ready.set()
                        else:
                            self._apply(entry)
            except PurveyorError as error:
                _log.warning("the registry of subscriptions cannot be watched: %s", error)
            except Exception as error:  # noqa: BLE001 - without the watch no subscription would start or stop any more
                self._registry_failures.add(error, asyncio.get_running_loop().time())
                pause = self._registry_failures.pause_seconds
            await asyncio.sleep(pause)

    def _apply(self, entry: Entry) -> None:
        """Apply a change of the registry."""
        name, _, part = entry.key.rpartition(".")
        if part == "prefill":
            if name in self._pushers:
                self._pushers[name][0].check_queue()
        elif part == "definition":
            self._records.pop(name, None)
            if entry.deleted:
                self._failures.pop(name, None)
            before = self._unreadable.pop(name, None)
            match assemble(name, {"definition": (entry.revision, None if entry.deleted else entry.value)}):
                case Registered() as found:
                    self._records[name] = found.record
                case Unreadable() as found:
                    self._unreadable[name] = found
                    self._options.on_event(name, "unreadable", found.reason)
                case None:
                    pass
            if before is not None and name not in self._unreadable:
                self._services.problems.set(name, before.incarnation or "", "")
            self._reconcile(name)

    def _reconcile(self, name: str) -> None:
        """Start, update or stop the pusher of a subscription; try again later if that fails."""
        try:
            self._start_or_stop(name)
        except Exception as error:  # noqa: BLE001 - the other subscriptions are not affected
            asyncio.get_running_loop().call_later(self._report_failure(name, error), self._reconcile, name)

    def _start_or_stop(self, name: str) -> None:
        record = self._records.get(name)
        wanted = record if record is not None and _is_pushed(record) else None
        pusher, task = self._pushers.get(name, (None, None))
        if pusher is not None and (wanted is None or wanted.incarnation != pusher.incarnation):
            pusher.stop()
            assert task is not None
            self._stopping[name] = task
            del self._pushers[name]
            task.add_done_callback(lambda _: self._on_stopped(name))
            pusher = None
        if wanted is None or name in self._stopping:
            return
        self._services.leases.invalidate(name)
        registered = Registered(record=wanted, revision=0)
        if pusher is not None:
            pusher.update(registered)
            return
        pusher = SubscriptionPusher(self._services, registered)
        task = asyncio.create_task(pusher.run())
        task.add_done_callback(lambda done: self._on_ended(name, done))
        self._pushers[name] = (pusher, task)

    def _on_stopped(self, name: str) -> None:
        self._stopping.pop(name, None)
        self._reconcile(name)

    def _on_ended(self, name: str, task: "asyncio.Task[None]") -> None:
        """Handle a pusher that ended without a request to stop.

        The registry reports a deleted or paused subscription; after an error the pusher starts again.
        """
        if self._pushers.get(name, (None, None))[1] is not task:
            return
        incarnation = self._pushers.pop(name)[0].incarnation
        error = None if task.cancelled() else task.exception()
        if error is not None:
            pause = self._report_failure(name, error)
            self._services.problems.set(name, incarnation, describe(error))
            asyncio.get_running_loop().call_later(pause, self._reconcile, name)

    def _report_failure(self, name: str, error: BaseException) -> float:
        """Report an unexpected error in the push of a subscription, and return the seconds to pause."""
        series = self._failures.setdefault(name, FailureSeries(f"push of subscription {name}"))
        self._options.on_event(name, "failed", series.add(error, asyncio.get_running_loop().time()))
        return series.pause_seconds

    async def _report_status(self) -> None:
        """Write to the status board how many subscriptions this worker pushes, and how many requests it has sent.

        Readers recognise a worker that died or hangs by the age of its notice.
        """
        about: Json = {"pid": os.getpid(), "host": socket.gethostname()}
        with contextlib.suppress(PurveyorError):
            await self._delete_notices_of_predecessors()
        while True:
            sent = int(sum(PUSH_ATTEMPTS.values().values()))
            notice = {**about, "subscriptions": len(self._pushers), "sent": sent}
            with contextlib.suppress(PurveyorError):  # the next one follows
                await write_notice(self._queues, self._notice_key, notice, replicas=self._options.replicas)
            await asyncio.sleep(_REPORT_INTERVAL_SECONDS)

    async def _delete_notices_of_predecessors(self) -> None:
        """Delete the notices of workers of this host that died: a worker that dies often must not fill the board."""
        for notice in await read_notices(self._queues, "push"):
            pid = notice.value.get("pid")
            is_here = notice.value.get("host") == socket.gethostname() and notice.key != self._notice_key
            if is_here and isinstance(pid, int) and (pid == os.getpid() or not process_exists(pid)):
                await delete_notice(self._queues, notice.key, replicas=self._options.replicas)

    async def _tick(self) -> None:
        """Do what no event triggers: close idle connections, and check all queues after a reconnect."""
        generation, turn = self._queues.connection.generation, 0
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            turn += 1
            for name, found in self._unreadable.items():
                self._services.problems.set(name, found.incarnation or "", found.reason)
            has_reconnected = self._queues.connection.generation != generation
            generation = self._queues.connection.generation
            for number, (pusher, _) in enumerate([*self._pushers.values()]):
                if has_reconnected or (number + turn) % _CHECK_INTERVAL_TICKS == 0:
                    pusher.check_queue()
            if turn % _CLOSE_IDLE_INTERVAL_TICKS == 0:
                try:
                    self._http.close_idle()
                except Exception as error:  # noqa: BLE001 - connections that are not closed now are closed later
                    self._idle_failures.add(error, asyncio.get_running_loop().time())


def _is_pushed(record: Record) -> bool:
    is_push = record.definition.delivery is Delivery.PUSH
    return is_push and record.state is RecordState.ACTIVE and not record.paused

"""One subscription of a push worker: takes messages as the endpoints have room, sends them, and answers for them.

One turn settles what came back and takes as many messages more, in one write of the book. A message is taken when it
can be sent at once; so after a crash all that was taken counts as attempted, and comes back when its lease is over.
In strict order several are taken, and sent one after another; when one fails, those behind it go back unused.
"""

import asyncio
import contextlib
import random
import time
from collections import deque
from typing import Final

from purveyor.delivery.push.answer import Answer, together
from purveyor.delivery.push.concurrency_window import is_slow
from purveyor.delivery.push.endpoint_pool import Lanes
from purveyor.delivery.push.endpoint_sender import Lane
from purveyor.delivery.push.failure_reasons import Failures
from purveyor.delivery.push.listener import Ear
from purveyor.delivery.push.push_metrics import AWAY_SECONDS, Reports
from purveyor.delivery.push.push_services import Shop
from purveyor.delivery.push.retry_decision import Outcome, Verdict, What, judge
from purveyor.delivery.push.timer import Alarm
from purveyor.delivery.transitions import Delivered, Look, refused
from purveyor.model import metrics, tracing
from purveyor.model.delivery_policy import OrderBy
from purveyor.model.errors import PrefillFailed, PurveyorError, UnknownSubscription, describe
from purveyor.model.push_config import AfterDeadLetter, Push
from purveyor.queues.registry import Registered

_LARGEST_BATCH: Final = 100
_STRICT_AT_ONCE: Final = 50
_FLUSH_SECONDS: Final = 0.005
_STUCK_SECONDS: Final = 30.0
_SECRETS: Final = "secrets"
_WINDOW: Final = "the window"
_TAKING: Final = "taking messages"
_ANSWERING: Final = "reading an answer"
_SETTLING: Final = "settling messages"


class Line:
    """See the module. `run` until `stop`; `update` when the registry says something new."""

    def __init__(self, shop: Shop, found: Registered) -> None:
        self.name = found.name
        self.incarnation = found.incarnation
        self._shop = shop
        self._loop = asyncio.get_running_loop()
        self._found = found
        self._push = _push_of(found)
        self._changed = True
        self._wake = asyncio.Event()
        self._ear = Ear(shop.connection, found.name, self.look_again)
        self._reports = Reports(found.name, found.incarnation, shop.troubles, shop.tell)
        self._failures = Failures(shop, self._reports, found.name, found.incarnation)
        self._lanes = Lanes(
            shop, found.name, look_again=self.look_again, say=self._reports.say, hindered=self._reports.hindered
        )
        self._answers: list[Answer] = []
        self._unused: list[int] = []
        self._queue: deque[Delivered] = deque()
        self._under_way = 0
        self._strict_at_once = 1
        self._enough = 1
        """So many answers are worth a write."""
        self._hungry = True
        self._listening = True
        self._ending = False
        self._leased_until = 0.0
        self._alarm = Alarm(self.look_again)
        self._flush = Alarm(self._wake.set)
        self._not_before = float("-inf")
        """When messages may be taken again after a failure."""
        self._resume = asyncio.Event()

    def update(self, found: Registered) -> None:
        """Another definition."""
        self._found = found
        self._push = _push_of(found)
        self._changed = True
        self._not_before = float("-inf")
        self._resume.set()
        self.look_again()

    def look_again(self) -> None:
        """There may be something to take."""
        self._hungry = True
        self._wake.set()

    def stop(self) -> None:
        """Take nothing more; what is under way is waited for."""
        self._ending = True
        self._resume.set()
        self._wake.set()

    async def run(self) -> None:
        """Until it is stopped, or the subscription is gone. No other error ends it: what is at hand is kept."""
        try:
            async with self._shop.openings:
                self._configure()
                await self._try_to_take(self._room())
            while not self._ending or self._under_way or self._answers or self._unused:
                try:
                    await self._turn()
                except UnknownSubscription:
                    raise
                except Exception as error:  # noqa: BLE001 - a loop that ends would leave its answers unsettled
                    await self._pause(self._reports.setback(_SETTLING, error))
        except UnknownSubscription:
            pass
        finally:
            await self._close()

    async def _pause(self, seconds: float) -> None:
        """Wait before the next turn; another definition ends the wait."""
        self._resume.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._resume.wait(), min(seconds, AWAY_SECONDS) if self._ending else seconds)

    async def _try_to_take(self, room: int) -> None:
        """Take messages; after a failure none are taken for a while, and what comes back is settled meanwhile."""
        if not room:
            return
        try:
            await self._take(room)
        except UnknownSubscription:
            raise
        except Exception as error:  # noqa: BLE001 - the next attempt may succeed; what was sent before is answered for
            pause = self._reports.setback(_TAKING, error)
            self._hungry, self._not_before = True, self._loop.time() + pause
            self._alarm.set(pause + 0.001)
        else:
            self._reports.recovered(_TAKING)

    async def _close(self) -> None:
        self._alarm.stop()
        self._flush.stop()
        await self._lanes.close()
        self._reports.close()
        for gauge in (metrics.PUSH_WINDOW, metrics.PUSH_OUTSTANDING):
            gauge.remove(self.name)
        self._shop.attempts.drop(self.name)
        with contextlib.suppress(PurveyorError):
            await self._ear.close()

    # One turn: settle, take, send.

    async def _turn(self) -> None:
        self._wake.clear()
        if self._changed:
            self._configure()
        room = self._room()
        if not (self._answers or self._unused):
            if room:
                await self._try_to_take(room)
            else:
                await self._wake.wait()
            return
        answers, self._answers, unused, self._unused = self._answers, [], self._unused, []
        if not room or self._strict:  # in strict order what it has must be answered for before it asks again
            await self._settle(answers, unused)
            return
        results = await asyncio.gather(self._settle(answers, unused), self._try_to_take(room), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def _room(self) -> int:
        """How many messages can be sent at once, if there is any reason to look for some."""
        if self._ending or not self._hungry or (self._strict and (self._queue or self._under_way)):
            return 0
        if self._loop.time() < self._not_before:
            return 0
        room = self._lanes.room()
        return min(room, 1) * self._strict_at_once if self._strict else room

    async def _take(self, room: int) -> None:
        """Take so many messages, or fewer, and send them.

        While there are more than enough, nobody listens for more. A look that finds too few counts as the last one
        only if somebody was listening before it.
        """
        if self._listening:
            self._ear.rang = False
            await self._ear.arm()
        began = self._loop.time()
        try:
            look, again_in = await self._shop.counter.look(self.name, room, self._lease_seconds)
        except PrefillFailed:
            look, again_in = Look([]), None  # until somebody acts, which the registry tells
        found = look.found
        self._reports.hindered(_WINDOW, "" if look.full is None else str(refused(self.name, look.full)))
        if len(found) == room or look.cut:
            self._listening = False
        elif not self._listening:
            self._listening = True
        else:
            self._hungry = self._ear.rang
            if again_in is not None:
                self._alarm.set(again_in)
        if not found:
            self._lanes.end_probes()
        self._leased_until = began + self._lease_seconds
        if self._strict:
            self._queue.extend(found)
            self._send_next()
        elif self._parks_keys and found:
            await self._send_or_park(found)
        else:
            for message in found:
                self._send(message)

    async def _send_or_park(self, found: list[Delivered]) -> None:
        try:
            blocked = await self._shop.parked.blocked(self.name, self.incarnation, found)
        except Exception:
            self._unused += [message.sequence for message in found]
            raise
        for message in found:
            key = blocked.get(message.sequence)
            if key is None:
                self._send(message)
                continue
            outcome = Outcome(error=f"parked with an earlier message about {key!r}", sent=False)
            self._answers.append(Answer(message, outcome, Verdict(What.GIVE_UP), time.time(), noted=True))
            self._wake.set()

    # Out and back.

    def _send_next(self) -> None:
        """In strict order: the next one, when the one before it is done, and nobody else can have it meanwhile."""
        if not self._queue or self._under_way:
            return
        if self._ending or self._loop.time() + self._push.ack_deadline_seconds > self._leased_until:
            self._drop_queue()
        else:
            self._send(self._queue.popleft())

    def _drop_queue(self) -> None:
        """What waits behind one that failed goes back."""
        self._unused += [waiting.sequence for waiting in self._queue]
        self._queue.clear()
        self._wake.set()

    def _send(self, message: Delivered) -> None:
        began = self._loop.time()
        lane = self._lanes.choose(began)
        if lane is None:
            self._unused.append(message.sequence)
            self._drop_queue()
            return
        try:
            request = lane.request(message)
        except Exception as error:  # noqa: BLE001 - whatever it is, no other message is concerned
            self._cannot_send(message, error)
            return
        lane.under_way += 1
        self._under_way += 1
        turn = lane.flow.round
        lane.host.post(
            request,
            self._push.ack_deadline_seconds,
            lambda outcome: self._back(message, lane, outcome, turn, began),
        )

    def _cannot_send(self, message: Delivered, error: Exception) -> None:
        """Give up a message of which no request can be made: another attempt would not differ."""
        words = f"it cannot be sent as {self._push.format.value}: {describe(error)}"
        self._answers.append(Answer(message, Outcome(error=words, sent=False), Verdict(What.GIVE_UP), time.time()))
        self._drop_queue()

    def _back(self, message: Delivered, lane: Lane, outcome: Outcome, turn: int, began: float) -> None:
        """An attempt is over. Called by the connection, so it is quick, and raises nothing."""
        try:
            verdict = self._learn(message, lane, outcome, turn, began)
        except Exception as error:  # noqa: BLE001 - an answer that breaks something is an attempt that failed
            self._reports.setback(_ANSWERING, error)
            outcome = Outcome(error=f"the answer cannot be read: {describe(error)}")
            verdict = Verdict(What.RETRY, self._found.record.definition.retry.max_backoff_seconds)
        lane.under_way -= 1
        self._under_way -= 1
        self._answers.append(Answer(message, outcome, verdict, time.time()))
        acknowledged = verdict.what is What.ACKNOWLEDGE
        if acknowledged:
            self._reports.said_nothing()
            self._reports.recovered(_ANSWERING)
        if verdict.what is What.DISABLE:
            self._ending = True
        if not acknowledged:
            self._strict_at_once = 1
            self._drop_queue()
        elif self._queue:
            self._send_next()
        else:
            self._strict_at_once = min(self._strict_at_once * 2, _STRICT_AT_ONCE)
        if not acknowledged or not self._under_way or len(self._answers) >= self._enough:
            self._wake.set()
        else:
            self._flush.set(_FLUSH_SECONDS)

    def _learn(self, message: Delivered, lane: Lane, outcome: Outcome, turn: int, began: float) -> Verdict:
        """Judge an attempt, and note what it tells about the endpoint."""
        push, retry = self._push, self._found.record.definition.retry
        verdict = judge(outcome, push, retry, message.num_delivered, random.random())  # noqa: S311 - only to spread
        seconds = self._loop.time() - began
        self._lanes.learn(lane, outcome, verdict, turn=turn, slow=is_slow(seconds, push.ack_deadline_seconds))
        self._count(message, verdict, seconds)
        return verdict

    def _count(self, message: Delivered, verdict: Verdict, seconds: float) -> None:
        """For those who watch."""
        outcome = verdict.what.name.lower()
        metrics.PUSH_ATTEMPTS.add(self.name, outcome)
        metrics.PUSH_SECONDS.add(seconds, self.name)
        if tracing.enabled():
            trace, attempt = tracing.of_headers(message.headers), message.num_delivered
            tracing.record("push", seconds, trace, subscription=self.name, attempt=attempt, outcome=outcome)

    # The book.

    async def _settle(self, answers: list[Answer], unused: list[int]) -> None:
        """Make answers count. If that fails they are kept, and made to count in another turn.

        1. What failed is noted. 2. What failed for good is parked. 3. If the endpoint is gone, the subscription is
        paused. 4. The book is written. 5. Notes that nobody needs any more are removed. A crash before 4 leaves a
        lease that runs out: the message is sent, or parked, again.
        """
        name, window = self.name, self._lanes.window
        self._enough = _STRICT_AT_ONCE if self._strict else min(max(window // 4, 1), _LARGEST_BATCH)
        metrics.PUSH_WINDOW.set(window, name)
        metrics.PUSH_OUTSTANDING.set(self._under_way, name)
        try:
            await self._failures.note(answers)
            await self._failures.park(answers, self._found.record.definition.retry.max_backoff_seconds)
            if any(each.verdict.what is What.DISABLE for each in answers):
                reason = f"{', '.join(self._push.endpoints)} is gone (410)"
                await self._shop.subscriptions.pause(name, reason)
                self._reports.say("disabled", reason)
            waiting = self._strict and bool(self._queue or self._under_way)
            renew = round(self._lease_seconds * 1000) if waiting else None
            settled = together(answers, unused, self._shop.counter.instance, renew)
            began = self._loop.time()
            await self._shop.counter.settle(name, self.incarnation, settled)
        except BaseException:
            self._answers, self._unused = answers + self._answers, unused + self._unused
            raise
        self._reports.recovered(_SETTLING)
        if settled.renew is not None:
            self._leased_until = began + self._lease_seconds
        if settled.unused or self._found.record.definition.order_by is OrderBy.KEY:
            self._hungry = True
        if settled.again:
            self._alarm.set(min(settled.again.values()) / 1000 + 0.002)
        await self._failures.forget(answers)

    # What was asked for.

    def _configure(self) -> None:
        """Take over what the definition says. Without its secrets nothing is sent, until they can be had."""
        try:
            self._lanes.configure(self._push)
            self._changed = False
            self._reports.hindered(_SECRETS, "")
        except Exception as error:  # noqa: BLE001 - settings that cannot be used are shown, and looked at again
            words = describe(error)
            self._reports.say("stuck", words)
            self._reports.hindered(_SECRETS, words)
            self._alarm.set(_STUCK_SECONDS)

    @property
    def _strict(self) -> bool:
        return self._found.record.definition.order_by is OrderBy.POSITION

    @property
    def _parks_keys(self) -> bool:
        return self._push.after_dead_letter is AfterDeadLetter.PARK_KEY

    @property
    def _lease_seconds(self) -> float:
        """Longer than an answer may take. In strict order the lease is renewed while messages wait their turn."""
        deadline = self._push.ack_deadline_seconds
        return deadline * (2 if self._strict else 1) + min(max(deadline / 2, 1.0), 10.0)


def _push_of(found: Registered) -> Push:
    push = found.record.definition.push
    assert push is not None
    return push

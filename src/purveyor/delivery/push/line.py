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
from collections.abc import Callable, Coroutine
from typing import Any, Final

from purveyor.delivery.hands import Delivered
from purveyor.delivery.push.alarm import Alarm
from purveyor.delivery.push.answer import Answer, together
from purveyor.delivery.push.attempts import note
from purveyor.delivery.push.ear import Ear
from purveyor.delivery.push.flow import is_slow
from purveyor.delivery.push.formats import key_of
from purveyor.delivery.push.lane import Lane, utc
from purveyor.delivery.push.lanes import Lanes
from purveyor.delivery.push.shop import Shop
from purveyor.delivery.push.verdict import Outcome, Verdict, What, judge
from purveyor.delivery.words import Kind
from purveyor.model import figures, tracing
from purveyor.model.errors import PrefillFailed, PurveyorError, UnknownSubscription
from purveyor.model.policy import OrderBy
from purveyor.model.push import AfterDeadLetter, Push
from purveyor.queues.registry import Registered

_LARGEST_BATCH: Final = 100
_STRICT_AT_ONCE: Final = 50
_FLUSH_SECONDS: Final = 0.005
_TROUBLE_SECONDS: Final = 1.0
_STUCK_SECONDS: Final = 30.0
_SECRETS: Final = "secrets"


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
        self._lanes = Lanes(shop, found.name, look_again=self.look_again, say=self._say, hindered=self._hindered)
        self._hindrances: dict[str, str] = {}
        """Why nothing is sent to an endpoint, or to none."""
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
        self._trouble = ""

    def update(self, found: Registered) -> None:
        """Another definition."""
        self._found = found
        self._push = _push_of(found)
        self._changed = True
        self.look_again()

    def look_again(self) -> None:
        """There may be something to take."""
        self._hungry = True
        self._wake.set()

    def stop(self) -> None:
        """Take nothing more; what is under way is waited for."""
        self._ending = True
        self._wake.set()

    async def run(self) -> None:
        """Until it is stopped, or the subscription is gone."""
        try:
            async with self._shop.openings:
                await self._try(self._begin)
            while not self._ending or self._under_way or self._answers or self._unused:
                if not await self._try(self._turn):
                    await asyncio.sleep(_TROUBLE_SECONDS)
        except UnknownSubscription:
            pass
        finally:
            await self._close()

    async def _try(self, work: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        try:
            await work()
        except UnknownSubscription:
            raise
        except PurveyorError as error:  # the server is away: what is here is kept, and tried again
            self._say("trouble", str(error))
            self._hungry = True
            return False
        return True

    async def _begin(self) -> None:
        self._configure()
        if room := self._room():
            await self._take(room)

    async def _close(self) -> None:
        self._alarm.stop()
        self._flush.stop()
        await self._lanes.close()
        self._shop.troubles.tell(self.name, self.incarnation, "")
        for gauge in (figures.PUSH_WINDOW, figures.PUSH_OUTSTANDING):
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
                await self._take(room)
            else:
                await self._wake.wait()
            return
        answers, self._answers, unused, self._unused = self._answers, [], self._unused, []
        if not room or self._strict:  # in strict order what it has must be answered for before it asks again
            await self._settle(answers, unused)
            return
        results = await asyncio.gather(self._settle(answers, unused), self._take(room), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    def _room(self) -> int:
        """How many messages can be sent at once, if there is any reason to look for some."""
        if self._ending or not self._hungry or (self._strict and (self._queue or self._under_way)):
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
            found, again_in = await self._shop.counter.look(self.name, room, self._lease_seconds)
        except PrefillFailed:
            found, again_in = [], None  # until somebody acts, which the registry tells
        if len(found) == room:
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
            blocked = await self._blocked(found)
        except PurveyorError:
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

    async def _blocked(self, found: list[Delivered]) -> dict[int, str]:
        """Messages about keys that are parked, with the key. What was put back from the dead letters goes on."""
        blocked: dict[int, str] = {}
        parked = await self._shop.parked.of(self.name, self.incarnation)
        for message in found if parked else ():
            key = key_of(message.data)
            if key is None or key not in parked or message.kind is Kind.RETRY:
                continue
            if not await self._shop.parked.is_free(self.name, self.incarnation, key, parked[key]):
                blocked[message.sequence] = key
        return blocked

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
        lane.under_way += 1
        self._under_way += 1
        turn = lane.flow.round
        lane.host.post(
            lane.request(message),
            self._push.ack_deadline_seconds,
            lambda outcome: self._back(message, lane, outcome, turn, began),
        )

    def _back(self, message: Delivered, lane: Lane, outcome: Outcome, turn: int, began: float) -> None:
        """An attempt is over. Called by the connection, so it is quick."""
        push, retry = self._push, self._found.record.definition.retry
        verdict = judge(outcome, push, retry, message.num_delivered, random.random())  # noqa: S311 - only to spread
        seconds = self._loop.time() - began
        slow = is_slow(seconds, push.ack_deadline_seconds)
        self._lanes.learn(lane, outcome, verdict, turn=turn, slow=slow)
        lane.under_way -= 1
        self._under_way -= 1
        self._count(message, verdict, seconds)
        self._answers.append(Answer(message, outcome, verdict, time.time()))
        acknowledged = verdict.what is What.ACKNOWLEDGE
        if acknowledged:
            self._trouble = ""
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

    def _count(self, message: Delivered, verdict: Verdict, seconds: float) -> None:
        """For those who watch."""
        outcome = verdict.what.name.lower()
        figures.PUSH_ATTEMPTS.add(self.name, outcome)
        figures.PUSH_SECONDS.add(seconds, self.name)
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
        figures.PUSH_WINDOW.set(window, name)
        figures.PUSH_OUTSTANDING.set(self._under_way, name)
        try:
            await asyncio.gather(*(self._note(each) for each in answers if each.is_failure and not each.noted))
            for each in answers:
                if each.verdict.what is What.GIVE_UP and not each.parked:
                    await self._park(each)
            if any(each.verdict.what is What.DISABLE for each in answers):
                reason = f"{', '.join(self._push.endpoints)} is gone (410)"
                await self._shop.subscriptions.pause(name, reason)
                self._say("disabled", reason)
            waiting = self._strict and bool(self._queue or self._under_way)
            renew = round(self._lease_seconds * 1000) if waiting else None
            settled = together(answers, unused, self._shop.counter.instance, renew)
            began = self._loop.time()
            await self._shop.counter.settle(name, self.incarnation, settled)
        except BaseException:
            self._answers, self._unused = answers + self._answers, unused + self._unused
            raise
        if settled.renew is not None:
            self._leased_until = began + self._lease_seconds
        if settled.unused or self._found.record.definition.order_by is OrderBy.KEY:
            self._hungry = True
        if settled.again:
            self._alarm.set(min(settled.again.values()) / 1000 + 0.002)
        done = [each.message.sequence for each in answers if each.needs_no_notes]
        await asyncio.gather(*(self._shop.attempts.forget(name, each, failed_before=True) for each in done))

    async def _note(self, answer: Answer) -> None:
        message = answer.message
        entry = answer.outcome.log_entry(utc(answer.at))
        await self._shop.attempts.add(self.name, self.incarnation, message.sequence, message.num_delivered, entry)
        answer.noted = True

    async def _park(self, answer: Answer) -> None:
        message = answer.message
        reason = f"not acknowledged after {message.num_delivered} deliveries; the last: {note(answer.outcome)}"
        if not answer.outcome.sent:
            reason = answer.outcome.words
        if not await self._shop.counter.park(self.name, self.incarnation, message, reason):
            answer.verdict = Verdict(What.RELEASE)  # another has it: what becomes of it is for that one to say
        answer.parked = True

    # What was asked for.

    def _configure(self) -> None:
        """Take over what the definition says. Without its secrets nothing is sent, until they can be had."""
        try:
            self._lanes.configure(self._push)
            self._changed = False
            self._hindered(_SECRETS, "")
        except PurveyorError as error:
            self._say("stuck", str(error))
            self._hindered(_SECRETS, str(error))
            self._alarm.set(_STUCK_SECONDS)

    def _hindered(self, what: str, words: str) -> None:
        """Something is in the way, or no more."""
        if words:
            self._hindrances[what] = words
        elif self._hindrances.pop(what, None) is None:
            return
        reason = "; ".join(dict.fromkeys(self._hindrances.values()))
        self._shop.troubles.tell(self.name, self.incarnation, reason)

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

    def _say(self, event: str, words: str) -> None:
        if words != self._trouble:
            self._trouble = words
            self._shop.tell(self.name, event, words)


def _push_of(found: Registered) -> Push:
    push = found.record.definition.push
    assert push is not None
    return push

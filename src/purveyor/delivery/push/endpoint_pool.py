"""The endpoints of one subscription: which of them has room, and what is learnt from every attempt.

An endpoint that is down is left alone until its time comes; then a connection is tried before any message is taken for
it, so that no attempt is spent on a host that is not there.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from purveyor.delivery.push.circuit_breaker import State
from purveyor.delivery.push.endpoint_sender import Lane, Secrets
from purveyor.delivery.push.http_pool import why
from purveyor.delivery.push.push_services import Shop
from purveyor.delivery.push.retry_decision import Outcome, Verdict, What
from purveyor.delivery.push.timer import Alarm
from purveyor.model.errors import Refused
from purveyor.model.push_config import Push

_REFUSED_SECONDS: Final = 30.0
_OTHERS_PROBE_SECONDS: Final = 1.0


class Lanes:
    """See the module. `look_again` is called when there may be room where there was none.

    `hindered` hears of an endpoint why push must not go there, and nothing when it may.
    """

    def __init__(
        self,
        shop: Shop,
        name: str,
        *,
        look_again: Callable[[], None],
        say: Callable[[str, str], None],
        hindered: Callable[[str, str], None],
    ) -> None:
        self._shop = shop
        self._name = name
        self._look_again = look_again
        self._say = say
        self._hindered = hindered
        self._loop = asyncio.get_running_loop()
        self._lanes: list[Lane] = []
        self._probes: set[asyncio.Task[None]] = set()
        self._alarm = Alarm(look_again)

    @property
    def window(self) -> int:
        """How many may be under way to all of them."""
        return sum(lane.flow.window for lane in self._lanes)

    def configure(self, push: Push) -> None:
        """Take over settings; what was learnt of an endpoint that stays is kept. InvalidInput without its secrets."""
        known: dict[str, Lane] = {lane.endpoint.url: lane for lane in self._lanes}
        for lane in self._lanes:
            lane.health.listeners.discard(self._look_again)
        self._lanes = []
        secrets = Secrets.open(push, self._shop.box)
        for endpoint in push.targets:
            found = known.pop(endpoint.url, None)
            health, host = self._shop.health(endpoint.url), self._shop.sender.host(endpoint)
            lane = Lane(endpoint, health, host) if found is None else found
            lane.adopt(self._name, push, secrets)
            lane.health.listeners.add(self._look_again)
            self._lanes.append(lane)
        for dropped in known.values():
            dropped.end_probe()
            self._hindered(dropped.endpoint.url, "")

    def room(self) -> int:
        """How many messages can be sent now; those that are down are seen to."""
        now = self._loop.time()
        room = 0
        for lane in self._lanes:
            if lane.health.state(now) is not State.CLOSED and not lane.probing:
                self._await_lane(lane, now)
            if lane.health.refused or lane.refused:
                lane.refused = lane.health.refused
                self._hindered(lane.endpoint.url, lane.refused)
            room += lane.room(now)
        return room

    def choose(self, now: float) -> Lane | None:
        """The one with the most room; None if there is none."""
        if len(self._lanes) == 1:
            only = self._lanes[0]
            return only if only.has_room(now) else None
        found = max(self._lanes, key=lambda lane: lane.room(now), default=None)
        return found if found is not None and found.room(now) else None

    def learn(self, lane: Lane, outcome: Outcome, verdict: Verdict, *, turn: int, slow: bool) -> None:
        """What an attempt tells about the endpoint. `turn` is the round of its window in which it was sent."""
        if verdict.what is What.ACKNOWLEDGE:
            lane.flow = lane.flow.failed(turn) if slow else lane.flow.succeeded(lane.under_way)
            lane.health.succeeded()
            lane.probing = False
            return
        now = self._loop.time()
        if outcome.refused:
            lane.health.asked_for_pause(now, _REFUSED_SECONDS)
            lane.health.refused = outcome.words
            self._say("refused", outcome.words)
        elif outcome.sent:
            lane.health.refused = ""
            lane.flow = lane.flow.failed(turn)
            if outcome.is_down:
                lane.health.failed(now)
            else:  # it is there, and does not like this message
                lane.health.succeeded()
            if verdict.pause_seconds:
                lane.health.asked_for_pause(now, verdict.pause_seconds)
            if lane.health.state(now) is State.OPEN:
                self._say("down", f"{lane.endpoint.url}: {outcome.words}")
        lane.end_probe()

    def end_probes(self) -> None:
        """There is nothing to probe with."""
        for lane in self._lanes:
            if not lane.under_way:
                lane.end_probe()

    async def close(self) -> None:
        """Leave the endpoints to others."""
        self._alarm.stop()
        for probe in self._probes:
            probe.cancel()
        await asyncio.gather(*self._probes, return_exceptions=True)
        for lane in self._lanes:
            lane.health.listeners.discard(self._look_again)
            lane.end_probe()

    def _await_lane(self, lane: Lane, now: float) -> None:
        breaker = lane.health.breaker
        if breaker.until is not None and now < breaker.until:
            self._alarm.set(breaker.until - now + 0.001)
        elif breaker.may_send(now):
            lane.health.breaker = breaker.probe()
            task = self._loop.create_task(self._probe(lane))
            self._probes.add(task)
            task.add_done_callback(self._probes.discard)
        else:
            self._alarm.set(_OTHERS_PROBE_SECONDS)

    async def _probe(self, lane: Lane) -> None:
        try:
            await lane.host.probe()
        except Exception as error:  # noqa: BLE001 - a probe that ended without an outcome would be the last one
            lane.health.failed(self._loop.time())
            lane.health.refused = why(error) if isinstance(error, Refused) else ""
            self._say("refused" if lane.health.refused else "down", f"{lane.endpoint.url}: {why(error)}")
        except asyncio.CancelledError:
            lane.health.breaker = lane.health.breaker.give_up_probe()
            raise
        else:
            lane.probing, lane.health.refused = True, ""
        self._look_again()

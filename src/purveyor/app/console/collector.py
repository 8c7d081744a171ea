"""Reads what the console shows: a handful of questions for all queues, however many subscriptions there are.

One look serves all who ask within a second. Between visits it goes on looking now and then, so that somebody who comes
at three in the morning sees what happened since midnight, or at least in the last hour.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from purveyor.app.console.snapshot import (
    Facts,
    PartFacts,
    PipelineFacts,
    QueueFacts,
    QueueKind,
    ReaderFacts,
)
from purveyor.app.console.time_series import History, Key
from purveyor.app.http.context import Services
from purveyor.app.telemetry.queue_metrics import kind_of
from purveyor.jetstream.maintenance import STREAM_PREFIX
from purveyor.jetstream.streams import Fill
from purveyor.model.errors import PurveyorError, Unavailable, UnknownStream
from purveyor.model.metrics import DELIVERED, REDELIVERED, RETURNED
from purveyor.queues import status_board
from purveyor.queues.catalogue import RECEIPTS
from purveyor.queues.client import Queues
from purveyor.queues.dead_letters.store import LetterBox
from purveyor.queues.registry import SUBSCRIPTIONS, Snapshot, refresh
from purveyor.queues.status_board import Notice

_log = logging.getLogger(__name__)
FRESH_SECONDS: Final = 0.8
_REST: Final = 20
"""A look is followed by a rest of so many times its work: with thousands of queues it is made less often."""
_LONGEST_SECONDS: Final = 5.0
_IDLE_SECONDS: Final = 15.0
_PATIENCE_SECONDS: Final = 3.0
_READ_BY_DURABLES: Final = ("ldif", "incoming", "prefill")
_REGISTRY: Final = f"KV_{SUBSCRIPTIONS}"


class Gatherer:
    """Looks at one server. `look` never raises: a server that is away is a fact too."""

    def __init__(self, services: Callable[[], Services]) -> None:
        self._services = services
        self._snapshot = Snapshot()
        self._asking = asyncio.Lock()
        self._facts = Facts(at=datetime.now(UTC), problem="The queues were not looked at yet", fix="Wait a moment")
        self._looked_at = float("-inf")
        self._fresh_seconds = FRESH_SECONDS
        self.history = History()

    async def run(self) -> None:
        """Look now and then, for ever."""
        while True:
            with contextlib.suppress(Exception):  # whatever it is, the next look tells it
                await self.look()
            await asyncio.sleep(_IDLE_SECONDS)

    async def look(self, *, anew: bool = False) -> Facts:
        """The facts, a second old as a rule; `anew`: as of now, for who has just changed something."""
        async with self._asking:
            if anew or time.monotonic() - self._looked_at > self._fresh_seconds:
                worked = time.thread_time()
                self._facts = await self._look()
                self._looked_at = time.monotonic()
                rest = _REST * (time.thread_time() - worked)
                self._fresh_seconds = min(max(FRESH_SECONDS, rest), _LONGEST_SECONDS)
            return self._facts

    async def _look(self) -> Facts:
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                found = await self._read(self._services().queues)
        except (TimeoutError, Unavailable) as error:
            told = error.message if isinstance(error, PurveyorError) else "The NATS server does not answer"
            return replace(self._facts, at=datetime.now(UTC), problem=told, fix=_fix(error))
        except PurveyorError as error:
            _log.warning("the console cannot look at the queues: %s", error)
            return replace(self._facts, at=datetime.now(UTC), problem=error.message, fix=_fix(error))
        self.history.add(found.at.timestamp(), numbers(found))
        return found

    async def _read(self, queues: Queues) -> Facts:
        await queues.connection.wait_connected(_PATIENCE_SECONDS)
        fills = await queues.streams.fills()
        there = {fill.stream: fill.last_sequence for fill in fills}
        self._snapshot = await refresh(queues, self._snapshot, there.get(_REGISTRY, 0))
        readers = {
            name: await _readers(queues, f"{STREAM_PREFIX}{name}")
            for name in _READ_BY_DURABLES
            if f"{STREAM_PREFIX}{name}" in there
        }
        return Facts(
            at=datetime.now(UTC),
            queues=queue_facts(fills, frozenset({*self._snapshot.subscriptions, *self._snapshot.unreadable})),
            readers=readers,
            subscriptions=self._snapshot.subscriptions,
            unreadable=self._snapshot.unreadable,
            pipelines=tuple(map(pipeline_facts, await status_board.read(queues, "pipeline"))),
            dead_letters=await LetterBox(queues).counts(),
        )


async def _readers(queues: Queues, stream: str) -> tuple[ReaderFacts, ...]:
    try:
        found = await queues.consumers.list(stream)
    except UnknownStream:  # removed meanwhile
        return ()
    return tuple(
        ReaderFacts(
            durable=each.name,
            ack_floor=each.ack_floor.stream_seq,
            pending=each.num_pending,
            unanswered=each.num_ack_pending,
            redelivered=each.num_redelivered,
            waiting=each.num_waiting,
            keeps_newest=each.name == RECEIPTS,
        )
        for each in found
    )


def queue_facts(fills: Iterable[Fill], subscriptions: frozenset[str]) -> dict[str, QueueFacts]:
    """Every queue of ours, by name; streams of others on the same server are none of our business. Pure."""
    found: dict[str, QueueFacts] = {}
    for fill in fills:
        kind = kind_of(fill.stream, subscriptions)
        if kind is None:
            continue
        name = fill.stream.removeprefix(STREAM_PREFIX)
        found[name] = QueueFacts(
            name=name,
            kind=QueueKind(kind),
            messages=fill.messages,
            bytes=fill.bytes,
            last_sequence=fill.last_sequence,
            oldest=fill.oldest,
            sealed=fill.sealed,
            consumers=fill.consumers,
        )
    return found


def pipeline_facts(notice: Notice) -> PipelineFacts:
    """A pipeline by its notice. Pure."""
    told = notice.value
    pid = told.get("pid")
    parts = told.get("parts")
    return PipelineFacts(
        label=notice.key.partition(".")[2],
        at=notice.at or datetime.fromtimestamp(0, UTC),
        host=str(told.get("host") or ""),
        pid=pid if isinstance(pid, int) else None,
        group=str(told.get("group") or ""),
        spark_ui=str(told["spark_ui"]) if told.get("spark_ui") else None,
        stopped=told.get("stopped") is True,
        parts=tuple(PartFacts.of(part) for part in parts if isinstance(part, dict)) if isinstance(parts, list) else (),
    )


def numbers(facts: Facts) -> Mapping[Key, float]:
    """What is remembered over time of each moment. Pure, but for the counters of this process.

    last: how much was ever written to a queue. done: how much of that has left it. floor: how far a reader is.
    """
    found: dict[Key, float] = {}
    for name, queue in facts.queues.items():
        found["last", name] = queue.last_sequence
        found["done", name] = queue.last_sequence - queue.messages
        found["waiting", name] = queue.messages
    for name, readers in facts.readers.items():
        for reader in readers:
            found["floor", name, reader.durable] = reader.ack_floor
    for origin, count in facts.dead_letters.items():
        found["dead", origin] = count
    for name, (_, part) in facts.parts.items():
        found["batch_ms", name] = part.batch_ms or 0
        found["lag", name] = part.lag or 0
        found["rows_per_second", name] = part.rows_per_second
    for series, counter in (("delivered", DELIVERED), ("redelivered", REDELIVERED), ("returned", RETURNED)):
        for (name,), value in counter.values().items():
            found[series, name] = value
    return found


def _fix(error: BaseException) -> str | None:
    return error.fix if isinstance(error, PurveyorError) else None

"""Kill -9 at each named point: each input is done once or a dead letter, each effect has its message and its event."""

import asyncio
import contextlib
import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from purveyor.delivery.dead_letters.service import DeadLetterFilter, open_dead_letters
from purveyor.jetstream.address import Address
from purveyor.model import json_fields
from purveyor.queues.catalogue import DEAD_LETTERS, STAGE_REPLIES, endpoint_queue
from purveyor.queues.client import Queues, connect
from purveyor.queues.dead_letters.letter import subject_token
from purveyor.stages import SqlStore, Stages
from purveyor.stages.crash_points import CrashPoint
from tests.stages.program import POINTS, Job, Plan, application, start
from tests.support.forgetting import forget_ids
from tests.support.nats_servers import OwnServer
from tests.support.scale import LONG, chance, pick
from tests.support.stages import letters, make_database, published, rows, stored
from tests.support.waiting import PATIENCE_SECONDS, until

KEYS = 5
RUNS = [("sqlite", 1, True), ("postgresql", 3, True), ("sqlite", 3, False), ("postgresql", 3, False)]
MORE = [("sqlite", 1, False), ("sqlite", 3, True), ("postgresql", 1, True), ("postgresql", 1, False)]


class Instances:
    """Processes that die at one point after the other; each is replaced until all points are done."""

    def __init__(self, plan: Plan, count: int, points: Iterator[tuple[str, int]]) -> None:
        self._plan = plan
        self._count = count
        self._points = points
        self._running: list[BaseProcess] = []
        self.deaths = 0
        self._fill()

    def _fill(self) -> None:
        # Nobody without a point: it could own the stage, and those that are to die would stand by for ever.
        for point, after in itertools.islice(self._points, self._count - len(self._running)):
            self._running.append(start(replace(self._plan, die_at=point, after=after)))

    def tend(self) -> None:
        dead = [process for process in self._running if not process.is_alive()]
        assert all(process.exitcode == -9 for process in dead)
        self.deaths += len(dead)
        self._running = [process for process in self._running if process not in dead]
        self._fill()

    def unarmed(self) -> None:
        """Replace the processes by ones that do not die."""
        self.stop()
        self._running = [start(self._plan) for _ in range(self._count)]

    def stop(self) -> None:
        for process in self._running:
            process.kill()
            process.join()


@pytest.mark.chaos
@pytest.mark.parametrize(("kind", "instances", "ordered"), [*RUNS, *(MORE if LONG else [])])
async def test_killed_at_each_point_every_message_is_done_once_or_a_dead_letter(  # noqa: PLR0917 - fixtures
    kind: str,
    instances: int,
    ordered: bool,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    address: Address,
    queues: Queues,
    unique: str,
) -> None:
    database = make_database(kind, request, tmp_path)
    random = chance(f"stages, {kind}, {instances} instances, {'in order' if ordered else 'parallel'}")
    for queue in (DEAD_LETTERS, STAGE_REPLIES, endpoint_queue(f"{unique}-sink", 1)):
        await queues.ensure(queue)
    plan = Plan(address, database, unique, ordered)
    sender = Stages(queues, store=SqlStore(database), app="test")
    endpoint = sender.remote(unique, request=Job, reply=type(None))
    order = [point for _ in range(pick(1, 8)) for point in random.sample(POINTS, len(POINTS))]
    wanted = len(order)
    running = Instances(plan, instances, iter([(point, random.randrange(3)) for point in order]))
    numbers = itertools.count()
    sent: dict[int, str] = {}
    poisonous: set[int] = set()

    async def feed(count: int) -> None:
        for number in itertools.islice(numbers, count):
            job = Job(number, poison=number % 10 in (4, 7))
            sent[number] = f"key-{number % KEYS}"
            if job.poison:
                poisonous.add(number)
            await sender.send(endpoint, job, key=sent[number], id=f"{unique}-{number}")

    try:
        await until(lambda: _exists(queues, unique))
        async with asyncio.timeout(pick(280, 1200)):
            while running.deaths < wanted:
                await feed(4)
                running.tend()
                await asyncio.sleep(0.05)
        running.unarmed()
        await feed(10)
        await until(lambda: _drained(queues, unique, database))
    finally:
        running.stop()
    done = await rows(database, "SELECT number, note FROM effects ORDER BY id")
    messages = await stored(queues, endpoint_queue(f"{unique}-sink", 1).stream, f"stage.{unique}-sink.0")
    parked = await stored(queues, DEAD_LETTERS.stream, f"dead-letters.{subject_token(f'stage:{unique}.0')}")
    print(f"{len(sent)} messages, {running.deaths} deaths, {len(parked)} dead letters")
    assert sorted(number for number, _ in done) == sorted(set(sent) - poisonous)
    out = [json_fields.parse(message["data"], "job")["number"] for message in messages]
    assert sorted(out) == sorted(set(sent) - poisonous)
    events = [each for each in await published(queues) if each.topic == unique]
    assert sorted(each.new["number"] for each in events) == sorted(set(sent) - poisonous)
    assert sorted(json_fields.parse(letter["data"], "job")["number"] for letter in parked) == sorted(poisonous)
    if ordered:
        in_order = {
            "effects": [number for number, _ in done],
            "messages": out,
            "events": [each.new["number"] for each in events],
        }
        for name, sequence in in_order.items():
            by_key: dict[str, list[int]] = defaultdict(list)
            for number in sequence:
                by_key[sent[number]].append(number)
            assert all(numbers == sorted(numbers) for numbers in by_key.values()), name


@pytest.mark.parametrize("settled", [False, True])
async def test_a_dead_letter_is_stored_once_after_a_crash_and_an_outage_longer_than_the_window_of_deduplication(
    own_server: OwnServer,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    *,
    settled: bool,
) -> None:
    """The process dies between publishing the letter and marking it; meanwhile an operator may discard it."""
    monkeypatch.setattr("purveyor.stages.relay._REMEMBERED", timedelta(0))
    database = make_database("sqlite", request, tmp_path)
    server = own_server(directory=tmp_path / "nats")
    plan = Plan(server.address, database, "crash", ordered=False)
    async with connect(server.address) as queues, contextlib.AsyncExitStack() as stack:
        store = SqlStore(database)
        stack.push_async_callback(store.close)
        for queue in (DEAD_LETTERS, STAGE_REPLIES, endpoint_queue("crash-sink", 1)):
            await queues.ensure(queue)
        sender = Stages(queues, store=store, app="test")
        dying = start(replace(plan, die_at=CrashPoint.PUBLISHED.value))
        await until(lambda: _exists(queues, "crash"))
        await sender.send(sender.remote("crash", request=Job, reply=type(None)), Job(1, poison=True), id="job-1")
        await asyncio.to_thread(dying.join, PATIENCE_SECONDS)
        assert dying.exitcode == -9
        (first,) = await letters(queues, "crash")
        await forget_ids(queues, DEAD_LETTERS.stream, "dead-letters.probe")
        if settled:
            async with open_dead_letters(queues) as parked:
                assert (await parked.discard(DeadLetterFilter(origin=first.origin))).done == 1
        stages = application(queues, plan, lambda _: None)
        async with stages:
            await until(lambda: _drained(queues, "crash", database))
        assert await letters(queues, "crash") == ([] if settled else [first])


async def _exists(queues: Queues, endpoint: str) -> bool:
    return endpoint_queue(endpoint, 1).stream in await queues.streams.names()


async def _drained(queues: Queues, endpoint: str, database: str) -> bool:
    if (await queues.streams.info(endpoint_queue(endpoint, 1).stream)).state.messages:
        return False
    return await rows(database, "SELECT count(*) FROM purveyor_outbox WHERE sent_ms IS NULL") == [(0,)]

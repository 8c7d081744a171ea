"""A chain of three services with random kills: each flow ends exactly once, and did each of its steps once."""

import asyncio
from pathlib import Path

import pytest

from purveyor.jetstream.address import Address
from purveyor.queues.catalogue import DEAD_LETTERS, STAGE_REPLIES, endpoint_queue
from purveyor.queues.client import Queues
from purveyor.stages import SqlStore, Stages
from tests.stages.chain import SERVICES, TIMING, Service, Step, start
from tests.support.scale import chance, pick
from tests.support.stages import make_database, rows
from tests.support.waiting import until


@pytest.mark.chaos
async def test_each_flow_through_three_services_ends_exactly_once(
    request: pytest.FixtureRequest, tmp_path: Path, address: Address, queues: Queues, unique: str
) -> None:
    random = chance("chain of three services")
    flows, kills = pick(80, 10_000), pick(4, 60)
    kinds = ["sqlite", "postgresql", "postgresql"]
    services = [
        Service(address, make_database(kind, request, tmp_path), unique, place) for place, kind in enumerate(kinds)
    ]
    for queue in (DEAD_LETTERS, STAGE_REPLIES):
        await queues.ensure(queue)
    for place in range(SERVICES):
        stages = 1 if place == SERVICES - 1 else 2
        await queues.ensure(endpoint_queue(f"{unique}.s{place}", stages, ack_wait=TIMING.ack_wait))
    sender = Stages(queues, store=SqlStore(services[0].database), app="test")
    first = sender.remote(f"{unique}.s0", request=Step, reply=Step)
    done = sender.remote(f"{unique}.done", request=Step, reply=type(None))
    running = [start(service) for service in services]
    try:
        for kill in range(kills):
            for number in range(kill * flows // kills, (kill + 1) * flows // kills):
                await sender.send(first, Step(number), reply_to=done, id=f"{unique}-{number}")
            await asyncio.sleep(random.uniform(0.1, 0.8))  # some moment, not a wait for anything
            victim = random.randrange(SERVICES)
            running[victim].kill()
            running[victim].join()
            running[victim] = start(services[victim])
        await until(lambda: _ended(services[0].database, flows))
        await until(lambda: _quiet(queues, unique))
    finally:
        for process in running:
            process.kill()
            process.join()
        await sender.store.close()
    ends = await rows(services[0].database, "SELECT number, note FROM effects WHERE note LIKE '>0>1%' ORDER BY number")
    assert ends == [(number, ">0>1<2<1<0") for number in range(flows)]
    for service in services:
        wanted = {"up"} if service.place == SERVICES - 1 else {"down", "up"}
        for what in wanted:
            found = await rows(service.database, f"SELECT number FROM effects WHERE note = '{what}' ORDER BY number")
            assert found == [(number,) for number in range(flows)], (service.place, what)


async def _ended(database: str, flows: int) -> bool:
    return await rows(database, "SELECT count(DISTINCT number) FROM effects WHERE note LIKE '>0%'") == [(flows,)]


async def _quiet(queues: Queues, prefix: str) -> bool:
    names = [f"{prefix}.s{place}" for place in range(SERVICES)] + [f"{prefix}.done"]
    return not any([(await queues.streams.info(endpoint_queue(name, 1).stream)).state.messages for name in names])

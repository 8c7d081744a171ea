"""A cluster of three with three replicas, and one node killed in the middle of a drain."""

import asyncio
import dataclasses
from pathlib import Path

import pytest

from purveyor.model.errors import OutcomeUnknown, Unavailable
from purveyor.queues.catalogue import Queue
from purveyor.queues.client import Queues, connect
from purveyor.queues.config import Retention
from purveyor.queues.migration.status import QueueStatus
from purveyor.queues.migration.steps import Options, Step
from tests.queues.migration.cluster import Cluster, cluster
from tests.queues.migration.conftest import Worker, declared, make_old, publish
from tests.scale import LONG, chance

STEPS = (Step.SEALED, Step.DRAINED, Step.DELETED, Step.CREATED)
BACKLOG, ALL = 30, 60
_AWAY_SECONDS = 5.0


@pytest.mark.chaos
def test_a_node_killed_in_mid_drain_costs_no_message(tmp_path: Path) -> None:
    steps = STEPS if LONG else [chance("node killed in mid-migration").choice(STEPS)]
    with cluster(tmp_path) as servers:
        for number, step in enumerate(steps):
            print(step)
            asyncio.run(_migrate(servers, f"queue-{number}", step))


async def _migrate(servers: Cluster, name: str, step: Step) -> None:
    queue = declared(name, Retention.INTEREST)
    async with connect(servers.address, patience_seconds=60) as queues:
        stream = await _make(queues, name)
        await publish(queues, name, 1, BACKLOG)
        leader = (await queues.streams.raw_info(stream))["cluster"]["leader"]
        killed = False

        def kill(now: Step) -> None:
            nonlocal killed
            if now is step and not killed:
                killed = True
                servers.kill(leader)
                # A stream with three replicas is not made while one of three nodes is known to be away.
                asyncio.get_running_loop().call_later(_AWAY_SECONDS, servers.start)

        worker = Worker(queues, stream)
        publishing = asyncio.create_task(_publish(queues, stream, worker))
        working = asyncio.create_task(worker.run())
        options = Options(lease_seconds=2, on_step=kill)
        queues.migrations.options = options  # whoever does the step, the worker too
        async with asyncio.timeout(180):
            await _see_through(queues, queue, options)
            assert killed
            await publishing
            while len(set(worker.done)) < ALL:  # noqa: ASYNC110 - what a worker does
                await asyncio.sleep(0.05)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        once = list(dict.fromkeys(worker.done))
        assert once == list(range(1, ALL + 1)), worker.done
        # An acknowledgement that the killed node had taken, and nobody else knew of, is asked for again.
        assert len(worker.done) - len(once) <= 1, worker.done
        config = (await queues.streams.info(stream)).config
        assert (config.retention, config.num_replicas, config.sealed) == (Retention.INTEREST, 3, False)
        servers.start()


async def _publish(queues: Queues, stream: str, worker: Worker) -> None:
    """As a careful publisher does: when nobody can tell whether a message is stored, it looks before it goes on."""
    name = stream.partition(":")[2]
    for number in range(BACKLOG + 1, ALL + 1):
        try:
            await publish(queues, name, number, number)
        except OutcomeUnknown:
            print("in doubt:", number)
            while (await queues.streams.info(stream)).state.messages:  # noqa: ASYNC110 - all has to be processed
                await asyncio.sleep(0.1)
            if number not in worker.done:
                await publish(queues, name, number, number)


async def _make(queues: Queues, name: str) -> str:
    """A new cluster has no leader for some seconds."""
    async with asyncio.timeout(120):
        while True:
            try:
                return await make_old(queues, name, num_replicas=3)
            except Exception:  # noqa: BLE001 - too few peers yet, no leader yet
                await asyncio.sleep(0.2)


async def _see_through(queues: Queues, queue: Queue, options: Options) -> None:
    migrations = queues.migrations.with_options(dataclasses.replace(options))
    while True:
        try:
            if await migrations.begin(queue, replicas=3) is QueueStatus.READY:
                return
        except Unavailable:
            pass  # the killed node was the leader of something: another instance would come by
        await asyncio.sleep(0.1)

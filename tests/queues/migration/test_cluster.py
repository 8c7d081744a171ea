"""A cluster of three with three replicas, and one node killed in the middle of a migration."""

import asyncio
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from purveyor.jetstream.config import Retention
from purveyor.model.errors import OutcomeUnknown, Unavailable
from purveyor.queues.catalogue import Queue
from purveyor.queues.client import Queues, connect
from purveyor.queues.migration.events import MigrationOptions, Progress, Step
from purveyor.queues.migration.plan import Strategy
from purveyor.queues.migration.record import QueueStatus
from tests.support.cluster import Cluster, cluster
from tests.support.migrations import Worker, declare_queue, make_old_stream, publish
from tests.support.scale import LONG, chance, pick
from tests.support.waiting import PATIENCE_SECONDS, until

TO_DISK, FROM_DISK = "to disk", "from disk"
MOMENTS = [
    *((Strategy.DRAIN, step) for step in (Step.SEALED, Step.DRAINED, Step.DELETED, Step.CREATED)),
    *((Strategy.SNAPSHOT, step) for step in (Step.SEALED, Step.ARCHIVED, Step.DELETED, Step.CREATED)),
    *((Strategy.SNAPSHOT, part) for part in (TO_DISK, FROM_DISK)),
]
BACKLOG, ALL = 30, 60
PAD_BYTES = 30_000
"""So that a snapshot goes to disk and comes back in many parts."""
_AWAY_SECONDS = pick(1.0, 5.0)


@dataclass(frozen=True)
class Moment:
    """When to kill, and whom: the leader of the old stream, or one of the others."""

    strategy: Strategy
    step: Step | str
    leader: bool


@pytest.mark.chaos
def test_a_node_killed_in_mid_migration_costs_no_message(tmp_path: Path) -> None:
    random = chance("node killed in mid-migration")
    moments = [Moment(*each, leader) for each in MOMENTS for leader in (True, False)]
    with cluster(tmp_path) as servers:
        for number, moment in enumerate(moments if LONG else [random.choice(moments)]):
            print(moment)
            asyncio.run(_migrate(servers, f"queue-{number}", moment, tmp_path / "archives"))


async def _migrate(servers: Cluster, name: str, moment: Moment, archives: Path) -> None:
    queue = declare_queue(name, Retention.INTEREST)
    async with connect(servers.address, patience_seconds=60) as queues:
        stream = await _make(queues, name)
        for number in range(1, BACKLOG + 1):
            pad = {"pad": os.urandom(PAD_BYTES).hex()}
            await queues.publish(name, b"%d" % number, msg_id=f"{name}-{number}", headers=pad)
        nodes = (await queues.streams.raw_info(stream))["cluster"]
        victim = nodes["leader"] if moment.leader else nodes["replicas"][0]["name"]
        killed = False

        def kill(now: Step | str) -> None:
            nonlocal killed
            if now == moment.step and not killed:
                killed = True
                servers.kill(victim)
                # A stream with three replicas is not made while one of three nodes is known to be away.
                asyncio.get_running_loop().call_later(_AWAY_SECONDS, servers.start)

        def kill_at(progress: Progress) -> None:
            kill(progress.what)

        worker = Worker(queues, stream)
        publishing = asyncio.create_task(_publish(queues, stream, worker))
        begin = asyncio.Event()
        working = asyncio.create_task(_work(worker, begin))
        if moment.strategy is Strategy.DRAIN:
            begin.set()  # else the backlog is there when the snapshot is taken
        options = MigrationOptions(archives=archives, lease_seconds=2, on_step=kill, on_progress=kill_at)
        queues.migrations.options = options  # whoever does the step, the worker too
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                await _see_through(queues, queue, options, moment.strategy)
                assert killed
                begin.set()
                await publishing
                await until(lambda: len(set(worker.done)) >= ALL or working.done(), seconds=180)
        except (TimeoutError, AssertionError):
            print(
                moment, worker.done, await queues.streams.raw_info(stream), await queues.consumers.list_complete(stream)
            )
            raise
        assert not working.done(), working.exception()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        once = list(dict.fromkeys(worker.done))
        assert once == list(range(1, ALL + 1)), worker.done
        # An acknowledgement that the killed node had taken, and nobody else knew of, is asked for again.
        assert len(worker.done) - len(once) <= 1, worker.done
        config = (await queues.streams.info(stream)).config
        assert (config.retention, config.num_replicas, config.sealed) == (Retention.INTEREST, 3, False)
        servers.start()


async def _work(worker: Worker, begin: asyncio.Event) -> None:
    await begin.wait()
    await worker.run()


async def _publish(queues: Queues, stream: str, worker: Worker) -> None:
    """Publish, and if it is unknown whether a message is stored, read the stream before the next one."""
    name = stream.partition(":")[2]
    for number in range(BACKLOG + 1, ALL + 1):
        try:
            await publish(queues, name, number, number)
        except OutcomeUnknown:
            print("in doubt:", number)
            await until(partial(_emptied, queues, stream), what="an empty stream", seconds=180)
            if number not in worker.done:
                await publish(queues, name, number, number)


async def _emptied(queues: Queues, stream: str) -> bool:
    return (await queues.streams.info(stream)).state.messages == 0


async def _make(queues: Queues, name: str) -> str:
    """A new cluster has no leader for some seconds."""
    return await until(lambda: make_old_stream(queues, name, num_replicas=3), ignoring=(Exception,))


async def _see_through(queues: Queues, queue: Queue, options: MigrationOptions, strategy: Strategy) -> None:
    migrations = queues.migrations.with_options(replace(options))
    while True:
        try:
            if await migrations.begin(queue, replicas=3, strategy=strategy) is QueueStatus.READY:
                return
        except Unavailable:
            pass  # the killed node was the leader of something: another instance would come by
        await asyncio.sleep(0.1)

"""Workers that are killed, several at once, and a server that restarts: every message is delivered or a dead letter."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.address import Address
from purveyor.model import delivery_state
from purveyor.model.delivery_policy import OrderBy, RetryPolicy
from purveyor.model.delivery_state import Lease
from purveyor.queues.client import Queues, connect
from purveyor.queues.registry import ACKNOWLEDGED
from tests.support.killing import kill_server
from tests.support.nats_servers import OwnServer
from tests.support.push import PushSubscription, Site
from tests.support.scale import chance, pick
from tests.support.waiting import PATIENCE_SECONDS, until


class Program:
    """`purveyor serve push` in a process of its own."""

    def __init__(self, address: Address, data_dir: Path) -> None:
        host, port = address.hosts()[0]
        settings = {
            "PURVEYOR_NATS_URL": f"nats://{address.user}:{address.password}@{host}:{port}",
            "PURVEYOR_DATA_DIR": str(data_dir),
            "PURVEYOR_PUSH_ALLOW": "127.0.0.1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from purveyor.app.cli import main; main()", "serve", "push", "--json"],
            env=os.environ | settings,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self) -> None:
        assert self._process.stdout is not None
        line = await asyncio.to_thread(self._process.stdout.readline)
        assert json.loads(line)["event"] == "ready", line

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def stop(self) -> int:
        if self._process.poll() is None:
            self._process.terminate()
        self._process.communicate(timeout=PATIENCE_SECONDS)
        return self._process.returncode


async def _leases(queues: Queues, name: str) -> tuple[Lease, ...]:
    bucket = await queues.bucket(ACKNOWLEDGED)
    return delivery_state.decode((await bucket.get(name)).value).leases


@pytest.mark.chaos
async def test_killed_workers_and_a_server_that_restarts_lose_nothing_and_keep_the_order(
    own_server: OwnServer, site: Site, tmp_path: Path
) -> None:
    random = chance("push")
    count, keys = pick(240, 3000), 12
    server = own_server()
    async with connect(server.address, name="tests", patience_seconds=30) as queues:
        pushed = PushSubscription(queues, Subscriptions(queues), site, f"crash-{random.randrange(10**9)}")
        await pushed.add(
            "/script",
            order_by=OrderBy.KEY,
            ack_deadline_seconds=2,
            retry=RetryPolicy(max_attempts=6, min_backoff_seconds=0.01, max_backoff_seconds=0.05),
        )
        poison = {random.randrange(1, count + 1) for _ in range(5)}
        scripts = [
            [500] * 99 if number in poison else [500] * random.choice((0, 0, 0, 1)) for number in range(1, count + 1)
        ]
        await pushed.write(*({"uuid": f"k{random.randrange(keys)}", "script": script} for script in scripts))
        programs = [Program(server.address, tmp_path) for _ in range(2)]
        try:
            for program in programs:
                await program.ready()
            kills = pick(1, 10)
            async with asyncio.timeout(pick(240, 1200)):
                for number in range(kills):
                    share = count * (number + 1) // (kills + 3)
                    await until(lambda share=share: len(set(pushed.acked())) >= share)  # type: ignore[misc]
                    at = random.randrange(2)
                    programs[at].kill()
                    if number % 3 == 0:
                        await asyncio.to_thread(kill_server, server)  # and it is started again
                    programs[at] = Program(server.address, tmp_path)
                await pushed.drained()
            letters = await pushed.letters()
        finally:
            codes = [program.stop() for program in programs]
    assert set(codes) <= {0, -signal.SIGTERM}  # one that was just started may not know yet how to stop
    parked = [json.loads(letter.data)["body"]["new"]["n"] for letter in letters]
    delivered = pushed.acked()
    assert set(parked) == poison
    assert len(parked) == len(poison)
    assert set(delivered) | set(parked) == set(range(1, count + 1))
    assert not set(delivered) & set(parked)
    for letter in letters:
        assert letter.attempts >= 6
        assert len(json.loads(str(letter.details["attempts_log"]))) >= 1
    by_key: dict[str, list[int]] = defaultdict(list)
    for each in pushed.seen():
        if each["status"] == 204 and each["n"] not in by_key[each["key"]]:
            by_key[each["key"]].append(each["n"])
    for numbers in by_key.values():
        assert numbers == sorted(numbers)


async def test_a_standby_takes_over_what_a_killed_worker_had_in_strict_order(
    own_server: OwnServer, site: Site, tmp_path: Path
) -> None:
    server = own_server()
    async with connect(server.address, name="tests", patience_seconds=30) as queues:
        pushed = PushSubscription(queues, Subscriptions(queues), site, f"standby-{os.getpid()}")
        await pushed.add("/slow/0.1", order_by=OrderBy.POSITION, ack_deadline_seconds=2)
        await pushed.write(*({} for _ in range(40)))
        programs = [Program(server.address, tmp_path) for _ in range(2)]
        try:
            for program in programs:
                await program.ready()
            async with asyncio.timeout(PATIENCE_SECONDS):
                await until(lambda: len(pushed.acked()) >= 10)
                leases = await until(lambda: _leases(queues, pushed.name))
                killed = next(each for each in programs if f"-{each.pid}-" in leases[0].instance)
                killed.kill()
                programs.remove(killed)
                await pushed.drained()
        finally:
            for program in programs:
                program.stop()
    assert list(dict.fromkeys(pushed.acked())) == list(range(1, 41))

"""Acknowledged messages survive kill -9 of the server; bulk calls survive a lost connection."""

import asyncio
import os
import threading
from pathlib import Path

import pyarrow as pa
import pytest

from purveyor.jetstream import (
    PublishMode,
    PublishOptions,
    ServerOptions,
    StreamConfig,
    publish_many,
    read_range,
)
from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import outgoing
from purveyor.jetstream.server import RestartPolicy
from purveyor.queues import connect
from tests.support.killing import kill_server
from tests.support.nats_servers import OwnServer
from tests.support.proxy import TcpProxy
from tests.support.scale import chance, pick

BODY = bytes(200)


async def make(address: Address, name: str, **config: object) -> None:
    async with connect(address) as queues:
        await queues.streams.add(StreamConfig(name=name, subjects=(name,), **config))  # type: ignore[arg-type]


def numbered(subject: str, count: int) -> list[tuple[str, bytes, None, str]]:
    return [(subject, b"%d" % number, None, f"id-{number}") for number in range(count)]


def stored_numbers(address: Address, stream: str, last: int) -> list[int]:
    batches = list(read_range(address, stream, 1, last))
    return [int(value) for batch in batches for value in batch.column("data").to_pylist()]


@pytest.mark.chaos
@pytest.mark.parametrize("mode", list(PublishMode))
def test_every_acknowledged_message_is_there_after_kill_9(own_server: OwnServer, mode: PublishMode) -> None:
    """With `sync_interval: always`, the server is killed at random moments during a publish."""
    count, kills = pick(20_000, 100_000), pick(2, 5)
    random = chance("kill -9 while publishing")
    often = RestartPolicy(max_deaths=100)  # it dies more often here than a supervisor would put up with
    server = own_server(ServerOptions(sync="always", restart=often))
    asyncio.run(make(server.address, "S", allow_atomic=True))
    acknowledged = 0
    moments = sorted(random.randrange(count // 20, count) for _ in range(kills))
    killed = 0

    def progress(done: int) -> None:
        nonlocal acknowledged, killed
        acknowledged = done
        if killed < kills and done >= moments[killed]:
            killed += 1
            kill_server(server)

    options = PublishOptions(mode=mode, on_progress=progress)
    report = publish_many(server.address, outgoing(numbered("S", count)), options)
    assert killed >= 1
    assert report.stored + report.duplicates == count == acknowledged
    kill_server(server)  # once more, with everything acknowledged
    assert stored_numbers(server.address, "S", count + 1) == list(range(count))


@pytest.mark.chaos
@pytest.mark.parametrize("mode", list(PublishMode))
def test_a_connection_lost_in_the_middle_of_publish_many(address: Address, unique: str, mode: PublishMode) -> None:
    """Nothing is lost or stored twice, order is kept; the caller only waits."""
    outage, count = pick(1.5, 30.0), pick(50_000, 200_000)
    asyncio.run(make(address, unique, allow_atomic=True))
    with TcpProxy(*address.hosts()[0]) as proxy:
        away = threading.Event()

        def progress(done: int) -> None:
            if done >= count // 3 and not away.is_set():
                away.set()
                proxy.refuse()
                threading.Timer(outage, proxy.restore).start()

        options = PublishOptions(mode=mode, on_progress=progress, patience_seconds=90)
        report = publish_many(proxy.address(address), outgoing(numbered(unique, count)), options)
    assert away.is_set()
    assert report.stored + report.duplicates == count
    assert stored_numbers(address, unique, count + 1) == list(range(count))


@pytest.mark.chaos
def test_a_connection_lost_in_the_middle_of_a_read(address: Address, unique: str) -> None:
    """Every row comes once, in order, despite several broken connections."""
    count, outage = 60_000, pick(0.5, 30.0)
    asyncio.run(make(address, unique))
    publish_many(address, outgoing(numbered(unique, count)))
    seen: list[int] = []
    with TcpProxy(*address.hosts()[0]) as proxy:
        cuts = [count // 4, count // 2]
        for batch in read_range(proxy.address(address), unique, 1, count):
            seen += [int(value) for value in batch.column("data").to_pylist()]
            if cuts and len(seen) >= cuts[0]:
                cuts.pop(0)
                proxy.refuse()
                threading.Timer(outage, proxy.restore).start()
    assert not cuts
    assert seen == list(range(count))


@pytest.mark.chaos
def test_reading_a_long_range_holds_one_batch(address: Address, unique: str) -> None:
    """Memory does not grow with the range."""
    count = pick(200_000, 1_000_000)
    asyncio.run(make(address, unique))
    body = pa.array([BODY] * 10_000, pa.binary())
    subjects = pa.array([unique] * 10_000, pa.string())
    batch = pa.record_batch({"subject": subjects, "data": body})
    publish_many(address, (batch for _ in range(count // 10_000)))
    del batch, body, subjects
    rows, peak, first = 0, 0, 0
    for portion in read_range(address, unique, 1, count):
        rows += portion.num_rows
        del portion
        resident = _resident_bytes()
        first = first or resident
        peak = max(peak, resident)
    assert rows == count
    assert peak - first < 64 << 20, "a range of hundreds of megabytes must not be held"


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

"""A cluster with too many messages to store refuses more: publishers wait; nothing is lost, duplicated or reordered."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from purveyor.jetstream import publish_many, read_range
from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import outgoing
from purveyor.jetstream.bulk.net.pool import request_api
from purveyor.model.errors import PurveyorError
from purveyor.queues import connect
from tests.support.cluster import cluster
from tests.support.waiting import wait_until


def make(address: Address, stream: str) -> None:
    """Create a stream as soon as the servers have formed a cluster."""
    config = {"name": stream, "subjects": [f"{stream}.*"], "num_replicas": 3, "allow_direct": True}
    wait_until(lambda: request_api(address, f"STREAM.CREATE.{stream}", config), ignoring=(PurveyorError,))


def stored(address: Address, stream: str, count: int) -> Iterator[tuple[str, int]]:
    for batch in read_range(address, stream, 1, count + 1):
        for subject, data in zip(batch.column("subject").to_pylist(), batch.column("data").to_pylist(), strict=True):
            yield subject, int(data)


@pytest.mark.timeout(300)
def test_many_bulk_publishers_do_not_overrun_a_replicated_stream(tmp_path: Path) -> None:
    """The default limit of a server is 10,000 messages; here it is 3,000."""
    publishers, each = 2, 20_000
    with cluster(tmp_path, "max_buffered_msgs: 3000") as servers:
        make(servers.address, "S")

        def publish(number: int) -> int:
            rows = ((f"S.{number}", b"%d" % index, None, f"{number}-{index}") for index in range(each))
            return publish_many(servers.address, outgoing(rows)).stored

        with ThreadPoolExecutor(publishers) as pool:
            assert list(pool.map(publish, range(publishers))) == [each] * publishers
        found: dict[str, list[int]] = {}
        for subject, index in stored(servers.address, "S", publishers * each):
            found.setdefault(subject, []).append(index)
        assert found == {f"S.{number}": list(range(each)) for number in range(publishers)}


@pytest.mark.timeout(300)
def test_temporarily_refused_single_publishes_are_sent_again(tmp_path: Path) -> None:
    """Here the limit is 20 messages."""
    count = 1500

    async def publish(address: Address) -> None:
        async with connect(address) as queues:
            receipts = await asyncio.gather(*(queues.publish("S.a", b"%d" % n, msg_id=f"{n}") for n in range(count)))
            assert not any(receipt.duplicate for receipt in receipts)

    with cluster(tmp_path, "max_buffered_msgs: 20") as servers:
        make(servers.address, "S")
        asyncio.run(publish(servers.address))
        assert sorted(index for _, index in stored(servers.address, "S", count)) == list(range(count))

"""Compare the bulk path with nats-py and with a bare socket, on the same server in the same run."""

import asyncio
import gc
import os
import threading
import time
from pathlib import Path

from benchmarks import peers
from benchmarks.report import Row, Section, best_of
from benchmarks.streams import Streams
from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import (
    PublishMode,
    PublishOptions,
    ReadOptions,
    Route,
    publish_many,
    read_range,
)

ROUNDS = 3


def run(address: Address, *, messages: int = 1_000_000) -> list[Section]:
    """Run all comparisons of the bulk path."""
    benchmark = _BulkBenchmark(address, messages)
    try:
        return [benchmark.section()]
    finally:
        benchmark.streams.clear()


class _BulkBenchmark:
    def __init__(self, address: Address, messages: int) -> None:
        self.address = address
        self.messages = messages
        self.published = messages // 3
        self.nats_py_messages = messages // 30  # nats-py is slower: fewer messages are enough
        self.streams = Streams(address)
        self.plain, self.stream = self.streams.fresh(), self.streams.fresh()

    def section(self) -> Section:
        peers.publish_plain(self.address, self.plain, self.messages)
        publish_many(self.address, peers.batches(self.stream, self.messages))
        for name in (self.plain, self.stream):
            peers.publish_mark(self.address, name)
        best = best_of(
            ROUNDS,
            {
                "publish_many": lambda: self._publish(PublishMode.PIPELINED),
                "nats-py publish_async": self._nats_publish,
                "publish_many, atomic": lambda: self._publish(PublishMode.ATOMIC),
                "read_range": lambda: self._read(self.plain, Route.CONSUMER),
                "nats-py fetch": lambda: asyncio.run(peers.nats_fetch(self.address, self.plain, self.nats_py_messages)),
                "socket": lambda: peers.socket_unparsed(self.address, self.plain, self.messages),
                "read_range, ids": lambda: self._read(self.stream, Route.CONSUMER),
                "socket, ids": lambda: peers.socket_unparsed(self.address, self.stream, self.messages),
                "read_range, direct get": lambda: self._read(self.plain, Route.DIRECT),
            },
        )
        publish, fetch, socket = best["nats-py publish_async"], best["nats-py fetch"], best["socket"]
        rows = [
            Row("publish_many with ids / nats-py publish_async", best["publish_many"], publish, at_least=5),
            Row("publish_many, atomic batches / nats-py publish_async", best["publish_many, atomic"], publish),
            Row("read_range / nats-py fetch(500), no acks", best["read_range"], fetch, at_least=20),
            Row("read_range / bytes off the socket, unparsed", best["read_range"], socket, at_least=0.7),
            Row("read_range, messages with ids / bytes off the socket", best["read_range, ids"], best["socket, ids"]),
            Row("read_range by direct get / bytes off the socket", best["read_range, direct get"], socket),
            Row(
                "memory grown by / all that was read",
                self._memory_growth_bytes() / 1e6,
                self.messages * peers.SIZE / 1e6,
                "MB",
            ),
        ]
        description = (
            f"{self.messages:,} messages of {peers.SIZE} bytes, all columns read, one process, best of {ROUNDS} rounds "
            "in which all take turns. The targets for reading apply to messages without headers; messages with ids are "
            "measured as well."
        )
        return Section("The bulk path", description, rows)

    def _publish(self, mode: PublishMode) -> float:
        name = self.streams.fresh(allow_atomic=True)
        batches = list(peers.batches(name, self.published))
        began = time.perf_counter()
        report = publish_many(self.address, batches, PublishOptions(mode=mode))
        seconds = time.perf_counter() - began
        assert report.stored == self.published
        self.streams.remove(name)
        return self.published / seconds

    def _nats_publish(self) -> float:
        name = self.streams.fresh()
        rate = asyncio.run(peers.nats_publish(self.address, name, self.nats_py_messages))
        self.streams.remove(name)
        return rate

    def _read(self, stream: str, route: Route) -> float:
        began = time.perf_counter()
        rows = sum(int(b.num_rows) for b in read_range(self.address, stream, 1, 1 << 40, ReadOptions(route=route)))
        seconds = time.perf_counter() - began
        assert rows == self.messages + 1
        return rows / seconds

    def _memory_growth_bytes(self) -> float:
        """Return the maximum growth of this process in bytes while it reads the whole stream."""
        gc.collect()
        before = _resident_bytes()
        peak = 0
        done = threading.Event()

        def watch() -> None:
            nonlocal peak
            while not done.wait(0.005):
                peak = max(peak, _resident_bytes())

        watcher = threading.Thread(target=watch)
        watcher.start()
        self._read(self.stream, Route.CONSUMER)
        done.set()
        watcher.join()
        return float(max(0, peak - before))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

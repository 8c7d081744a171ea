"""The pipeline: dispatch beside one message at a time, its latency and growth, and prefill beside the bare sink."""

import asyncio
import itertools
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nats
import pyarrow as pa
from nats.js.api import AckPolicy, ConsumerConfig, RetentionPolicy
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from benchmarks import peers
from benchmarks.report import Row, Section, best_of
from benchmarks.streams import Streams
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream import EmbeddedServer, ServerOptions, publish_many, read_range
from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import ReadOptions
from purveyor.jetstream.bulk.net.pool import request_api
from purveyor.model.registration import PrefillStatus
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.pipeline.archive.layout import archived_until
from purveyor.pipeline.archive.reader import ArchiveSource
from purveyor.pipeline.archive.writer import ArchiveSettings, start_archive
from purveyor.pipeline.dispatch import DispatchSettings, start_dispatch
from purveyor.pipeline.prefill.worker import PrefillWorker
from purveyor.queues import connect, internal_queues
from purveyor.queues.registry import Registry
from purveyor.queues.sync_client import read_subscriptions
from purveyor.spark import session
from purveyor.spark.offsets import ROWS_PER_PARTITION

Pair = tuple[float, float]
"""The rates of Purveyor and of the peer, measured one after the other."""

SIZE = 800
TOPICS = 10
_ROWS = 5000
_ROUNDS = 5
_PREFILLS = 8
_GROWTH_ROUNDS = 2
_WARM_SECONDS = 60
"""The JVM compiles for a minute or so: until then a batch takes two to five times as long."""


def dispatch(_address: Address) -> list[Section]:
    """Measure dispatch with a backlog. Each measurement has its own server, because the queues have fixed names."""
    return _with_spark(_dispatch)


def growth(_address: Address) -> list[Section]:
    """Measure dispatch with ten times the backlog, archive or subscriptions."""
    return _with_spark(_growth)


def latency(_address: Address) -> list[Section]:
    """Measure the latency of dispatch at a steady rate."""
    return _with_spark(_latency)


def prefill(_address: Address) -> list[Section]:
    """Measure the prefill of a new queue."""
    return _with_spark(_prefill)


def _with_spark(measure: Callable[[SparkSession], Section]) -> list[Section]:
    spark = session("bench", master="local[2]", options={"spark.ui.enabled": "false"})
    spark.sparkContext.setLogLevel("ERROR")
    try:
        return [measure(spark)]
    finally:
        spark.stop()


def event(number: int, topic: str) -> bytes:
    """Return an event of about SIZE bytes about a new object."""
    new = {"uuid": f"{number:032x}", "dn": f"uid=user{number},ou=people,dc=example,dc=com", "username": f"user{number}"}
    body = {"publisher_name": "bench", "ts": "2026-01-01T00:00:00Z", "realm": "udm", "topic": topic}
    fields = {**body, "body": {"old": {}, "new": new}}
    new["description"] = "x" * max(SIZE - len(json.dumps(fields)) - 20, 0)
    return json.dumps(fields).encode()


def events(count: int, topics: int = 1, *, first: int = 0) -> Iterator[pa.RecordBatch]:
    """Yield events with ids, numbered from `first` on, spread over `topics` topics."""
    for start in range(first, first + count, _ROWS):
        numbers = range(start, min(start + _ROWS, first + count))
        yield pa.record_batch(
            {
                "subject": pa.array(["incoming"] * len(numbers), pa.string()),
                "data": pa.array([event(number, f"bench/{number % topics}") for number in numbers], pa.binary()),
                "msg_id": pa.array([f"bench-{number}" for number in numbers], pa.string()),
            }
        )


class Installation:
    """A server with the pipeline's queues, and the parts that a measurement starts."""

    def __init__(self, spark: SparkSession, address: Address, directory: Path) -> None:
        self.spark = spark
        self.address = address
        self.directory = directory
        self.archive = ArchiveSource(address, directory / "archive")
        asyncio.run(self._ensure())

    async def _ensure(self) -> None:
        async with connect(self.address) as queues:
            for queue in internal_queues():
                (await queues.ensure(queue)).require_ready()
            await Registry.open(queues)

    def subscribe(self, topics: Sequence[str], *, prefill: bool = False, prefix: str = "s") -> None:
        """Add one subscription for each topic."""

        async def add() -> None:
            async with connect(self.address) as queues:
                subscriptions = Subscriptions(queues)
                for number, topic in enumerate(topics):
                    wanted = (RealmTopic("udm", topic),)
                    name = f"{prefix}{number}"
                    await subscriptions.add(Subscription(name=name, realms_topics=wanted, request_prefill=prefill))

        asyncio.run(add())

    def last(self) -> int:
        """Return the newest position."""
        return int(request_api(self.address, "STREAM.INFO.stream:incoming")["state"]["last_seq"])

    def dispatch(self, most: int = ROWS_PER_PARTITION) -> StreamingQuery:
        """Start the dispatcher, with batches of at most `most` events."""
        settings = DispatchSettings(
            address=self.address, checkpoint=self.directory / "dispatch", archive=self.archive, max_offsets=most
        )
        return start_dispatch(self.spark, settings)

    def archive_all(self) -> None:
        """Archive all events."""
        settings = ArchiveSettings(source=self.archive, checkpoint=self.directory / "archiving", trigger_seconds=0.1)
        query = start_archive(self.spark, settings)
        last = self.last()
        while archived_until(self.archive.directory) < last:
            _raise(query)
            time.sleep(0.1)
        query.stop()


@contextmanager
def installation(spark: SparkSession) -> Iterator[Installation]:
    """Start a server with empty queues."""
    with (
        tempfile.TemporaryDirectory() as scratch,
        EmbeddedServer(Path(scratch) / "nats", ServerOptions(sync="2m")) as server,
    ):
        yield Installation(spark, server.address, Path(scratch))


def _raise(query: StreamingQuery) -> None:
    if (error := query.exception()) is not None:
        raise error


def _wait(query: StreamingQuery, last: int) -> None:
    """Wait until the batches have reached a position."""
    while not query.lastProgress or _end(query) < last:
        _raise(query)
        time.sleep(0.05)


def _skip_unmatched(made: Installation) -> None:
    """Let the dispatcher pass the events without a subscription."""
    last, query = made.last(), made.dispatch()
    _wait(query, last)
    query.stop()


def _drain(made: Installation, count: int, *, each: int = 1) -> float:
    """Dispatch all events; return deliveries per second of the batches behind the first, in which batches grow."""
    # The default maximum; a small backlog is divided into four, so that there are batches behind the first.
    last, query = made.last(), made.dispatch(ROWS_PER_PARTITION if count >= 200_000 else count // 4)
    _wait(query, last)
    reports = [json.loads(report.json) for report in query.recentProgress]
    query.stop()
    sizes = [_offset(report, "endOffset") - _offset(report, "startOffset") for report in reports]
    batches = [
        (size, report["durationMs"]["triggerExecution"] / 1000)
        for report, size, until in zip(reports, sizes, itertools.accumulate(sizes), strict=True)
        if size > 1 and until - size >= min(100_000, count // 4)
    ]
    return float(sum(size for size, _ in batches) * each / sum(seconds for _, seconds in batches))


def _end(query: StreamingQuery) -> int:
    return _offset(json.loads(query.lastProgress.json), "endOffset")  # type: ignore[union-attr]  # behind a check


def _offset(report: Any, which: str) -> int:
    """Return the position at the beginning or the end of a batch."""
    offset = report["sources"][0][which]
    offset = json.loads(offset) if isinstance(offset, str) else offset
    return int(offset["sequence"]) if offset else 0


def _rate(spark: SparkSession, topics: Sequence[str], count: int, spread: int = 1, *, archived: int = 0) -> float:
    """Return deliveries per second with a backlog, published after the subscriptions; archive some events before."""
    with installation(spark) as made:
        if archived:
            publish_many(made.address, events(archived))
            made.archive_all()
            _skip_unmatched(made)
        made.subscribe(topics)
        publish_many(made.address, events(count, spread, first=archived))
        rate = _drain(made, count, each=len(topics) // spread)
    print(f"pipeline: {len(topics)} subscriptions, {count:,} events: {rate:,.0f} deliveries/s", flush=True)
    return rate


async def _one_at_a_time(address: Address, targets: int, count: int, *, confirmed: bool) -> float:
    """Fetch one, publish to each target awaiting each acknowledgement, acknowledge (and perhaps await that too)."""
    client = await nats.connect(**peers.nats_options(address))
    jetstream = client.jetstream()
    await jetstream.add_stream(name="peer-in", subjects=["peer-in"], retention=RetentionPolicy.INTEREST)
    config = ConsumerConfig(durable_name="peer", ack_policy=AckPolicy.EXPLICIT, max_ack_pending=1)
    await jetstream.add_consumer("peer-in", config)
    for number in range(targets):
        await jetstream.add_stream(name=f"peer-{number}", subjects=[f"peer-{number}.main"])
    for number in range(count):
        await jetstream.publish("peer-in", event(number, "bench/0"))
    subscription = await jetstream.pull_subscribe_bind("peer", "peer-in")
    began = time.perf_counter()
    for _ in range(count):
        [message] = await subscription.fetch(1)
        found = json.loads(message.data)
        for number in range(targets):
            if (found["realm"], found["topic"]) == ("udm", "bench/0"):
                await jetstream.publish(f"peer-{number}.main", message.data)
        await (message.ack_sync() if confirmed else message.ack())
    seconds = time.perf_counter() - began
    await client.close()
    return count * targets / seconds


def _peer(spark: SparkSession, targets: int, count: int, *, confirmed: bool = False) -> float:
    with installation(spark) as made:
        rate = asyncio.run(_one_at_a_time(made.address, targets, count, confirmed=confirmed))
    words = ", acknowledgements confirmed" if confirmed else ""
    print(f"pipeline: one at a time, {targets} targets{words}: {rate:,.0f} deliveries/s", flush=True)
    return rate


def _dispatch(spark: SparkSession) -> Section:
    # The JVM compiles for some minutes: a steady rate first, and enough rounds to see the rate of a warm process.
    with installation(spark) as made:
        made.subscribe(["bench/0"])
        query = made.dispatch()
        _steady(made, 100, _WARM_SECONDS)
        _wait(query, made.last())
        query.stop()
    singles, careful_peers = [], []
    for _ in range(_ROUNDS):
        singles.append((_rate(spark, ["bench/0"], 1_000_000), _peer(spark, 1, 20_000)))
        careful_peers.append(_peer(spark, 1, 20_000, confirmed=True))
    twenties = [(_rate(spark, ["bench/0"] * 20, 60_000), _peer(spark, 20, 2400)) for _ in range(_ROUNDS - 2)]
    thousand = _rate(spark, [f"bench/{number % TOPICS}" for number in range(1000)], 20_000, TOPICS)
    one, twenty = _middle(singles), _middle(twenties)
    rows = [
        Row("1 subscription / one message at a time", *one, "deliveries/s", at_least=40),
        Row("1 subscription / the same, acknowledgements confirmed", one[0], max(careful_peers), "deliveries/s"),
        Row("20 subscriptions / one message at a time", *twenty, "deliveries/s", at_least=40),
        Row("1,000 subscriptions, 1 in 10 matching / 20 subscriptions", thousand, twenty[0], "deliveries/s"),
    ]
    words = (
        f"A backlog of events of {SIZE} bytes, local[2]; the peer on a server of the same kind. Each side is measured "
        "for some ten seconds a round, after the JVM has dispatched a trickle for a minute; the first 100,000 events "
        f"of a round, in which batches grow, do not count. The middle one of {_ROUNDS} rounds with 1 subscription, by "
        f"their ratios ({_ratios(singles)}), and of {_ROUNDS - 2} with 20 ({_ratios(twenties)})."
    )
    return Section("Pipeline: dispatch", words, rows)


def _middle(rounds: Sequence[Pair]) -> Pair:
    """Return the median round: the machine changes within minutes, and the best of each side may be minutes apart."""
    return sorted(rounds, key=lambda each: each[0] / each[1])[len(rounds) // 2]


def _ratios(rounds: Sequence[Pair]) -> str:
    return ", ".join(f"{ours / peer:.1f}" for ours, peer in rounds)


def _growth(spark: SparkSession) -> Section:
    ten = ["bench/0"] * 10
    # Ten times the subscriptions, each event for as many of them as before.
    hundred = [f"bench/{number % TOPICS}" for number in range(100)]
    best = best_of(
        _GROWTH_ROUNDS,
        {
            "base": lambda: _rate(spark, ten, 60_000),
            "subscriptions": lambda: _rate(spark, hundred, 60_000, TOPICS),
            "backlog": lambda: _rate(spark, ten, 600_000),
            "small archive": lambda: _rate(spark, ten, 60_000, archived=20_000),
            "large archive": lambda: _rate(spark, ten, 60_000, archived=200_000),
        },
    )
    pairs = [
        ("10x the backlog / 60,000 events", "backlog", "base"),
        ("10x the archive / 20,000 events", "large archive", "small archive"),
        ("10x the subscriptions / 10", "subscriptions", "base"),
    ]
    rows = [Row(name, best[one], best[other], "deliveries/s", at_least=0.8) for name, one, other in pairs]
    words = f"Rate of deliveries, 10 for each event, best of {_GROWTH_ROUNDS} rounds taken in turns."
    return Section("Pipeline: growth", words, rows)


def _latency(spark: SparkSession) -> Section:
    with installation(spark) as made:
        made.subscribe(["bench/0"])
        query = made.dispatch()
        _steady(made, 100, _WARM_SECONDS)
        _wait(query, made.last())
        sent = _steady(made, 100, 30)
        _wait(query, made.last())
        parts = [json.loads(report.json)["durationMs"] for report in query.recentProgress[-100:]]
        query.stop()
        stored: dict[str, float] = {}
        for batch in read_range(made.address, "stream:s0", 1, 1 << 40, ReadOptions(columns=("timestamp", "headers"))):
            for row in batch.to_pylist():
                stored[dict(row["headers"])["Purveyor-Id"][0]] = row["timestamp"].timestamp()
    found = sorted(1000 * (stored[name] - at) for name, at in sent.items())
    names = sorted({name for part in parts for name in part})
    durations = ", ".join(f"{name} {statistics.median(part.get(name, 0) for part in parts):.0f}" for name in names)
    floor = statistics.median(part["triggerExecution"] for part in parts)
    rows = [
        Row("from publish to queue, p50 / one micro-batch", found[len(found) // 2], floor, "ms"),
        Row("from publish to queue, p99 / one micro-batch", found[len(found) * 99 // 100], floor, "ms"),
    ]
    words = "At 100 events/s, one subscription, after a minute of the same."
    words += f" Where a micro-batch spends its time, in ms: {durations}."
    return Section("Pipeline: latency", words, rows)


def _steady(made: Installation, rate: int, seconds: int) -> dict[str, float]:
    """Publish at a steady rate; return when each event was sent."""

    async def publish() -> dict[str, float]:
        sent: dict[str, float] = {}
        async with connect(made.address) as queues:
            began = time.perf_counter()
            for number in range(rate * seconds):
                await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
                name = f"steady-{time.time_ns()}"
                sent[name] = datetime.now(UTC).timestamp()
                await queues.publish("incoming", event(number, "bench/0"), msg_id=name)
        return sent

    return asyncio.run(publish())


def _prefill(spark: SparkSession) -> Section:
    rows = []
    for objects in (200_000, 1_000_000):
        with installation(spark) as made:
            publish_many(made.address, events(objects))
            made.archive_all()
            worker = PrefillWorker(spark, made.address, made.archive)
            stopping = threading.Event()
            thread = threading.Thread(target=worker.run, args=(stopping,), daemon=True)
            thread.start()
            rounds = _PREFILLS if objects == 200_000 else 1
            fills, sinks = [], []
            for number in range(rounds):
                fills.append(_fill(made, objects, f"p{number}-"))
                sinks.append(_sink(made, objects))
                print(f"pipeline: prefill of {objects:,}: {fills[-1]:,.0f}/s, bare sink {sinks[-1]:,.0f}/s", flush=True)
            ours, sink = max(fills), max(sinks)
            stopping.set()
            thread.join()
        aim = 0.5 if objects == 200_000 else None
        rows.append(Row(f"{objects:,} objects / the bare jetstream sink", ours, sink, "rows/s", at_least=aim))
    words = (
        "From the request to `done`, the archive's latest object per key; the sink writes the same rows with ids. "
        f"200,000 objects: the best of {_PREFILLS} rounds in which both take turns."
    )
    return Section("Pipeline: prefill", words, rows)


def _fill(made: Installation, objects: int, prefix: str) -> float:
    began = time.perf_counter()
    made.subscribe(["bench/0"], prefill=True, prefix=prefix)
    while True:
        state = read_subscriptions(made.address).subscriptions[f"{prefix}0"].prefill
        if state is None or state.status is PrefillStatus.FAILED:
            raise RuntimeError(f"the prefill failed: {state}")
        if state.status is PrefillStatus.DONE:
            return objects / (time.perf_counter() - began)
        time.sleep(0.05)


def _sink(made: Installation, objects: int) -> float:
    target = Streams(made.address).fresh()
    rows = made.spark.read.parquet(str(made.archive.directory / "events" / "*")).where("kind = 'event'")
    rows = rows.selectExpr(f"'{target}' as subject", "data", "cast(position as string) as msg_id").coalesce(1)
    host, port = made.address.hosts()[0]
    url = f"nats://{made.address.user}:{made.address.password}@{host}:{port}"
    began = time.perf_counter()
    rows.write.format("jetstream").options(servers=url, stream=target).mode("append").save()
    return objects / (time.perf_counter() - began)

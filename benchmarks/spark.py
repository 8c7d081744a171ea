"""Spark on JetStream beside nats-py, the bare socket, Parquet, and Spark's own defaults, in one run."""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

from pyspark.sql import DataFrame, SparkSession

from benchmarks import peers
from benchmarks.report import Row, Section, best_of
from benchmarks.streams import Streams
from purveyor.jetstream import StreamConfig, publish_many
from purveyor.jetstream.address import Address
from purveyor.queues import connect
from purveyor.spark import session
from purveyor.spark.class_archive import make_class_archive

ROUNDS = 3
THROUGHPUT_ROUNDS = 8
"""The JVM compiles for some minutes: enough rounds to see the rate of a warm process."""
_SET_BY_SESSIONS = ("JAVA_HOME", "PYSPARK_PYTHON", "SPARK_HOME", "SPARK_LAUNCHER_OPTS")


def run(address: Address, *, messages: int = 1_000_000) -> list[Section]:
    """Measure throughput, in this process."""
    return [_throughput(address, messages)]


def latency(address: Address) -> list[Section]:
    """Measure latency and idling, each variant in its own process."""
    _make_archive()
    return [_latency(address)]


def start_up(address: Address) -> list[Section]:
    """Measure the time from the start of a process to its first batch."""
    _make_archive()
    return [_start_up(address)]


def _make_archive() -> None:
    print("spark: making the archive of classes", flush=True)
    make_class_archive()


def _url(address: Address) -> str:
    host, port = address.hosts()[0]
    return f"nats://{address.user}:{address.password}@{host}:{port}" if address.user else f"nats://{host}:{port}"


def _throughput(address: Address, messages: int) -> Section:
    spark = session("bench", master="local[2]", options={"spark.ui.enabled": "false"})
    spark.sparkContext.setLogLevel("ERROR")
    streams = Streams(address)
    half, few = messages // 2, messages // 10  # nats-py takes longer for a tenth than we do for all
    with tempfile.TemporaryDirectory() as scratch:
        plain, source = streams.fresh(), streams.fresh()
        peers.publish_plain(address, plain, messages)
        publish_many(address, peers.batches(source, messages))
        for name in (plain, source):
            peers.publish_mark(address, name)
        read_plain = spark.read.format("jetstream").options(servers=_url(address), stream=plain)
        read = spark.read.format("jetstream").options(servers=_url(address), stream=source)
        parquet, table = str(Path(scratch) / "all"), str(Path(scratch) / "half")
        read.load().where(f"sequence <= {messages}").write.parquet(parquet)
        read.options(endingOffsets=half, minPartitions=2).load().write.parquet(table)
        read = read.options(endingOffsets="latest", minPartitions=1)
        best = best_of(
            THROUGHPUT_ROUNDS,
            {
                "parquet": lambda: _timed(messages, lambda: _noop(spark.read.parquet(parquet))),
                "read": lambda: _timed(messages, lambda: _noop(read_plain.load())),
                "socket": lambda: peers.socket_unparsed(address, plain, messages),
                "fetch": lambda: asyncio.run(peers.nats_fetch(address, plain, few)),
                "read, ids": lambda: _timed(messages, lambda: _noop(read.load())),
                "socket, ids": lambda: peers.socket_unparsed(address, source, messages),
                "write": lambda: _into(streams, lambda target: _write(spark, address, target, (table, half))),
                "publish": lambda: _into(streams, lambda target: asyncio.run(peers.nats_publish(address, target, few))),
                "stream": lambda: _into(streams, lambda target: _stream(spark, address, (source, target), half)),
            },
        )
        driver, worker = _memory(spark, address, source, messages)
    streams.clear()
    spark.stop()
    rows = [
        Row("read into Spark / nats-py fetch(500)", best["read"], best["fetch"], at_least=20),
        Row("read into Spark / bytes off the socket, unparsed", best["read"], best["socket"], at_least=0.7),
        Row("read into Spark, messages with ids / bytes off the socket", best["read, ids"], best["socket, ids"]),
        Row("read into Spark / the same rows from Parquet", best["read"], best["parquet"]),
        Row("write with ids / nats-py publish_async", best["write"], best["publish"], at_least=5),
        Row("stream source, repartition, sorted sink / bare sink", best["stream"], best["write"], at_least=0.4),
        Row("driver memory after reading all / after a tenth", driver[1], driver[0], "MB"),
        Row("worker memory after reading all / after a tenth", worker[1], worker[0], "MB"),
    ]
    words = (
        f"{messages:,} messages of {peers.SIZE} bytes, local[2], best of {THROUGHPUT_ROUNDS} rounds taken in turns. "
        "The aims for reading are held against messages without headers; those with ids stand beside them."
    )
    return Section("Spark: throughput", words, rows)


def _into(streams: Streams, write: Callable[[str], float]) -> float:
    """Run a write into its own stream, and remove the stream with its ids in the server's memory."""
    target = streams.fresh()
    try:
        return write(target)
    finally:
        streams.remove(target)


def _noop(rows: DataFrame) -> None:
    rows.write.format("noop").mode("overwrite").save()


def _timed(count: int, work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return count / (time.perf_counter() - began)


def _write(spark: SparkSession, address: Address, target: str, table: tuple[str, int]) -> float:
    parquet, count = table
    rows = spark.read.parquet(parquet).selectExpr("data", "cast(sequence as string) as msg_id")
    sink = rows.write.format("jetstream").options(servers=_url(address), subject=target).mode("append")
    return _timed(count, sink.save)


def _stream(spark: SparkSession, address: Address, names: tuple[str, str], count: int) -> float:
    source, target = names
    rows = spark.readStream.format("jetstream").options(
        servers=_url(address), stream=source, maxOffsetsPerTrigger="100000", minPartitions="2"
    )
    chosen = rows.load().where(f"sequence <= {count}")
    out = chosen.selectExpr(f"'{target}' as subject", "data", "cast(sequence as string) as msg_id", "sequence")
    sink = out.repartition(2, "sequence").writeStream.format("jetstream")
    sink = sink.options(servers=_url(address), orderBy="sequence", checkpointLocation=tempfile.mkdtemp())
    query = sink.trigger(availableNow=True).start()
    query.awaitTermination()
    # The rate of the batches themselves; the start of a query is measured elsewhere.
    reports = [json.loads(each.json) for each in query.recentProgress]
    with_rows = [each for each in reports if each["numInputRows"] and each["sink"]["numOutputRows"]][1:]
    rows_out = sum(each["sink"]["numOutputRows"] for each in with_rows)
    return float(rows_out / (sum(each["durationMs"]["triggerExecution"] for each in with_rows) / 1000))


def _memory(
    spark: SparkSession, address: Address, source: str, messages: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return MB of this process and of the largest Python worker, after a tenth of the stream and after all of it."""
    found: list[tuple[float, float]] = []
    for last in (messages // 10, messages):
        read = spark.read.format("jetstream").options(servers=_url(address), stream=source, endingOffsets=str(last))
        _noop(read.load())
        workers = [_resident(pid) for pid in _python_workers()]
        found.append((_resident(os.getpid()), max(workers, default=0.0)))
    (driver_few, worker_few), (driver_all, worker_all) = found
    return (driver_few, driver_all), (worker_few, worker_all)


def _python_workers() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"pyspark.daemon" in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def _resident(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except OSError:
        return 0.0


def probe(address: Address, variant: str, what: str) -> dict[str, Any]:
    prefix = f"probe-{uuid4().hex[:8]}"
    asyncio.run(_probe_streams(address, prefix))
    command = [sys.executable, "-m", "benchmarks.spark_probe", variant, what, _url(address), prefix]
    # As from a new shell: the settings of this process's session must not affect either variant.
    own = {name: value for name, value in os.environ.items() if name not in _SET_BY_SESSIONS}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=own)
    line = next((each for each in done.stdout.splitlines() if "RESULT " in each), None)
    if line is None:
        raise RuntimeError(done.stderr[-2000:])
    result: dict[str, Any] = json.loads(line.partition("RESULT ")[2])
    print(f"spark: {variant}, {what}: {result}", flush=True)
    return result


async def _probe_streams(address: Address, prefix: str) -> None:
    async with connect(address) as queues:
        for end in ("in", "out"):
            name = f"{prefix}-{end}"
            await queues.streams.add(StreamConfig(name=name, subjects=(name,)))
        await queues.publish(f"{prefix}-in", repr(time.perf_counter()).encode())


def _latency(address: Address) -> Section:
    tuned, default = probe(address, "tuned", "latency"), probe(address, "default", "latency")
    parts = ", ".join(f"{name} {value:.0f}" for name, value in tuned["parts"].items())
    defaults = ", ".join(f"{name} {value:.0f}" for name, value in default["parts"].items())
    rows = [
        Row("one message, p50", tuned["single"]["p50"], default["single"]["p50"], "ms", at_most=0.45),
        Row("one message, p99", tuned["single"]["p99"], default["single"]["p99"], "ms"),
        Row("200 messages/s, p50", tuned["steady"]["p50"], default["steady"]["p50"], "ms"),
        Row("200 messages/s, p99", tuned["steady"]["p99"], default["steady"]["p99"], "ms"),
        Row("idle query, cores / one core", tuned["idle_cores"], 1.0, "cores", at_most=0.05),
    ]
    words = (
        "NATS to Spark to NATS, from publish to the copy in the target stream; the peer is Spark with its defaults and "
        "the same source. Both have taken 400 messages before, because the JVM compiles for that long. Where a "
        f"batch spends its time, in ms, tuned: {parts}. With defaults: {defaults}."
    )
    return Section("Spark: latency", words, rows)


def _start_up(address: Address) -> Section:
    seconds: dict[str, list[float]] = {"tuned": [], "default": []}
    for _ in range(ROUNDS):
        for variant, found in seconds.items():
            found.append(float(probe(address, variant, "start")["first_batch_seconds"]))
    row = Row("process start to first batch", min(seconds["tuned"]), min(seconds["default"]), "s", at_most=0.75)
    words = (
        f"From the start of Python to the first committed streaming batch, best of {ROUNDS}; peer: Spark's defaults."
    )
    return Section("Spark: start-up", words, [row])

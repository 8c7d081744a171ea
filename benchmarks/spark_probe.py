"""Measures one Spark process: the time to the first batch, the latency of a message, and the cost of idling.

`benchmarks.spark` runs it in its own process for each variant; it prints one JSON object. `default` is Spark with its
defaults, `tuned` is `purveyor.spark.session`.
"""

import asyncio
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

_BEGAN = time.perf_counter()
_WARM_UP = 400
_SINGLES = 100
_RATE = 200
_RATE_SECONDS = 15
_IDLE_SECONDS = 10


def start(variant: str) -> Any:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if variant == "tuned":
        from purveyor.spark import session  # noqa: PLC0415 - the import is part of what is timed

        return session("probe", master="local[2]")
    from pyspark.sql import SparkSession  # noqa: PLC0415 - the import is part of what is timed

    spark = SparkSession.builder.appName("probe").master("local[2]").getOrCreate()
    from purveyor.spark import register  # noqa: PLC0415 - the import is part of what is timed

    register(spark)
    return spark


def query(spark: Any, url: str, prefix: str) -> Any:
    options = {"servers": url, "stream": f"{prefix}-in"}
    if "--no-idle-wait" in sys.argv:
        options["idleWaitMillis"] = "0"
    source = spark.readStream.format("jetstream").options(**options).load()
    rows = source.selectExpr(f"'{prefix}-out' as subject", "data", "cast(sequence as string) as msg_id")
    sink = rows.writeStream.format("jetstream").option("servers", url)
    return sink.option("checkpointLocation", tempfile.mkdtemp()).start()


class Echo:
    """Publishes into the query and receives its output, on a thread with its own loop."""

    def __init__(self, url: str, prefix: str) -> None:
        self.url, self.prefix = url, prefix
        self.latencies: list[float] = []
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.call(self._open())

    def call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    async def _open(self) -> None:
        from purveyor.jetstream.address import Address  # noqa: PLC0415 - not part of the start that is timed
        from purveyor.jetstream.connection import Connection  # noqa: PLC0415 - not part of the start that is timed

        self.connection = await Connection.open(Address.parse(self.url))
        self.listening = await self.connection.subscribe(f"{self.prefix}-out")

    async def single(self) -> float:
        began = time.perf_counter()
        await self.connection.publish(f"{self.prefix}-in", b"one")
        assert await self.listening.next(30) is not None
        return time.perf_counter() - began

    async def steady(self, rate: int, seconds: int) -> list[float]:
        latencies: list[float] = []

        async def receive() -> None:
            while len(latencies) < rate * seconds:
                message = await self.listening.next(30)
                assert message is not None
                latencies.append(time.perf_counter() - float(message.data))

        receiving = asyncio.create_task(receive())
        began = time.perf_counter()
        for number in range(rate * seconds):
            await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
            await self.connection.publish(f"{self.prefix}-in", repr(time.perf_counter()).encode())
        await receiving
        return latencies


def cpu_seconds(pid: int) -> dict[int, float]:
    """Return the CPU seconds of a process and of each of its descendants."""
    found: dict[int, float] = {}
    todo = [pid]
    while todo:
        each = todo.pop()
        try:
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            found[each] = sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
            for task in Path(f"/proc/{each}/task").iterdir():
                todo += map(int, (task / "children").read_text().split())
        except OSError:
            continue
    return found


def cores_used(seconds: float) -> float:
    """Return the cores that this process and its descendants use, without processes that end in the meantime."""
    before, began = cpu_seconds(os.getpid()), time.perf_counter()
    time.sleep(seconds)
    after = cpu_seconds(os.getpid())
    used = sum(spent - before.get(pid, 0.0) for pid, spent in after.items())
    return used / (time.perf_counter() - began)


def percentiles(values: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(values, n=100)
    return {"p50": cuts[49] * 1000, "p99": cuts[98] * 1000}


def where_time_goes(running: Any) -> dict[str, float]:
    """Return the mean duration of each part of the last batches with rows."""
    reports = [json.loads(each.json)["durationMs"] for each in running.recentProgress if each.numInputRows]
    return {part: statistics.fmean(each.get(part, 0) for each in reports) for part in reports[-1]}


def main() -> None:
    variant, what, url, prefix = sys.argv[1:5]
    spark = start(variant)
    running = query(spark, url, prefix)
    while not (running.lastProgress and running.lastProgress.numInputRows):
        time.sleep(0.005)
        if running.exception():
            raise SystemExit(str(running.exception()))
    result: dict[str, Any] = {"first_batch_seconds": time.perf_counter() - _BEGAN}
    if what == "latency":
        echo = Echo(url, prefix)
        for _ in range(_WARM_UP):  # the JVM compiles for some hundred batches
            echo.call(echo.single())
        result["single"] = percentiles([echo.call(echo.single()) for _ in range(_SINGLES)])
        result["parts"] = where_time_goes(running)
        result["steady"] = percentiles(echo.call(echo.steady(_RATE, _RATE_SECONDS))[_RATE * 3 :])
        time.sleep(2)
        result["idle_cores"] = cores_used(_IDLE_SECONDS)
    print("RESULT " + json.dumps(result), flush=True)
    running.stop()
    spark.stop()


if __name__ == "__main__":
    main()

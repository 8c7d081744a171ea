"""kill -9 in the middle of batches from a source to a sink with ids: the target holds each message once, in order."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.spark.copy_job import recipe
from tests.support.broker import Broker
from tests.support.processes import descendants, environment, kill, python_workers
from tests.support.scale import chance, pick
from tests.support.spark_session import Read
from tests.support.waiting import PATIENCE_SECONDS, wait_until

BATCHES, BATCH = pick(8, 50), pick(100, 500)
ALL = [str(number) for number in range(1, BATCHES * BATCH + 1)]
ROOT = Path(__file__).parents[2]
TEN_MINUTES = 600_000_000_000


@pytest.fixture
def streams(broker: Broker, unique: str) -> tuple[str, str]:
    """A full source, and a target that recognises ids for longer than the test can take."""
    source = broker.make(f"{unique}-in")
    target = broker.make(f"{unique}-out", duplicate_window=TEN_MINUTES)
    broker.numbers(source, 1, BATCHES * BATCH)
    return source, target


def thresholds(random: Random, kills: int) -> list[int]:
    """Spread over the copying: after how many messages in the target to kill."""
    part = len(ALL) // (kills + 1)
    return [number * part + random.randrange(part) for number in range(kills)]


def has(broker: Broker, target: str, more_than: int) -> bool:
    return int(broker.state(target)["messages"]) > more_than


@contextmanager
def running(broker: Broker, streams: tuple[str, str], directory: Path, master: str) -> Iterator[subprocess.Popen[str]]:
    """The copy job as a program of its own, in a process group of its own."""
    job = {
        "master": master,
        "servers": broker.url,
        "source": streams[0],
        "target": streams[1],
        "batch": BATCH,
        "checkpoint": str(directory / "cp"),
        "spark": {"spark.local.dir": str(directory), "spark.sql.warehouse.dir": str(directory / "warehouse")},
    }
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    with (directory / "log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.copy_job", json.dumps(job)],
            cwd=directory,
            env=environment(PYTHONPATH=path),
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        end(process)
        if process.stdout is not None:
            process.stdout.close()


def end(process: subprocess.Popen[str]) -> None:
    """kill -9 of the driver: the program, its JVM, and what else is in its group."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(PATIENCE_SECONDS)


def watch(process: subprocess.Popen[str], condition: Callable[[], Any]) -> bool:
    """Until the condition holds, or the program has ended; whether it held."""
    while not (held := condition()) and process.poll() is None:
        time.sleep(0.01)
    return bool(held)


@pytest.mark.chaos
def test_python_workers_are_killed(
    broker: Broker, spark: SparkSession, follow: Read, streams: tuple[str, str], tmp_path: Path
) -> None:
    source, target = streams
    random, kills = chance("kill -9 of Python workers"), pick(3, 12)
    frame = recipe(follow(source, maxOffsetsPerTrigger=BATCH, minPartitions=3), source, target)
    writing = frame.writeStream.format("jetstream").trigger(availableNow=True)
    query = writing.options(servers=broker.url, orderBy="sequence", checkpointLocation=str(tmp_path / "cp")).start()
    root = spark.sparkContext._gateway.proc.pid  # type: ignore[union-attr]
    killed = 0
    for threshold in thresholds(random, kills):
        wait_until(partial(has, broker, target, threshold))
        workers = python_workers(root)
        killed += bool(workers) and kill(random.choice(workers))
    assert query.awaitTermination(PATIENCE_SECONDS)
    assert killed
    assert broker.texts(target) == ALL


@pytest.mark.chaos
@pytest.mark.first
def test_executors_are_killed_and_the_package_is_sent_to_new_ones(
    broker: Broker, streams: tuple[str, str], tmp_path: Path
) -> None:
    """On a cluster, where rows of a batch are read on several machines: order is the sink's work."""
    random, kills, killed = chance("kill -9 of executors"), pick(1, 8), 0
    with running(broker, streams, tmp_path, "local-cluster[2,1,1024]") as process:
        assert process.stdout is not None
        reported = process.stdout.readline()
        assert all(".zip" in home for home in json.loads(reported)["homes"]), reported
        for threshold in thresholds(random, kills):
            watch(process, partial(has, broker, streams[1], threshold))
            executors = descendants(process.pid, "CoarseGrainedExecutorBackend")
            killed += bool(executors) and kill(random.choice(executors))
        assert process.wait(PATIENCE_SECONDS) == 0, (tmp_path / "log").read_text()[-3000:]
    assert killed
    assert broker.texts(streams[1]) == ALL


@pytest.mark.chaos
@pytest.mark.first
def test_the_driver_is_killed_and_started_again(broker: Broker, streams: tuple[str, str], tmp_path: Path) -> None:
    random, kills, interrupted = chance("kill -9 of the driver"), pick(1, 6), 0
    for threshold in thresholds(random, kills):
        with running(broker, streams, tmp_path, "local[2]") as process:
            if watch(process, partial(has, broker, streams[1], threshold)):
                end(process)
                interrupted += process.returncode == -signal.SIGKILL
    with running(broker, streams, tmp_path, "local[2]") as process:
        assert process.wait(PATIENCE_SECONDS) == 0, (tmp_path / "log").read_text()[-3000:]
    assert interrupted
    assert broker.texts(streams[1]) == ALL

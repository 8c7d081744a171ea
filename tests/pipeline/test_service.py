"""The pipeline as a whole: what it waits for, what ends it, and what it reports."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from purveyor.jetstream.address import Address
from purveyor.model.errors import InvalidConfig, PurveyorError, StoreInUse
from purveyor.pipeline.checkpoints import CheckpointLocks, EngineLocks
from purveyor.pipeline.engine import EngineLost
from purveyor.pipeline.part_status import PartStatus, State, status_path
from purveyor.pipeline.part_supervisor import Part, ThreadRun
from purveyor.pipeline.pipeline_settings import PartName, PipelineSettings
from purveyor.pipeline.service import PartFailed, PipelineService
from tests.support.broker import Broker
from tests.support.nats_servers import OwnServer
from tests.support.waiting import PATIENCE_SECONDS, wait_until

Work = Callable[[threading.Event], None]
NOWHERE = Address.parse("nats://127.0.0.1:1")


class Heard:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, str]] = []
        self.parts: Sequence[PartStatus] = ()

    def report_step(self, event: str, text: str) -> None:
        self.steps.append((event, text))

    def report_parts(self, parts: Sequence[PartStatus]) -> None:
        self.parts = parts

    def received(self, event: str) -> bool:
        return any(step == event for step, _ in self.steps)


class SharedEngine:
    """The session of the tests, which outlives each service."""

    def __init__(self, spark: SparkSession, scratch: Path) -> None:
        self.spark = spark
        self.scratch = scratch
        self.lost = False
        self.started = False
        self.stopped = False

    def check(self) -> None:
        if self.lost:
            raise EngineLost("the Spark engine has ended")

    def stop(self) -> None:
        self.stopped = True


class RunningPart:
    """A service in a thread, with parts of plain functions."""

    def __init__(
        self, settings: PipelineSettings, spark: SparkSession, **parts: Callable[[threading.Event], None]
    ) -> None:
        self.engine = SharedEngine(spark, settings.data_dir / "scratch")
        self.reporter, self.stop = Heard(), threading.Event()
        self.warmed: list[tuple[str, ...]] = []
        self.error: PurveyorError | None = None
        made = [Part(name, partial(ThreadRun, name, work)) for name, work in parts.items()]
        self.service = PipelineService(
            settings,
            lambda *_: made,
            self.reporter,
            start_engine=self._start_engine,
            warm_up=self._warm_up,
        )
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _start_engine(self, *_: object) -> SharedEngine:
        self.engine.started = True
        return self.engine

    def _warm_up(self, _spark: SparkSession, parts: Sequence[PartName], *_: object) -> bool:
        assert not self.reporter.received("ready")
        self.warmed.append(tuple(part.value for part in parts))
        return True

    def _run(self) -> None:
        try:
            self.service.run(self.stop)
        except PurveyorError as error:
            self.error = error

    def hears(self, event: str) -> None:
        wait_until(lambda: self.reporter.received(event) or not self.thread.is_alive())
        assert self.reporter.received(event), (self.error, self.reporter.steps)

    def ends(self) -> PurveyorError | None:
        self.thread.join(PATIENCE_SECONDS)
        assert not self.thread.is_alive()
        return self.error


def idle(stop: threading.Event) -> None:
    stop.wait(300)


@pytest.fixture
def settings(tmp_path: Path, address: Address) -> PipelineSettings:
    # Only prefill: it has no checkpoint, and so no lock of the engine that all tests share.
    return PipelineSettings(data_dir=tmp_path, find_address=lambda: address, parts=(PartName.PREFILL,))


def test_it_is_ready_when_all_parts_run_and_ends_when_stopped(
    settings: PipelineSettings, spark: SparkSession, broker: Broker
) -> None:
    running = RunningPart(settings, spark, dispatch=idle, archive=idle)
    running.hears("ready")
    path = status_path(settings.data_dir, settings.label)
    reported = json.loads(wait_until(lambda: path.exists() and path.read_text()))
    assert reported["pid"] == os.getpid()
    assert [(part["part"], part["state"]) for part in reported["parts"]] == [
        ("dispatch", "running"),
        ("archive", "running"),
    ]
    for stream in (
        "stream:ldif",
        "stream:incoming",
        "stream:prefill",
        "stream:prefill-failures",
        "stream:dead-letters",
    ):
        assert broker.created(stream)
    assert "dispatcher" in broker.consumers("stream:incoming")
    running.stop.set()
    assert running.ends() is None
    assert running.engine.stopped
    assert not path.exists()
    assert [event for event, _ in running.reporter.steps] == ["starting", "ready", "stopping"]


def test_a_server_that_is_away_at_the_start_is_waited_for(
    settings: PipelineSettings, spark: SparkSession, own_server: OwnServer, tmp_path: Path
) -> None:
    where = [NOWHERE]
    waiting = PipelineSettings(data_dir=tmp_path, find_address=lambda: where[0], parts=(PartName.PREFILL,))
    running = RunningPart(waiting, spark, prefill=idle)
    running.hears("waiting")
    assert not running.reporter.received("starting")
    where[0] = own_server().address
    running.hears("ready")
    running.stop.set()
    assert running.ends() is None


def test_a_stop_while_it_waits_for_the_server_is_a_stop(spark: SparkSession, tmp_path: Path) -> None:
    waiting = PipelineSettings(data_dir=tmp_path, find_address=lambda: NOWHERE, parts=(PartName.PREFILL,))
    running = RunningPart(waiting, spark, prefill=idle)
    running.hears("waiting")
    running.stop.set()
    assert running.ends() is None


def test_a_part_that_can_never_work_ends_the_whole(settings: PipelineSettings, spark: SparkSession) -> None:
    stopped = threading.Event()

    def healthy(stop: threading.Event) -> None:
        stop.wait(300)
        stopped.set()

    def broken(_: threading.Event) -> None:
        raise InvalidConfig("the mapping has no rules", fix="give it one")

    error = RunningPart(settings, spark, archive=healthy, transform=broken).ends()
    assert isinstance(error, PartFailed)
    assert (error.message, error.fix) == ("transform cannot work: the mapping has no rules", "give it one")
    assert stopped.is_set()


def test_a_part_that_fails_for_now_ends_nothing(settings: PipelineSettings, spark: SparkSession) -> None:
    def failing(_: threading.Event) -> None:
        raise ValueError("today not")

    running = RunningPart(settings, spark, archive=idle, dispatch=failing)
    wait_until(lambda: [part.state for part in running.reporter.parts] == [State.RUNNING, State.WAITING])
    assert str(running.reporter.parts[1].error) == "today not"
    assert not running.reporter.received("ready")
    running.stop.set()
    assert running.ends() is None


def test_the_end_of_the_engine_is_the_end(settings: PipelineSettings, spark: SparkSession) -> None:
    running = RunningPart(settings, spark, archive=idle)
    running.hears("ready")
    running.engine.lost = True
    assert isinstance(running.ends(), EngineLost)


OWNER = """
import sys, time
from pathlib import Path
from purveyor.pipeline.checkpoints import CheckpointLocks
locks = CheckpointLocks(Path(sys.argv[1]), sys.argv[2].split(","))
print(locks.take() is None, flush=True)
time.sleep(120)
"""


def owner(directory: Path, names: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen([sys.executable, "-c", OWNER, directory, names], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "True\n"
    return process


def end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate(timeout=PATIENCE_SECONDS)


def test_a_second_process_names_the_owner_of_the_part(tmp_path: Path) -> None:
    first = owner(tmp_path / "checkpoints", "dispatch-dispatcher")
    try:
        locks = CheckpointLocks(tmp_path / "checkpoints", ["archive", "dispatch-dispatcher"])
        refused = locks.take()
        assert isinstance(refused, StoreInUse)
        assert (
            f"part dispatch-dispatcher of the pipeline on {tmp_path} is run by process {first.pid}" in refused.message
        )
        assert refused.fix == f"stop it with: kill {first.pid}"
        with CheckpointLocks(tmp_path / "checkpoints", ["archive"]) as others:  # what could be taken was not kept
            assert others.take() is None
    finally:
        end(first)


def test_a_standby_takes_over_when_the_owner_is_killed(tmp_path: Path) -> None:
    first = owner(tmp_path, "archive,transform")
    waits: list[StoreInUse] = []
    taken: list[bool] = []
    locks = CheckpointLocks(tmp_path, ["transform"])
    standby = threading.Thread(target=lambda: taken.append(locks.wait(lambda: True, waits.append)))
    standby.start()
    try:
        wait_until(lambda: waits)
        assert str(first.pid) in waits[0].message
    finally:
        end(first)
    standby.join(PATIENCE_SECONDS)
    assert taken == [True]
    assert len(waits) == 1
    locks.release()


def test_a_second_pipeline_waits_and_reports_it(
    settings: PipelineSettings, spark: SparkSession, tmp_path: Path
) -> None:
    first = owner(tmp_path / "checkpoints", "transform")
    wanted = PipelineSettings(data_dir=tmp_path, find_address=settings.find_address, parts=(PartName.TRANSFORM,))
    try:
        running = RunningPart(wanted, spark, transform=idle)
        running.hears("standby")
        assert [event for event, _ in running.reporter.steps] == ["warming", "standby"]
        assert all(f"is run by process {first.pid}" in text for _, text in running.reporter.steps)
        assert running.warmed == [("transform",)]
        assert running.engine.started
        assert not list(tmp_path.glob("pipeline-status*"))
        impatient = PipelineSettings(
            data_dir=tmp_path, find_address=settings.find_address, parts=(PartName.TRANSFORM,), wait=False
        )
        assert isinstance(RunningPart(impatient, spark, transform=idle).ends(), StoreInUse)
    finally:
        end(first)
    running.hears("ready")
    running.stop.set()
    assert running.ends() is None
    assert running.warmed == [("transform",)]  # not again


def test_a_standby_that_is_not_warm_takes_over_at_once(
    settings: PipelineSettings, spark: SparkSession, tmp_path: Path
) -> None:
    first = owner(tmp_path / "checkpoints", "transform")
    reporter, engine, stop = Heard(), SharedEngine(spark, tmp_path / "scratch"), threading.Event()
    was_stopped: list[bool] = []

    def warm_up(_: SparkSession, _parts: Sequence[PartName], _scratch: Path, go_on: Callable[[], bool]) -> bool:
        if not was_stopped:
            assert go_on()
            end(first)
            wait_until(lambda: not go_on())
        was_stopped.append(True)
        return len(was_stopped) > 1

    wanted = replace(settings, parts=(PartName.TRANSFORM,))
    parts = [Part("transform", partial(ThreadRun, "transform", idle))]
    service = PipelineService(wanted, lambda *_: parts, reporter, start_engine=lambda *_: engine, warm_up=warm_up)
    thread = threading.Thread(target=service.run, args=[stop])
    thread.start()
    wait_until(lambda: reporter.received("ready"))
    stop.set()
    thread.join(PATIENCE_SECONDS)
    assert [event for event, _ in reporter.steps] == ["warming", "ready", "stopping"]
    assert len(was_stopped) == 2  # again, before it was ready


def test_a_standby_whose_engine_dies_says_so(settings: PipelineSettings, spark: SparkSession, tmp_path: Path) -> None:
    first = owner(tmp_path / "checkpoints", "transform")
    wanted = replace(settings, parts=(PartName.TRANSFORM,))
    try:
        running = RunningPart(wanted, spark, transform=idle)
        running.hears("standby")
        running.engine.lost = True
        assert isinstance(running.ends(), EngineLost)
    finally:
        end(first)


def test_a_standby_that_is_stopped_leaves_the_lock_to_others(
    settings: PipelineSettings, spark: SparkSession, tmp_path: Path
) -> None:
    first = owner(tmp_path / "checkpoints", "transform")
    try:
        running = RunningPart(replace(settings, parts=(PartName.TRANSFORM,)), spark, transform=idle)
        running.hears("standby")
        running.stop.set()
        assert running.ends() is None
    finally:
        end(first)
    # The thread that waited in the kernel may get the lock for a moment.
    with CheckpointLocks(tmp_path / "checkpoints", ["transform"]) as locks:
        wait_until(lambda: locks.take() is None)


def test_parts_without_work_are_warm_before_the_pipeline_is_ready(
    settings: PipelineSettings, spark: SparkSession
) -> None:
    wanted = replace(settings, warm_up=True)
    running = RunningPart(wanted, spark, prefill=idle)
    running.hears("ready")
    running.stop.set()
    assert running.ends() is None
    assert running.warmed == [("prefill",)]
    cold = RunningPart(replace(settings, warm_up=False), spark, prefill=idle)
    cold.hears("ready")
    cold.stop.set()
    assert cold.ends() is None
    assert cold.warmed == []


def test_dispatch_starts_first(settings: PipelineSettings, spark: SparkSession) -> None:
    began: list[str] = []

    def part(name: str) -> Work:
        def work(stop: threading.Event) -> None:
            began.append(name)
            idle(stop)

        return work

    names = ("transform", "dispatch", "archive")
    running = RunningPart(settings, spark, **{name: part(name) for name in names})
    running.hears("ready")
    running.stop.set()
    assert running.ends() is None
    assert began[0] == "dispatch"
    assert sorted(began) == sorted(names)
    assert tuple(part.name for part in running.reporter.parts) == names


def test_an_engine_that_outlives_its_process_keeps_the_checkpoint(spark: SparkSession, tmp_path: Path) -> None:
    """As the JVM holds it, no other can have it; Java's locks are those of fcntl."""
    held = EngineLocks(spark, tmp_path, ["archive"])
    assert held.wait(lambda: True, lambda _: None)
    code = (
        "import fcntl, sys\n"
        "try: fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "except OSError: sys.exit(7)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "archive.engine.lock"], check=False)
    assert done.returncode == 7


def test_an_engine_that_outlives_its_process_is_killed_by_the_next_one(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "archive.engine.lock"
    path.touch()
    code = (
        "import fcntl, sys, time\n"
        "held = open(sys.argv[1], 'r+'); fcntl.lockf(held, fcntl.LOCK_EX); print('held', flush=True)\n"
        "time.sleep(120)"
    )
    other = subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    try:
        assert EngineLocks(spark, tmp_path, ["archive"]).wait(lambda: True, lambda _: None)
        assert other.wait(PATIENCE_SECONDS) == -signal.SIGKILL
    finally:
        end(other)


def test_groups_have_checkpoints_of_their_own(tmp_path: Path) -> None:
    usual = PipelineSettings(data_dir=tmp_path, find_address=lambda: NOWHERE)
    backup = PipelineSettings(
        data_dir=tmp_path, find_address=lambda: NOWHERE, group="backup", parts=(PartName.DISPATCH, PartName.PREFILL)
    )
    assert usual.locked_checkpoints == ["transform", "dispatch-dispatcher", "archive"]
    assert backup.locked_checkpoints == ["dispatch-backup"]
    assert usual.checkpoint(PartName.ARCHIVE) == tmp_path / "checkpoints" / "archive"
    assert (usual.label, backup.label) == ("", "backup-dispatch-prefill")
    with pytest.raises(InvalidConfig, match="no part"):
        PipelineSettings(data_dir=tmp_path, find_address=lambda: NOWHERE, parts=())

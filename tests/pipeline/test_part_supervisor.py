"""The supervisor restarts a part that fails, and reports the error."""

import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from purveyor.model.errors import DataLost, InvalidConfig, NoAnswer, PlanOutdated, ServerUnavailable, UnknownStream
from purveyor.model.retries import RestartAfter, RestartPolicy, Restarts, RunEnd
from purveyor.pipeline import part_supervisor
from purveyor.pipeline.job_failures import explain
from purveyor.pipeline.part_status import PartProgress, PartStatus, State, status_path, write_status
from purveyor.pipeline.part_supervisor import RESTART_POLICY, Part, PartSupervisor, QueryRun, ThreadRun
from tests.support.broker import Broker
from tests.support.waiting import PATIENCE_SECONDS, wait_until

QUICK = RestartPolicy(max_deaths=None, first_pause_seconds=0.01, max_pause_seconds=0.02)


class Script:
    """A part that does at each start what the next step says: an error ends it, None runs until it is stopped."""

    def __init__(self, *steps: Exception | None) -> None:
        self.steps = list(steps)
        self.starts = 0
        self.stopped = 0

    def start(self) -> ThreadRun:
        self.starts += 1
        step = self.steps.pop(0)
        return ThreadRun("script", lambda stop: self.work(stop, step))

    def work(self, stop: threading.Event, step: Exception | None) -> None:
        if step is not None:
            raise step
        stop.wait(300)
        self.stopped += 1


def kept(part: Part, *, policy: RestartPolicy = QUICK) -> tuple[PartSupervisor, list[PartStatus]]:
    heard: list[PartStatus] = []
    supervisor = PartSupervisor(part, restart_policy=policy, on_change=heard.append)
    supervisor.start()
    return supervisor, heard


def in_state(supervisor: PartSupervisor, state: State) -> Callable[[], bool]:
    return lambda: supervisor.status.state is state


def end(supervisor: PartSupervisor) -> None:
    supervisor.stop(1)
    assert supervisor.join(PATIENCE_SECONDS)


def test_pauses_double_and_begin_again_after_a_minute_of_health() -> None:
    restarts = Restarts(RESTART_POLICY)
    pauses = [restarts.decide(RunEnd(ran_seconds=5), now) for now in range(7)]
    assert pauses == [RestartAfter(pause) for pause in (1, 2, 4, 8, 16, 30, 30)]
    assert restarts.decide(RunEnd(ran_seconds=60), 8) == RestartAfter(1)


def test_a_part_that_fails_is_started_again_until_it_runs() -> None:
    script = Script(NoAnswer("nobody answers"), ServerUnavailable("away", fix="is it up?"), None)
    supervisor, heard = kept(Part("dispatch", script.start))
    wait_until(in_state(supervisor, State.RUNNING))
    assert script.starts == 3
    waits = [status for status in heard if status.state is State.WAITING]
    assert [str(status.error) for status in waits] == ["nobody answers", "away (is it up?)"]
    assert (supervisor.status.restarts, str(supervisor.status.error)) == (2, "away (is it up?)")
    end(supervisor)
    assert supervisor.status.state is State.STOPPED
    assert script.stopped == 1
    assert all(before != after for before, after in pairwise(heard))


def test_an_error_is_forgotten_after_a_time_of_health() -> None:
    supervisor, _ = kept(
        Part("p", Script(NoAnswer("gone"), None).start),
        policy=RestartPolicy(max_deaths=None, first_pause_seconds=0, window_seconds=0),
    )
    wait_until(lambda: supervisor.status.state is State.RUNNING and supervisor.status.error is None)
    end(supervisor)


def test_a_part_that_does_not_answer_is_unresponsive_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_supervisor, "UNRESPONSIVE_SECONDS", 0.05)
    may_answer = threading.Event()
    may_answer.set()

    class Frozen(ThreadRun):
        def read(self) -> PartProgress:
            assert may_answer.wait(300)
            return PartProgress(position=4)

    def work(stop: threading.Event) -> None:
        stop.wait(300)

    supervisor, _ = kept(Part("dispatch", lambda: Frozen("p", work)))
    wait_until(in_state(supervisor, State.RUNNING))
    may_answer.clear()
    wait_until(in_state(supervisor, State.UNRESPONSIVE))
    status = supervisor.status
    assert (status.progress.position, str(status.error)[:21]) == (4, "Spark does not answer")
    assert status.to_json()["moved_at"] <= status.to_json()["since"]
    monkeypatch.setattr(part_supervisor, "UNRESPONSIVE_SECONDS", 300)
    may_answer.set()
    wait_until(lambda: supervisor.status.state is State.RUNNING and supervisor.status.error is None)
    end(supervisor)


def test_a_start_that_raises_is_an_error_like_any_other() -> None:
    script, attempts = Script(None), [UnknownStream("no stream 'stream:ldif'"), None]

    def start() -> ThreadRun:
        error = attempts.pop(0)
        if error is not None:
            raise error
        return script.start()

    supervisor, heard = kept(Part("transform", start))
    wait_until(in_state(supervisor, State.RUNNING))
    assert [status.error.message for status in heard if status.error][:1] == ["no stream 'stream:ldif'"]
    end(supervisor)


@pytest.mark.parametrize("error", [InvalidConfig("bad", fix="mend"), DataLost("gone", fix="begin anew")])
def test_an_error_that_no_attempt_can_mend_is_the_end(error: InvalidConfig | DataLost) -> None:
    script = Script(error)
    supervisor, _ = kept(Part("transform", script.start))
    assert supervisor.join(PATIENCE_SECONDS)
    assert (supervisor.status.state, script.starts) == (State.FAILED, 1)
    assert supervisor.status.error is not None
    assert (supervisor.status.error.message, supervisor.status.error.fix) == (error.message, error.fix)


def test_an_outdated_plan_is_made_again() -> None:
    text = "org.apache.spark.X: Traceback (most recent call last):\npurveyor.model.errors.PlanOutdated: 1 to 4 are gone"
    for error in (PlanOutdated("1 to 4 are gone"), RuntimeError(text)):
        assert (explain(error).message, explain(error).permanent) == ("1 to 4 are gone", False)
    assert explain(RuntimeError(text.replace("PlanOutdated", "DataLost"))).permanent


def test_a_stop_during_a_pause_is_a_stop_at_once() -> None:
    supervisor, _ = kept(
        Part("p", Script(NoAnswer("x")).start),
        policy=RestartPolicy(max_deaths=None, first_pause_seconds=600, max_pause_seconds=600),
    )
    wait_until(in_state(supervisor, State.WAITING))
    end(supervisor)
    assert supervisor.status.state is State.STOPPED


def test_a_part_that_just_ends_is_started_again() -> None:
    script = Script(None, None)
    begun: list[ThreadRun] = []

    def start() -> ThreadRun:
        begun.append(script.start())
        return begun[-1]

    supervisor, heard = kept(Part("prefill", start))
    wait_until(in_state(supervisor, State.RUNNING))
    begun[0].stop(30)
    wait_until(lambda: script.starts == 2)
    assert [str(status.error) for status in heard if status.state is State.WAITING] == ["it ended without an error"]
    end(supervisor)


class Queries:
    """Streaming queries on the rate source whose batches do what a function does."""

    def __init__(self, spark: SparkSession, checkpoint: Path) -> None:
        self.spark, self.checkpoint = spark, checkpoint
        self.queries: list[StreamingQuery] = []

    def start(self, batch: Callable[[DataFrame, int], None]) -> QueryRun:
        rate = self.spark.readStream.format("rate").option("rowsPerSecond", 50).load()
        writing = rate.writeStream.foreachBatch(batch).option("checkpointLocation", str(self.checkpoint))
        self.queries.append(writing.start())
        return QueryRun(self.queries[-1])


@pytest.fixture
def queries(spark: SparkSession, tmp_path: Path) -> Queries:
    return Queries(spark, tmp_path / "checkpoint")


def test_a_query_whose_batch_fails_continues_from_its_checkpoint(queries: Queries) -> None:
    failed: list[int] = []
    done: list[int] = []

    def batch(_: DataFrame, number: int) -> None:
        if number == 1 and not failed:
            failed.append(number)
            raise NoAnswer("nobody answered on $JS.API", fix="wait")
        done.append(number)

    supervisor, heard = kept(Part("dispatch", lambda: queries.start(batch)))
    wait_until(lambda: len(done) >= 3)
    assert done[:3] == [0, 1, 2]
    assert [str(status.error) for status in heard if status.state is State.WAITING] == [
        "nobody answered on $JS.API (wait)"
    ]
    wait_until(lambda: (supervisor.status.progress.batch or 0) >= 2)
    end(supervisor)
    assert not queries.queries[-1].isActive


def test_a_query_that_is_stopped_finishes_its_batch(queries: Queries) -> None:
    inside, go_on, finished = threading.Event(), threading.Event(), []

    def batch(_: DataFrame, number: int) -> None:
        inside.set()
        assert go_on.wait(PATIENCE_SECONDS)
        finished.append(number)

    run = queries.start(batch)
    assert inside.wait(PATIENCE_SECONDS)
    stopping = threading.Thread(target=run.stop, args=(60,))
    stopping.start()
    go_on.set()
    stopping.join(PATIENCE_SECONDS)
    assert finished
    assert not run.is_alive()
    assert run.failure() is None


def test_the_reading_of_a_query_is_its_last_report() -> None:
    report = {"numInputRows": 7, "processedRowsPerSecond": 3.5, "batchId": 4, "batchDuration": 20}
    offsets = {"endOffset": {"stream": "s", "sequence": 9}, "latestOffset": {"stream": "s", "sequence": 12}}
    query = SimpleNamespace(lastProgress={**report, "sources": [offsets]})
    assert QueryRun(query).read() == PartProgress(  # type: ignore[arg-type]
        position=9, lag=3, rows=7, rows_per_second=3.5, batch=4, batch_ms=20
    )


def test_messages_are_counted_by_position_and_not_by_rows_of_spark() -> None:
    report = {"numInputRows": 2, "processedRowsPerSecond": 100.0, "batchId": 4, "batchDuration": 20}
    offsets = {"startOffset": {"stream": "s", "sequence": 5}, "endOffset": {"stream": "s", "sequence": 105}}
    progress = QueryRun(SimpleNamespace(lastProgress={**report, "sources": [offsets]})).read()  # type: ignore[arg-type]
    assert progress is not None
    assert (progress.rows, progress.rows_per_second) == (100, 5000.0)


@pytest.mark.parametrize(
    ("options", "message", "permanent"),
    [
        ({"stream": "NO-SUCH"}, "no stream 'NO-SUCH'", False),
        ({"stream": "S", "streem": "S"}, "the jetstream format has no option 'streem' (did you mean stream?)", True),
        ({"stream": "S", "servers": "nats://127.0.0.1:1", "patienceSeconds": "1"}, "gave up after 1 s", False),
    ],
)
def test_an_error_of_a_source_is_reported_as_a_purveyor_error(
    queries: Queries, broker: Broker, options: dict[str, str], message: str, permanent: bool
) -> None:
    def start() -> None:
        frame = queries.spark.readStream.format("jetstream").options(**{"servers": broker.url, **options}).load()
        checkpoint = str(queries.checkpoint)
        query = frame.writeStream.foreachBatch(lambda *_: None).option("checkpointLocation", checkpoint).start()
        query.awaitTermination(PATIENCE_SECONDS)

    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever Spark wraps it in
        start()
    found = explain(caught.value)
    assert message in found.message
    assert "\n" not in str(found)
    assert found.permanent is permanent


def test_other_errors_are_reported_in_one_line() -> None:
    trace = "Aborted.\nTraceback (most recent call last):\n  File x\nbuiltins.ValueError: bad value\n\nDriver stack:"
    assert explain(RuntimeError(trace)).message == "ValueError: bad value"
    assert explain(RuntimeError("first\nsecond")).message == "first"
    assert explain(RuntimeError()).message == "RuntimeError"


def test_the_status_file_is_replaced_whole(tmp_path: Path) -> None:
    supervisor = PartSupervisor(Part("archive", Script().start))
    path = status_path(tmp_path)
    write_status(path, {"group": "dispatcher"}, [supervisor.status])
    first = path.stat().st_ino
    write_status(path, {"group": "dispatcher"}, [supervisor.status])
    assert path.stat().st_ino != first
    assert [file.name for file in tmp_path.iterdir()] == ["pipeline-status.json"]

"""Make Spark jobs of the dispatcher fail, or not end, at chosen events."""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the usual alias

from purveyor.model.subscription import Filter
from purveyor.pipeline.dispatch.batch_job import BatchJob, BatchReport
from purveyor.pipeline.dispatch.batch_plan import PlannedTarget
from purveyor.spark.pyspark_internals import map_in_arrow

KILLED = "killed"
"""Kill the Python worker instead of failing in an expression."""


class Poison:
    """Makes the jobs of the dispatcher fail, or never end, when a position is written to a subscription."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._deliver = BatchJob.run
        self.positions: dict[int, frozenset[str] | None] = {}
        """For each position the subscriptions that fail together; None stands for any."""
        self.job = "raise_error('poison')"
        self.after_writing = False
        self.left: int | None = None
        """The number of attempts that fail; None stands for all."""
        self.attempts = 0
        monkeypatch.setattr(BatchJob, "run", self._patching())

    def _patching(self) -> Callable[..., BatchReport]:
        def run(batch_job: BatchJob, events: DataFrame, targets: Sequence[PlannedTarget], **more: Any) -> BatchReport:
            self.attempts += 1
            if self.after_writing:
                report = self._deliver(batch_job, events, targets, **more)
                self._fail_on(events, targets)
                return report
            self._fail_on(events, targets)
            return self._deliver(batch_job, events, targets, **more)

        return run

    def _fail_on(self, events: DataFrame, targets: Sequence[PlannedTarget]) -> None:
        names = {target.name for target in targets if target.found.record.definition.filter == Filter()}
        names |= {f"{target.name} with its filter" for target in targets if target.found.record.definition.filter}
        bad = [position for position, who in self.positions.items() if who is None or who <= names]
        held = events.where(F.arrays_overlap("positions", F.array(*map(F.lit, bad)))) if bad else events.limit(0)
        if not bad or self.left == 0 or not held.count():
            return
        if self.left is not None:
            self.left -= 1
        if self.job == KILLED:
            map_in_arrow(held.select(F.lit(1).alias("one")), _die, "one int").collect()
        else:
            held.select(F.expr(self.job)).collect()


def _die(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    os.kill(os.getpid(), signal.SIGKILL)
    return batches

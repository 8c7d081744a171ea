"""What the pipeline says of its parts, as figures: a reporter that stands before the one for the terminal.

The pipeline knows nothing of this: it tells its parts' status ten times a second to whoever it was given.
"""

import threading
from collections.abc import Sequence

from purveyor.app.telemetry import metric_catalogue
from purveyor.app.telemetry.prometheus import Reading
from purveyor.model.metrics import BATCH_SECONDS, BATCHES
from purveyor.pipeline.part_status import PartStatus, State
from purveyor.pipeline.service import Reporter


class PipelineFigures:
    """The figures of the parts, from what was shown last."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter
        self._parts: Sequence[PartStatus] = ()
        self._batches: dict[str, int] = {}
        self._lock = threading.Lock()

    def say(self, event: str, text: str) -> None:
        """A step of the whole."""
        self._reporter.say(event, text)

    def show(self, parts: Sequence[PartStatus]) -> None:
        """How the parts are."""
        with self._lock:
            self._parts = tuple(parts)
            for part in parts:
                self._note_batch(part)
        self._reporter.show(parts)

    def _note_batch(self, part: PartStatus) -> None:
        number = part.reading.batch
        if number is None:
            return
        before = self._batches.get(part.name)
        # At the first look the batch may be one of an earlier run.
        if before is not None and number > before:
            BATCHES.add(part.name, by=number - before)
            if part.reading.batch_ms is not None:
                BATCH_SECONDS.add(part.reading.batch_ms / 1000, part.name)
        self._batches[part.name] = number

    def read(self) -> list[Reading]:
        """The figures now."""
        with self._lock:
            parts = self._parts
        up, position, lag, rate, batch, restarts = (
            Reading(figure)
            for figure in (
                metric_catalogue.PART_UP,
                metric_catalogue.PART_POSITION,
                metric_catalogue.PART_LAG,
                metric_catalogue.PART_RATE,
                metric_catalogue.PART_BATCH,
                metric_catalogue.PART_RESTARTS,
            )
        )
        for part in parts:
            reading = part.reading
            up.add(part.state is State.RUNNING, part.name)
            restarts.add(part.restarts, part.name)
            if reading.position is not None:
                position.add(reading.position, part.name)
            if reading.lag is not None:
                lag.add(reading.lag, part.name)
            if reading.batch_ms is not None:
                batch.add(reading.batch_ms / 1000, part.name)
                rate.add(reading.rows_per_second, part.name)
        return [up, position, lag, rate, batch, restarts]

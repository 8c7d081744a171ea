"""What goes on beside the archive's query: the stream is released, small ranges are merged, snapshots are made.

The durable of the archive is not moved when a batch is done but a while later: a reader that has planned to take
positions from the stream, because they were not archived yet, still finds them there. And never past what the query's
own log has as done and the disk has stored: a batch that Spark will run again must still be readable.
"""

import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from purveyor.model.errors import PurveyorError
from purveyor.pipeline.archive.checkpoint_log import committed
from purveyor.pipeline.archive.compaction import compact
from purveyor.pipeline.archive.range_store import Store
from purveyor.pipeline.archive.snapshot import snapshot_if_worthwhile
from purveyor.pipeline.running_parts import is_active
from purveyor.spark.durable_commit import Releases
from purveyor.spark.offsets import Offset
from purveyor.spark.options import read_settings
from purveyor.spark.stream_control import Control

_log = logging.getLogger(__name__)
_TICK_SECONDS = 1.0
_HOUSEKEEPING_SECONDS = 30.0


class Upkeep:
    """The thread beside one run of the query."""

    def __init__(self, spark: SparkSession, store: Store, checkpoint: Path, *, hold_seconds: float) -> None:
        self._spark = spark
        self._store = store
        self._checkpoint = checkpoint
        self._hold_seconds = hold_seconds
        self._control: Control | None = None
        self._releases = Releases(hold_seconds=hold_seconds)

    def hold(self, connection: Mapping[str, str], durable: str) -> None:
        """Make the durable if it is not there: from now on the stream keeps everything for the archive."""
        settings = read_settings({**connection, "durable": durable, "syncCheckpoint": str(self._checkpoint.absolute())})
        self._control = Control(settings)
        view = self._control.view()
        self._control.make_durable(Offset(settings.stream, view.created, view.begins - 1))

    def start(self, query: StreamingQuery) -> None:
        """Until the query ends."""
        threading.Thread(target=self._run, args=(query,), name="archive-upkeep", daemon=True).start()

    def _run(self, query: StreamingQuery) -> None:
        self._spark.sparkContext.setLocalProperty("spark.scheduler.pool", "archive")
        next_housekeeping = time.monotonic() + _HOUSEKEEPING_SECONDS
        tick = min(_TICK_SECONDS, max(self._hold_seconds / 4, 0.05))
        while is_active(query):
            time.sleep(tick)
            try:
                self.release(time.monotonic())
                if time.monotonic() > next_housekeeping:
                    self._keep_house()
                    next_housekeeping = time.monotonic() + _HOUSEKEEPING_SECONDS
            except Exception as error:  # noqa: BLE001 - the server is away, a job of the engine failed: the next round
                if is_active(query):  # else the engine is being stopped, and took the job along
                    _log.warning("upkeep of the archive: %s", _in_short(error))

    def release(self, now: float) -> None:
        """Move the durable to where the query was done `hold_seconds` ago."""
        end = committed(self._checkpoint)
        if end is not None:
            self._releases.add(end, now)
        if self._control is None or not self._releases.pending:
            return
        sealed = self._control.view().sealed  # the stream is being migrated: publishers wait until all is released
        due = self._releases.due(now, hold=not sealed)
        if due is not None:
            try:
                self._control.move_durable(due)
            except Exception:
                self._releases.give_back(due, now)
                raise

    def _keep_house(self) -> None:
        compact(self._spark, self._store)
        snapshot_if_worthwhile(self._spark, self._store)
        self._store.tidy()


def _in_short(error: Exception) -> str:
    """An error of the engine has pages of its stack trace in its words."""
    return str(error) if isinstance(error, PurveyorError) else next(iter(str(error).splitlines()), repr(error))

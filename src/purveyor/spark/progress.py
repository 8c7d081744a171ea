"""The progress of a streaming query: where it is in its `jetstream` source, how far behind, and what was lost."""

import json
from dataclasses import dataclass
from typing import Any

from pyspark.sql.streaming.query import StreamingQuery


def is_active(query: StreamingQuery) -> bool:
    """Return whether a query still runs; False also when the JVM is gone."""
    try:
        return bool(query.isActive)
    except Exception:  # noqa: BLE001 - which error a dead JVM raises depends on where the connection broke
        return False


@dataclass(frozen=True, slots=True)
class Progress:
    """The position of a query in its stream, as of its last progress report."""

    stream: str
    sequence: int
    latest: int
    lost: int
    input_rows_per_second: float
    processed_rows_per_second: float
    taken: int | None = None
    """How many sequences the last batch covered; None for the first batch of a query, whose start Spark does not
    report."""

    @property
    def lag(self) -> int:
        """How many sequences lie between the query and the newest message."""
        return max(self.latest - self.sequence, 0)


def progress_of(query: StreamingQuery) -> list[Progress]:
    """Return one entry for each `jetstream` source of a query; none before its first report."""
    report: Any = query.lastProgress
    if report is None:
        return []
    values = json.loads(report.json) if hasattr(report, "json") else report
    return [found for source in values["sources"] if (found := _of_source(source)) is not None]


def _of_source(source: dict[str, Any]) -> Progress | None:
    end, latest = _offset(source.get("endOffset")), _offset(source.get("latestOffset"))
    if end is None or "sequence" not in end:
        return None
    start = _offset(source.get("startOffset"))
    return Progress(
        stream=str(end["stream"]),
        sequence=int(end["sequence"]),
        latest=int((latest or end)["sequence"]),
        lost=int(end.get("lost", 0)),
        input_rows_per_second=float(source.get("inputRowsPerSecond") or 0.0),
        processed_rows_per_second=float(source.get("processedRowsPerSecond") or 0.0),
        taken=max(int(end["sequence"]) - int(start["sequence"]), 0) if start and "sequence" in start else None,
    )


def _offset(value: object) -> dict[str, Any] | None:
    if isinstance(value, str):
        value = json.loads(value)
    return value if isinstance(value, dict) else None

"""What a streaming query's progress says about its `jetstream` source: where it is, how far behind, what was lost."""

import json
from dataclasses import dataclass
from typing import Any

from pyspark.sql.streaming.query import StreamingQuery


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
    """How many sequences the last batch went over; None for the first of a query, as Spark does not tell its start."""

    @property
    def lag(self) -> int:
        """How many sequences lie between the query and the newest message."""
        return max(self.latest - self.sequence, 0)


def progress_of(query: StreamingQuery) -> list[Progress]:
    """One entry for each `jetstream` source of a query; none before its first report."""
    report: Any = query.lastProgress
    if report is None:
        return []
    told = json.loads(report.json) if hasattr(report, "json") else report
    return [found for source in told["sources"] if (found := _of_source(source)) is not None]


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

"""A program of its own, to be killed: archives a stream in small batches for ever. Its argument is one JSON object."""

import json
import sys
from pathlib import Path
from typing import Any

from purveyor.jetstream.address import Address
from purveyor.pipeline.archive.maintenance import compact
from purveyor.pipeline.archive.range_store import RangeStore
from purveyor.pipeline.archive.reader import ArchiveSource
from purveyor.pipeline.archive.writer import ArchiveSettings, start_archive
from purveyor.spark import session
from tests.support.spark_session import QUIET


def main(job: dict[str, Any]) -> None:
    """Batches and compactions, until the end."""
    spark = session("archive", master="local[2]", options=QUIET | job["spark"])
    directory = Path(job["directory"])
    source = ArchiveSource(Address.parse(job["servers"]), directory, job["stream"])
    checkpoint = Path(job["checkpoint"])
    query = start_archive(
        spark,
        ArchiveSettings(source=source, checkpoint=checkpoint, trigger_seconds=0.0, max_offsets=20, hold_seconds=0.0),
    )
    while query.isActive:
        compact(spark, RangeStore(directory), fan_in=3)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

"""What the archive's query has written down about its batches: the range of one, and which are done."""

import json
from pathlib import Path

from purveyor.spark.offsets import Offset


def batch_end(checkpoint: Path, number: int) -> Offset:
    """Where a batch ends, as it stands in the query's log of offsets: written before the batch is first run."""
    lines = (checkpoint / "offsets" / str(number)).read_text(encoding="utf-8").splitlines()
    return Offset.from_json(json.loads(lines[-1]))


def committed(checkpoint: Path) -> Offset | None:
    """Where the last batch that is done ends; None before there is one."""
    try:
        numbers = [int(path.name) for path in (checkpoint / "commits").iterdir() if path.name.isdigit()]
    except FileNotFoundError:
        return None
    return batch_end(checkpoint, max(numbers)) if numbers else None

"""The rows of a batch by their targets: in order, and also when nobody gets any of them."""

from collections.abc import Sequence

import pyarrow as pa
import pytest

from purveyor.pipeline.dispatch.messages import INVALID, parts

GOOD, POISON = True, False
TARGETS = pa.struct([("targets", pa.list_(pa.int32()))])


def batch(rows: Sequence[tuple[bool, list[int]]]) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "matched": pa.array([{"targets": targets} for _, targets in rows], TARGETS),
            "realm": pa.array(["r" if event else None for event, _ in rows], pa.string()),
        }
    )


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(GOOD, [1, 0]), (GOOD, [1])], {0: [0], 1: [0, 1]}),
        ([(POISON, []), (GOOD, [2]), (POISON, [])], {2: [1], INVALID: [0, 2]}),
        ([(POISON, [])], {INVALID: [0]}),
        ([(GOOD, [])], {}),
    ],
)
def test_each_target_gets_its_rows_and_poison_goes_to_nobody(
    rows: Sequence[tuple[bool, list[int]]], expected: dict[int, list[int]]
) -> None:
    assert {part.target: part.rows.tolist() for part in parts(batch(rows), None, 1)} == expected

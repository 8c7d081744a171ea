"""The rows of a batch by their targets: in order, and also when nobody gets any of them."""

from collections.abc import Sequence

import pyarrow as pa
import pytest

from purveyor.pipeline.dispatch.messages import INVALID, parts

GOOD = b'{"realm": "r", "topic": "t", "publisher_name": "p", "ts": "2026-01-01T00:00:00Z", "body": {"new": {"id": 1}}}'
TARGETS = pa.struct([("targets", pa.list_(pa.int32()))])


def batch(rows: Sequence[tuple[bytes, list[int]]]) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "matched": pa.array([{"targets": targets} for _, targets in rows], TARGETS),
            "doubtful": [data != GOOD for data, _ in rows],
            "data": [data for data, _ in rows],
            "realm": ["r" for _ in rows],
            "topic": ["t" for _ in rows],
        }
    )


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([(GOOD, [1, 0]), (GOOD, [1])], {0: [0], 1: [0, 1]}),
        ([(b"poison", []), (GOOD, [2]), (b"[]", [])], {2: [1], INVALID: [0, 2]}),
        ([(b"poison", [])], {INVALID: [0]}),
        ([(GOOD, [])], {}),
    ],
)
def test_each_target_gets_its_rows_and_poison_goes_to_nobody(
    rows: Sequence[tuple[bytes, list[int]]], expected: dict[int, list[int]]
) -> None:
    assert {part.target: part.rows.tolist() for part in parts(batch(rows), None, 1)} == expected

"""The rows of topic batches by their targets: in order, and also when no target gets any of them."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from purveyor.pipeline.dispatch.subscriber_messages import INVALID_TARGET, rows_by_target
from purveyor.pipeline.event_rows import UnpackedMessages

GOOD, POISON = True, False
MATCHED = pa.struct([("targets", pa.list_(pa.int32())), ("passing", pa.list_(pa.list_(pa.int32())))])
TopicBatch = tuple[bool, list[int], list[int], list[list[int]] | None]
"""Whether it holds events, their positions, the targets of all of them, and the targets of each."""


def unpacked(batches: Sequence[TopicBatch]) -> UnpackedMessages:
    def column(values: list[Any], kind: Any) -> Any:
        return pa.array(values, kind)

    counts = [len(positions) for _, positions, _, _ in batches]
    return UnpackedMessages(
        [
            pa.record_batch(
                {
                    "positions": column([positions for _, positions, _, _ in batches], pa.list_(pa.int64())),
                    "ends": column([list(range(1, count + 1)) for count in counts], pa.list_(pa.int32())),
                    "data": column([b"x" * count for count in counts], pa.binary()),
                    "header_ends": column([[0] * count for count in counts], pa.list_(pa.int32())),
                    "headers": column([b""] * len(batches), pa.binary()),
                    "realm": column(["r" if good else None for good, _, _, _ in batches], pa.string()),
                    "matched": column(
                        [{"targets": targets, "passing": passing} for _, _, targets, passing in batches], MATCHED
                    ),
                }
            )
        ]
    )


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        ([(GOOD, [5], [1, 0], None), (GOOD, [6], [1], None)], {0: [5], 1: [5, 6]}),
        ([(GOOD, [1, 4], [0, 1], None), (GOOD, [2, 3], [1], None)], {0: [1, 4], 1: [1, 2, 3, 4]}),
        ([(POISON, [1, 3], [], None), (GOOD, [2], [2], None)], {2: [2], INVALID_TARGET: [1, 3]}),
        ([(POISON, [1], [], None)], {INVALID_TARGET: [1]}),
        ([(GOOD, [1], [], None)], {}),
        ([(GOOD, [1, 3, 5], [], [[7], [], [7, 8]])], {7: [1, 5], 8: [5]}),
        (
            [(GOOD, [1, 5], [0], [[9], []]), (GOOD, [2, 3], [9], None), (GOOD, [4, 6], [], [[], [0, 9]])],
            {0: [1, 5, 6], 9: [1, 2, 3, 6]},
        ),
    ],
)
def test_each_target_gets_its_rows_and_invalid_messages_only_dead_letters(
    batches: Sequence[TopicBatch], expected: dict[int, list[int]]
) -> None:
    made = unpacked(batches)
    positions = made.rows.column("position").to_numpy()
    assert {part.target: positions[part.rows].tolist() for part in rows_by_target(made, None, 1)} == expected


@pytest.mark.parametrize("writers", [2, 3])
def test_writers_share_the_targets(writers: int) -> None:
    made = unpacked([(GOOD, [1, 4], [0, 1, 2], None), (GOOD, [2, 3], [1], [[5], [3, 4]]), (POISON, [5], [], None)])
    together = {part.target: part.rows.tolist() for part in rows_by_target(made, None, 1)}
    shares = [
        {part.target: part.rows.tolist() for part in rows_by_target(made, each, writers)} for each in range(writers)
    ]
    assert sum(map(len, shares)) == len(together)
    assert {target: rows for share in shares for target, rows in share.items()} == together
    assert all(
        target % writers == each for each, share in enumerate(shares) for target in share if target != INVALID_TARGET
    )

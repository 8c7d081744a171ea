"""Messages that pass through Spark in chunks come out unchanged."""

from datetime import UTC, datetime

import pyarrow as pa

from purveyor.jetstream.bulk import SCHEMA
from purveyor.pipeline.transform.record_transform import Message, Output
from purveyor.pipeline.transform.state_processor import (
    MAX_CHUNK_BYTES,
    OUTPUT_SCHEMA,
    chunk_messages,
    chunk_outputs,
    read_chunk,
    read_messages,
)

MOMENT = datetime(2026, 11, 15, 12, 0, 0, 123456, tzinfo=UTC)


def batch(messages: list[Message]) -> pa.RecordBatch:
    rows = [
        {
            "sequence": each.sequence,
            "timestamp": each.stored,
            "subject": each.subject,
            "headers": [(name, list(values)) for name, values in each.headers.items()],
            "data": each.data,
        }
        for each in messages
    ]
    return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)


def test_messages_are_parted_by_subject_and_keep_their_order() -> None:
    messages = [
        Message(number, MOMENT, f"ldif.{number % 2}", {"A": ("1", "2")} if number % 3 else {}, b"x" * number)
        for number in range(1, 2501)
    ]
    packed = [row for each in chunk_messages([batch(messages)]) for row in each.to_pylist()]
    for subject in ("ldif.0", "ldif.1"):
        chunks = [row for row in packed if row["subject"] == subject]
        found = [message for row in chunks for message in read_messages(row["chunk"])]
        assert found == [message for message in messages if message.subject == subject]
        assert [row["first"] for row in chunks] == [next(read_messages(row["chunk"])).sequence for row in chunks]
    assert len(packed) == 6


def test_large_messages_make_small_chunks() -> None:
    messages = [Message(number, MOMENT, "ldif.a", {}, b"x" * (MAX_CHUNK_BYTES // 3)) for number in range(1, 8)]
    assert [each.num_rows for each in chunk_messages([batch(messages)])] == [1, 1, 1]


def test_outputs_survive() -> None:
    outputs = [
        Output(5 << 20, False, b"{}", {}, "id-1"),
        Output(6 << 20, True, b"\xff", {"Purveyor-Reason": ("so",), "B": ("1", "2")}, "id-2"),
    ]
    (chunk,) = chunk_outputs(outputs)
    table = read_chunk(chunk)
    assert table.schema == OUTPUT_SCHEMA
    assert table.to_pylist() == [
        {"position": 5 << 20, "parked": False, "data": b"{}", "headers": [], "msg_id": "id-1"},
        {
            "position": 6 << 20,
            "parked": True,
            "data": b"\xff",
            "headers": [("Purveyor-Reason", ["so"]), ("B", ["1", "2"])],
            "msg_id": "id-2",
        },
    ]
    assert list(chunk_outputs([])) == []

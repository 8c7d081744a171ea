"""Topic batches hold what was read: each message comes out unchanged, by position, however Spark divided them."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purveyor.jetstream.bulk.arrow_columns import HEADERS_TYPE as HEADERS
from purveyor.model.control_events import CONTROL_SUBJECT
from purveyor.pipeline import event_rows
from purveyor.pipeline.event_rows import UnpackedMessages, group_portions, to_topic_batches

TOPICS = ("users/user", "groups/group", "ünï/ö")
BLOCKS = {
    b"": [],
    b"NATS/1.0\r\nNats-Msg-Id: a\r\n\r\n": [("Nats-Msg-Id", ["a"])],
    b"NATS/1.0\r\nA: 1\r\nB: x\r\nA: \xc3\xbc\r\n\r\n": [("A", ["1", "ü"]), ("B", ["x"])],
}


def event(topic: str, size: int) -> bytes:
    as_tuples = {"publisher_name": "t", "ts": "2026-01-01T00:00:00Z", "realm": "udm", "topic": topic}
    return json.dumps({**as_tuples, "body": {"old": {}, "new": {"id": 1, "more": "x" * size}}}).encode()


bodies = st.builds(event, st.sampled_from(TOPICS), st.integers(0, 300)) | st.just(b"rubbish") | st.just(b"")
subjects = st.sampled_from(("incoming", "incoming.shop", CONTROL_SUBJECT))
messages_of_all_kinds = st.lists(st.tuples(subjects, st.sampled_from(list(BLOCKS)), bodies), max_size=12)
Message = tuple[str, bytes, bytes]


def batch(messages: Sequence[Message], first: int = 1, step: int = 1) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "sequence": pa.array(range(first, first + len(messages) * step, step), pa.int64()),
            "subject": pa.array([subject for subject, _, _ in messages], pa.string()),
            "headers": pa.array([block for _, block, _ in messages], pa.binary()),
            "data": pa.array([body for _, _, body in messages], pa.binary()),
        }
    )


def as_tuples(unpacked: UnpackedMessages) -> list[tuple[Any, ...]]:
    rows = unpacked.take_rows(np.arange(unpacked.rows.num_rows))
    return [(row["position"], row["subject"], row["headers"], row["data"]) for row in rows]


@given(
    portions=st.lists(messages_of_all_kinds, min_size=1, max_size=4),
    cut=st.integers(1, 5),
    max_rows=st.integers(1, 30),
    max_bytes=st.sampled_from((1, 500, 1 << 20)),
    batch_bytes=st.sampled_from((1, 200, 1 << 20)),
)
def test_what_is_unpacked_is_what_was_packed(
    portions: list[list[Message]], cut: int, max_rows: int, max_bytes: int, batch_bytes: int
) -> None:
    made, expected, first = [], [], 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_rows, "_MAX_BATCH_BYTES", batch_bytes)
        for messages in portions:
            given_ = batch(messages, first, 2)
            expected += [
                (row["sequence"], row["subject"], BLOCKS[row["headers"]], row["data"])
                for row in given_.to_pylist()
                if row["subject"] != CONTROL_SUBJECT
            ]
            made.append(to_topic_batches(given_))
            first += 100
    sent = pa.Table.from_batches(made).combine_chunks().to_batches(max_chunksize=cut)
    unpacked_groups = [UnpackedMessages(found) for found in group_portions(sent, max_rows, max_bytes)]
    assert [row for unpacked in unpacked_groups for row in as_tuples(unpacked)] == expected
    whole = [set(unpacked.topic_batches.column("portion").to_pylist()) for unpacked in unpacked_groups]
    assert sum(map(len, whole)) == len(set().union(*whole)), "a portion is written by one call"
    for unpacked in unpacked_groups:
        unpacked.rows.validate(full=True)
        assert unpacked.rows.schema.field("headers").type == HEADERS


def test_a_pack_holds_one_topic_and_what_is_no_event_has_one_of_its_own() -> None:
    messages = [
        ("incoming", b"", event("users/user", 1)),
        ("incoming", b"", b"{"),
        ("incoming", b"", event("groups", 1)),
    ]
    found = to_topic_batches(batch(messages * 3)).to_pylist()
    assert {(row["realm"], row["topic"]): row["positions"] for row in found} == {
        ("udm", "users/user"): [1, 4, 7],
        (None, None): [2, 5, 8],
        ("udm", "groups"): [3, 6, 9],
    }
    assert {row["portion"] for row in found} == {1}


def test_a_large_pack_is_cut() -> None:
    found = to_topic_batches(batch([("incoming", b"", event("users/user", 100_000))] * 10))
    assert found.num_rows > 1
    assert max(len(row["data"]) for row in found.to_pylist()) < event_rows._MAX_BATCH_BYTES + 101_000
    assert as_tuples(UnpackedMessages([found])) == [
        (n, "incoming", [], event("users/user", 100_000)) for n in range(1, 11)
    ]


def test_control_events_are_in_no_pack() -> None:
    assert to_topic_batches(batch([(CONTROL_SUBJECT, b"", b"{}")])).num_rows == 0

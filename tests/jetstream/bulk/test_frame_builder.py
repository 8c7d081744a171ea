"""Publish frames follow the protocol exactly; an invalid message is refused by its index."""

import re

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purveyor.jetstream.bulk import outgoing
from purveyor.jetstream.bulk.arrow_columns import join
from purveyor.jetstream.bulk.publish.frame_builder import (
    FrameOptions,
    PreparedRows,
    build_frames,
    index_digits,
    prepare,
)
from purveyor.jetstream.bulk.publish.pipelined import as_bytes, split_rows
from purveyor.jetstream.bulk.read.range_rows import filter_batch, remove_covered
from purveyor.model.errors import InvalidHeader, InvalidInput, InvalidSubject, PublishRefused

OPTIONS = FrameOptions(b"made.", None, 1 << 20)
FRAME = re.compile(rb"HPUB (\S+) (\S+) (\d+) (\d+)\r\n")


def rows_of(
    *messages: tuple[str, bytes, dict[str, str] | None, str | None], frame_options: FrameOptions = OPTIONS
) -> PreparedRows:
    (batch,) = outgoing(messages)
    return prepare(batch, 7, frame_options)


def parse(data: bytes) -> list[tuple[bytes, bytes, bytes, bytes]]:
    """Return subject, reply, headers and payload of each frame, parsed strictly by lengths."""
    found, at = [], 0
    while at < len(data):
        match = FRAME.match(data, at)
        assert match, data[at : at + 40]
        header_size, total = int(match[3]), int(match[4])
        body = data[match.end() : match.end() + total]
        at = match.end() + total + 2
        assert data[at - 2 : at] == b"\r\n"
        found.append((match[1], match[2], body[:header_size], body[header_size:]))
    return found


SUBJECTS = st.lists(st.text("abc0189-_é日", min_size=1, max_size=6), min_size=1, max_size=3).map(".".join)
IDS = st.one_of(st.none(), st.text("abc:/ é", min_size=1, max_size=6))


@given(st.lists(st.tuples(SUBJECTS, st.binary(max_size=40), st.none(), IDS), min_size=1, max_size=12))
def test_frames_carry_each_message_as_it_is(messages: list[tuple[str, bytes, None, str | None]]) -> None:
    rows = rows_of(*messages)
    built = build_frames(rows, replies=join(b" inbox.", index_digits(rows)))
    expected = [
        (
            subject.encode(),
            b"inbox.%d" % (7 + row),
            b"NATS/1.0\r\nNats-Msg-Id: %s\r\n\r\n" % (given_id.encode() if given_id else b"made.%d" % (7 + row)),
            data,
        )
        for row, (subject, data, _, given_id) in enumerate(messages)
    ]
    assert parse(as_bytes(built).tobytes()) == expected


def test_a_message_has_one_id_and_its_expected_stream() -> None:
    rows = rows_of(
        ("a", b"", {"Nats-Msg-Id": "h"}, "column"),
        ("a", b"", {"Nats-Msg-Id": "h"}, None),
        ("a", b"", {"X": "y"}, ""),
        frame_options=FrameOptions(b"made.", "S", 1 << 20),
    )
    assert rows.header_lines.to_pylist() == [
        b"Nats-Msg-Id: column\r\nNats-Expected-Stream: S\r\n",
        b"Nats-Msg-Id: h\r\nNats-Expected-Stream: S\r\n",
        b"Nats-Msg-Id: made.9\r\nX: y\r\nNats-Expected-Stream: S\r\n",
    ]


@pytest.mark.parametrize("subject", ["", "a b", "a..b", ".a", "a.", "a.*", "a.>", "a\r\nPING", "a\tb", "x" * 4000])
def test_an_invalid_subject_is_refused_by_index(subject: str) -> None:
    with pytest.raises(InvalidSubject, match="message 8"):
        rows_of(("fine", b"", None, None), (subject, b"", None, None))


def test_an_id_with_a_line_break_is_refused_by_index() -> None:
    with pytest.raises(InvalidHeader, match="message 8"):
        rows_of(("a", b"", None, None), ("a", b"", None, "x\r\nNats-Rollup: all"))


def test_a_message_over_the_limit_is_refused_by_index_and_one_at_the_limit_is_not() -> None:
    limit = 100
    header = len(b"NATS/1.0\r\nNats-Msg-Id: i\r\n\r\n")
    frame_options = FrameOptions(b"made.", None, limit)
    rows_of(("a", bytes(limit - header), None, "i"), frame_options=frame_options)
    with pytest.raises(PublishRefused, match=r"message 8 has 101 bytes .* takes 100") as refused:
        rows_of(("a", b"", None, "i"), ("a", bytes(limit - header + 1), None, "i"), frame_options=frame_options)
    assert refused.value.index == 8


@pytest.mark.parametrize(
    ("columns", "reported"),
    [
        ({"subject": ["a"]}, "no column 'data'"),
        ({"subject": ["a", None], "data": [b"", b""]}, "message 8 has no subject"),
        ({"subject": ["a"], "data": [1.5]}, "column 'data'"),
    ],
)
def test_wrong_columns_are_refused(columns: dict[str, list[object]], reported: str) -> None:
    with pytest.raises(InvalidInput, match=reported):
        prepare(pa.record_batch(columns), 7, OPTIONS)


def test_other_arrow_types_of_the_same_meaning_are_taken() -> None:
    batch = pa.record_batch(
        {
            "subject": pa.array(["a", "b"]).dictionary_encode(),
            "data": pa.array(["x", "y"], pa.large_string()),
            "msg_id": pa.array(["1", None], pa.large_string()),
            "headers": pa.array([{"A": ["b"]}, None], pa.map_(pa.large_string(), pa.large_list(pa.string()))),
        }
    )
    rows = prepare(batch, 0, OPTIONS)
    assert rows.payloads.to_pylist() == [b"x", b"y"]
    assert rows.header_lines.to_pylist() == [b"Nats-Msg-Id: 1\r\nA: b\r\n", b"Nats-Msg-Id: made.1\r\n"]


@given(st.lists(st.integers(0, 300), min_size=1, max_size=40), st.integers(1, 10), st.integers(1, 2000))
def test_split_rows_is_bounded_and_complete(sizes: list[int], max_rows: int, max_bytes: int) -> None:
    rows = rows_of(*(("a", bytes(size), None, "i") for size in sizes))
    parts = list(split_rows(rows, max_rows, max_bytes))
    assert [size for part in parts for size in (len(p) for p in part.payloads.to_pylist())] == sizes
    assert [part.first_index for part in parts] == [7 + sum(len(p) for p in parts[:k]) for k in range(len(parts))]
    assert all(len(part) <= max_rows and (len(part) == 1 or part.sizes().sum() <= max_bytes) for part in parts)


def test_invalid_tuples_are_refused() -> None:
    with pytest.raises(InvalidInput):
        list(outgoing([("a", "text, not bytes", {"A": 5}, None)]))  # type: ignore[list-item, dict-item]


def test_filters_match_like_the_server() -> None:
    assert remove_covered(("a.>", "a.b", "a.*.c", "b", "b")) == ("a.>", "b")
    assert remove_covered(("a.*", "a.>")) == ("a.>",)
    assert remove_covered((">", "a")) == ()
    batch = pa.record_batch({"subject": ["a.b", "a.b.c", "a", "b", "axb", "b.c"]})
    assert filter_batch(batch, ("a.*", "b")).column(0).to_pylist() == ["a.b", "b"]
    assert filter_batch(batch, ("a.>", "*.c")).column(0).to_pylist() == ["a.b", "a.b.c", "b.c"]


@pytest.mark.parametrize(
    "lines",
    [
        b"A: b",
        b"A: b\r\nC",
        b"A:b\r\n",
        b": b\r\n",
        b"A b: c\r\n",
        b"A: b\nC: d\r\n",
        b"A: \0\r\n",
        b"A: b\r\n\r\n",
        b"\r\n",
        b"Nats-Msg-Id: x\r\n",
        b"A: b\r\nnats-expected-stream: x\r\n",
        None,
    ],
)
def test_encoded_header_lines_are_checked(lines: bytes | None) -> None:
    columns = {
        "subject": pa.array(["a", "a"], pa.string()),
        "data": pa.array([b"", b""], pa.binary()),
        "header_lines": pa.array([b"A: b\r\n", lines], pa.binary()),
    }
    with pytest.raises(InvalidHeader, match="message 6:"):
        prepare(pa.record_batch(columns), 5, FrameOptions(b"p.", None, 1 << 20))


def test_encoded_header_lines_are_sent_as_they_are() -> None:
    given = [b"", b"A: b\r\nC: \xc3\xa9 : x\r\n", b"A: \xff\r\n"]
    columns = {
        "subject": pa.array(["a"] * 3, pa.string()),
        "data": pa.array([b"x"] * 3, pa.binary()),
        "header_lines": pa.array(given, pa.binary()),
        "msg_id": pa.array(["i", "j", None], pa.string()),
    }
    rows = prepare(pa.record_batch(columns), 0, FrameOptions(b"p.", None, 1 << 20))
    ids = (b"i", b"j", b"p.2")
    assert rows.header_lines.to_pylist() == [b"Nats-Msg-Id: %b\r\n%b" % each for each in zip(ids, given, strict=True)]

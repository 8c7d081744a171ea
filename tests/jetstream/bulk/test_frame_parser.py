"""Frames are parsed by their lengths, whatever payloads contain and wherever a buffer ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purveyor.jetstream.bulk.arrow_columns import parse_fixed_width
from purveyor.jetstream.bulk.net.frame_parser import (
    Frames,
    MalformedFrames,
    ReceiveBuffer,
    parse_frames,
    parse_message_lines,
)
from purveyor.jetstream.bulk.options import SCHEMA
from purveyor.jetstream.bulk.read.range_rows import from_consumer
from tests.support.bulk_messages import Message, array, frame


def messages_of(frames: Frames) -> list[Message]:
    lines = parse_message_lines(frames)
    text = lines.text.tobytes()
    whole = frames.data.tobytes()
    return [
        (
            text[lines.subject_starts[row] : lines.subject_ends[row]],
            int(lines.sids[row]),
            text[lines.reply_starts[row] : lines.reply_ends[row]],
            whole[frames.bodies[row] : frames.payloads[row]],
            whole[frames.payloads[row] : frames.ends[row]],
        )
        for row in range(len(frames))
    ]


TOKENS = st.text("abcXYZ0189-_é", min_size=1, max_size=8).map(str.encode)
SUBJECTS = st.lists(TOKENS, min_size=1, max_size=4).map(b".".join)
HEADERS = st.sampled_from([b"", b"NATS/1.0\r\n\r\n", b"NATS/1.0\r\nA: MSG x 1 2\r\nMSG : y\r\n\r\n"])
TRICKS = (
    b"\r\n",
    b"MSG ",
    b"HMSG",
    b"PING\r\n",
    b"\r",
    b"\n",
    b" ",
    b"7",
    b"\r\nMSG a 1 3\r\nxyz\r\n",
    b"\r\n-ERR 'x'\r\n",
)
PAYLOADS = st.lists(st.one_of(st.sampled_from(TRICKS), st.binary(max_size=12)), max_size=8).map(b"".join)
MESSAGES = st.tuples(SUBJECTS, st.integers(1, 999), st.one_of(st.just(b""), SUBJECTS), HEADERS, PAYLOADS)
CONTROLS = st.sampled_from([b"PING\r\n", b"PONG\r\n", b"+OK\r\n", b"-ERR 'Stale Connection'\r\n", b'INFO {"a":1}\r\n'])


@given(st.lists(st.one_of(MESSAGES, CONTROLS), max_size=12))
def test_a_buffer_of_complete_frames_is_parsed_into_exactly_those(parts: list[Message | bytes]) -> None:
    data = b"".join(part if isinstance(part, bytes) else frame(part) for part in parts)
    found = parse_frames(array(data))
    assert found.consumed == len(data)
    assert messages_of(found.frames) == [part for part in parts if not isinstance(part, bytes)]
    assert [line + b"\r\n" for line in found.controls] == [part for part in parts if isinstance(part, bytes)]


@given(st.lists(st.one_of(MESSAGES, CONTROLS), min_size=1, max_size=4))
def test_a_buffer_may_end_at_any_byte(parts: list[Message | bytes]) -> None:
    pieces = [part if isinstance(part, bytes) else frame(part) for part in parts]
    data = b"".join(pieces)
    boundaries = [sum(map(len, pieces[:count])) for count in range(len(pieces) + 1)]
    for end in range(len(data) + 1):
        found = parse_frames(array(data[:end]))
        assert found.consumed == max(at for at in boundaries if at <= end)
        rest = parse_frames(array(data[found.consumed :]))
        assert messages_of(found.frames) + messages_of(rest.frames) == [p for p in parts if not isinstance(p, bytes)]
        assert found.needed_bytes == 0 or found.consumed + found.needed_bytes in boundaries


@given(st.lists(MESSAGES, min_size=1, max_size=8), st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_a_receive_buffer_gives_every_frame_once_however_the_bytes_arrive(
    parts: list[Message], sizes: list[int]
) -> None:
    data = b"".join(map(frame, parts))
    buffer = ReceiveBuffer(size=64)
    got: list[Message] = []
    at, turn, needed_bytes = 0, 0, 0
    while at < len(data):
        piece = data[at : at + sizes[turn % len(sizes)]]
        at, turn = at + len(piece), turn + 1
        buffer.writable(needed_bytes)[: len(piece)] = piece
        buffer.mark_received(len(piece))
        found = parse_frames(buffer.filled())
        needed_bytes = found.needed_bytes
        got += messages_of(found.frames)
        buffer.drop(found.consumed)
    assert got == parts
    assert not len(buffer)


def test_a_payload_of_whole_frames_is_one_payload() -> None:
    inner = b"".join(
        frame((b"fake.%d" % n, 1, b"$JS.ACK.S.c.1.1.1.1.0", b"NATS/1.0\r\n\r\n", b"x" * n)) for n in range(50)
    )
    real: list[Message] = [
        (b"real", 2, b"", b"", inner),
        (b"real", 2, b"r", b"", inner + b"\r\n"),
        (b"z", 2, b"", b"", b""),
    ]
    assert messages_of(parse_frames(array(b"".join(map(frame, real)))).frames) == real


def test_an_incomplete_frame_reports_the_bytes_it_needs() -> None:
    data = frame((b"a", 1, b"", b"", bytes(8 << 20)))
    found = parse_frames(array(data[:1000]))
    assert found.consumed == 0
    assert found.needed_bytes == len(data)


@pytest.mark.parametrize(
    "garbage", [b"HTTP/1.1 400 Bad Request\r\n", b"MSG a 1 3\r\nxyz__MSG a 1 0\r\n\r\n", b"\r\n\r\n"]
)
def test_invalid_protocol_bytes_are_refused(garbage: bytes) -> None:
    with pytest.raises(MalformedFrames):
        parse_frames(array(garbage))


@given(st.integers(1, 18).flatmap(lambda width: st.lists(st.integers(0, 10**width - 1).map(lambda n: f"{n:0{width}}"))))
def test_numbers_of_equal_length_are_read_as_numbers(numbers: list[str]) -> None:
    width = len(numbers[0]) if numbers else 1
    found = parse_fixed_width(array("".join(numbers).encode()).reshape(len(numbers), width))
    assert found is not None
    assert found.tolist() == [int(number) for number in numbers]


@pytest.mark.parametrize("other", [b"1.3", b"-13", b"1:3", b" 13", b"13\n"])
def test_anything_but_digits_is_none(other: bytes) -> None:
    assert parse_fixed_width(array(b"123" + other).reshape(2, 3)) is None


_DELIVERIES = st.lists(
    st.tuples(
        st.sampled_from([b"a", b"orders.new", b"orders.old", "\u00fc.x".encode()]),
        st.integers(95, 105),
        st.integers(999_999_999_999, 1_000_000_000_003),
        st.sampled_from([b"", b"NATS/1.0\r\nA: b\r\n\r\n"]),
    ),
    min_size=1,
    max_size=6,
)


@given(_DELIVERIES, st.sampled_from([b"S.c", b"hub.ACC.S.c"]), st.sampled_from([b"", b".x1f"]))
def test_deliveries_of_any_layout_are_decoded(
    deliveries: list[tuple[bytes, int, int, bytes]], place: bytes, token: bytes
) -> None:
    """Numbers get one more digit within a buffer, subjects differ in length, some messages have headers."""
    token = token if b"hub" in place else b""
    frames = [
        (
            subject,
            7,
            b"$JS.ACK.%s.1.%d.%d.%d.%d%s" % (place, number, number + 1, time, 200 - number, token),
            block,
            b"x",
        )
        for subject, number, time, block in deliveries
    ]
    found = parse_frames(array(b"".join(map(frame, frames)))).frames
    delivery = from_consumer(found, parse_message_lines(found), SCHEMA)
    assert [
        (row["subject"].encode(), row["sequence"], int(row["timestamp"].timestamp() * 1e6), len(row["headers"]))
        for row in delivery.batch.to_pylist()
    ] == [(subject, number, time // 1000, bool(block)) for subject, number, time, block in deliveries]
    assert delivery.batch.column("data").to_pylist() == [b"x"] * len(deliveries)
    assert (delivery.first_count, delivery.last_count) == (deliveries[0][1] + 1, deliveries[-1][1] + 1)
    assert delivery.pending == 200 - deliveries[-1][1]

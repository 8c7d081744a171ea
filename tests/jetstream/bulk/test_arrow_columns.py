"""Headers survive a round trip: names and values keep their order."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from purveyor.jetstream.bulk.arrow_columns import (
    BATCH_HEADERS,
    HEADERS_TYPE,
    bytes_and_offsets,
    find_lines,
    to_lines,
    to_map,
    to_map_uniform,
)
from purveyor.model.errors import InvalidHeader

Headers = list[tuple[str, list[str]]]

NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters=":"), min_size=1, max_size=10)
VALUES = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0"), max_size=12)
MAPS = st.lists(
    st.tuples(st.one_of(st.sampled_from(["Nats-Msg-Id", "A", "a"]), NAMES), st.lists(VALUES, min_size=1, max_size=3)),
    max_size=4,
    unique_by=lambda pair: pair[0],
).filter(lambda headers: not any(name in BATCH_HEADERS for name, _ in headers))


def blocks(maps: pa.Array) -> list[bytes]:
    written = to_lines(maps, first_index=0, has_other_id=np.zeros(len(maps), np.bool_))
    return [b"NATS/1.0\r\n" + lines + b"\r\n" if lines else b"" for lines in written.lines.to_pylist()]


def read_back(written: list[bytes]) -> list[Headers]:
    data, offsets = bytes_and_offsets(pa.array([*written, b"x"], pa.binary()))
    maps: list[Headers] = to_map(find_lines(data, offsets[:-2], offsets[1:-1])).to_pylist()
    alike = to_map_uniform(data, offsets[:-2], offsets[1:-1])
    assert alike is None or alike.to_pylist() == maps, "the short way finds the same"
    return maps


def is_read_as_table(written: list[bytes]) -> bool:
    read_back(written)
    data, offsets = bytes_and_offsets(pa.array([*written, b"x"], pa.binary()))
    return to_map_uniform(data, offsets[:-2], offsets[1:-1]) is not None


@given(st.lists(MAPS, max_size=8), st.integers(0, 3))
def test_headers_round_trip(maps: list[Headers], skipped: int) -> None:
    built = pa.array([[("skipped", ["x"])]] * skipped + maps, HEADERS_TYPE).slice(skipped)
    assert read_back(blocks(built)) == maps


@given(st.data(), st.lists(st.tuples(NAMES, st.integers(1, 5)), min_size=1, max_size=3, unique_by=lambda pair: pair[0]))
def test_messages_of_one_publisher_are_read_as_a_table(data: st.DataObject, shape: list[tuple[str, int]]) -> None:
    ascii_text = st.characters(min_codepoint=32, max_codepoint=126)
    row = st.tuples(*(st.text(ascii_text, min_size=width, max_size=width) for _, width in shape))
    rows = data.draw(st.lists(row, min_size=1, max_size=5))
    maps = [[(name, [value]) for (name, _), value in zip(shape, values, strict=True)] for values in rows]
    written = blocks(pa.array(maps, HEADERS_TYPE))
    assert read_back(written) == maps
    assert is_read_as_table(written)


@pytest.mark.parametrize(
    "other",
    [
        b"NATS/1.0\r\nB: 1234\r\n\r\n",
        b"NATS/1.0\r\nA: 12\r34\r\n\r\n"[:-1],
        b"NATS/1.0\r\nA:12345\r\n\r\n",
        b"NATS/1.0\r\nA: 1\rxx\r\n\r\n",
        b"NATS/1.0\r\nA: 1\r\nB\r\n\r\n"[:-1],
        b"",
    ],
)
def test_a_message_of_another_kind_is_not_read_as_part_of_the_table(other: bytes) -> None:
    assert is_read_as_table([b"NATS/1.0\r\nA: 1234\r\n\r\n"] * 2)
    assert not is_read_as_table([b"NATS/1.0\r\nA: 1234\r\n\r\n", other])


def test_a_repeated_name_is_one_list() -> None:
    block = b"NATS/1.0\r\nA: 1\r\nB: x\r\nA: 2\r\nA:\r\n\r\n"
    assert read_back([block, b"", block]) == [
        [("A", ["1", "2", ""]), ("B", ["x"])],
        [],
        [("A", ["1", "2", ""]), ("B", ["x"])],
    ]


def test_status_and_junk_lines_are_no_headers() -> None:
    assert read_back([b"NATS/1.0 100 Idle\r\n\r\n", b"NATS/1.0\r\njunk\r\n: none\r\nA:b:c\r\n\r\n", b"x", b"\r\n"]) == [
        [],
        [("A", ["b:c"])],
        [],
        [],
    ]


def test_invalid_utf8_becomes_replacement_characters() -> None:
    assert read_back([b"NATS/1.0\r\nA: \xff\r\n\r\n"]) == [[("A", ["�"])]]


def test_only_one_space_after_the_colon_belongs_to_the_protocol() -> None:
    maps: list[Headers] = [[("A", ["  padded  ", " "])]]
    assert read_back(blocks(pa.array(maps, HEADERS_TYPE))) == maps


def test_null_maps_are_no_headers() -> None:
    assert blocks(pa.array([None, [("A", ["1"])], []], HEADERS_TYPE)) == [b"", b"NATS/1.0\r\nA: 1\r\n\r\n", b""]


def test_another_id_and_batch_headers_of_an_earlier_publish_are_dropped() -> None:
    maps = pa.array(
        [[("Nats-Msg-Id", ["old"]), ("A", ["1"]), ("Nats-Batch-Id", ["b"])], [("Nats-Msg-Id", ["mine"])]], HEADERS_TYPE
    )
    written = to_lines(maps, first_index=0, has_other_id=np.array([True, False]))
    assert written.lines.to_pylist() == [b"A: 1\r\n", b"Nats-Msg-Id: mine\r\n"]
    assert written.has_id.tolist() == [True, True]


@pytest.mark.parametrize(
    "bad", [("A", ["x\r\ny"]), ("A", ["\0"]), ("a b", ["x"]), ("", ["x"]), ("é", ["x"]), ("A:", ["x"]), ("A", [None])]
)
def test_an_invalid_header_is_refused_by_index(bad: tuple[str, list[str]]) -> None:
    maps = pa.array([[("ok", ["1"])], [], [("ok", ["2"]), bad]], HEADERS_TYPE)
    with pytest.raises(InvalidHeader, match="message 102"):
        to_lines(maps, first_index=100, has_other_id=np.zeros(3, np.bool_))

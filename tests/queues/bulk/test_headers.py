"""Headers survive the way out and back: names in their order, values in theirs."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from purveyor.model.errors import InvalidHeader
from purveyor.queues.bulk.headers import BATCH_HEADERS, TYPE, find_lines, to_lines, to_map
from purveyor.queues.bulk.slices import contents

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
    data, offsets = contents(pa.array([*written, b"x"], pa.binary()))
    maps: list[Headers] = to_map(find_lines(data, offsets[:-2], offsets[1:-1])).to_pylist()
    return maps


@settings(deadline=None)
@given(st.lists(MAPS, max_size=8), st.integers(0, 3))
def test_headers_round_trip(maps: list[Headers], skipped: int) -> None:
    built = pa.array([[("skipped", ["x"])]] * skipped + maps, TYPE).slice(skipped)
    assert read_back(blocks(built)) == maps


def test_a_name_that_comes_again_is_one_list() -> None:
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


def test_what_is_not_utf8_is_shown_with_replacements() -> None:
    assert read_back([b"NATS/1.0\r\nA: \xff\r\n\r\n"]) == [[("A", ["�"])]]


def test_only_one_space_after_the_colon_belongs_to_the_protocol() -> None:
    maps: list[Headers] = [[("A", ["  padded  ", " "])]]
    assert read_back(blocks(pa.array(maps, TYPE))) == maps


def test_null_maps_are_no_headers() -> None:
    assert blocks(pa.array([None, [("A", ["1"])], []], TYPE)) == [b"", b"NATS/1.0\r\nA: 1\r\n\r\n", b""]


def test_another_id_and_batch_headers_of_an_earlier_publishing_are_left_out() -> None:
    maps = pa.array(
        [[("Nats-Msg-Id", ["old"]), ("A", ["1"]), ("Nats-Batch-Id", ["b"])], [("Nats-Msg-Id", ["mine"])]], TYPE
    )
    written = to_lines(maps, first_index=0, has_other_id=np.array([True, False]))
    assert written.lines.to_pylist() == [b"A: 1\r\n", b"Nats-Msg-Id: mine\r\n"]
    assert written.has_id.tolist() == [True, True]


@pytest.mark.parametrize(
    "bad", [("A", ["x\r\ny"]), ("A", ["\0"]), ("a b", ["x"]), ("", ["x"]), ("é", ["x"]), ("A:", ["x"]), ("A", [None])]
)
def test_what_no_header_can_carry_is_refused_by_index(bad: tuple[str, list[str]]) -> None:
    maps = pa.array([[("ok", ["1"])], [], [("ok", ["2"]), bad]], TYPE)
    with pytest.raises(InvalidHeader, match="message 102"):
        to_lines(maps, first_index=100, has_other_id=np.zeros(3, np.bool_))

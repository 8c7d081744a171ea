"""Each reply is parsed and matched to its message."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purveyor.jetstream.api import ErrorReply, Receipt
from purveyor.jetstream.bulk.net.frame_parser import parse_frames
from purveyor.jetstream.bulk.replies import parse_replies, parse_reply
from tests.support.bulk_messages import array, frame

INBOX = b"_INBOX.abc"


def answers(*given: tuple[int, bytes, bytes], sid: int = 5) -> Any:
    data = b"".join(frame((INBOX + b".%d" % index, sid, b"", headers, payload)) for index, headers, payload in given)
    frames = parse_frames(array(data)).frames
    return parse_replies(frames, sid=5, prefix_size=len(INBOX) + 1, to_indices=lambda numbers: numbers)


STREAMS = st.sampled_from(["S", "stream:incoming", 'we"ird', "ü", "back\\slash", "seq"])


@given(st.lists(st.tuples(st.integers(0, 10**9), STREAMS, st.integers(1, 2**40), st.booleans()), max_size=30))
def test_acks_of_many_streams(given_acks: list[tuple[int, str, int, bool]]) -> None:
    frames = []
    for index, stream, sequence, duplicate in given_acks:
        body = {"stream": stream, "seq": sequence} | ({"duplicate": True} if duplicate else {})
        frames.append((index, b"", json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()))
    found = answers(*frames)
    assert found.refusals == {}
    pairs = sorted((ack.stream, index) for ack in found.acks for index in ack.indices.tolist())
    assert pairs == sorted((stream, index) for index, stream, _, _ in given_acks)
    for stream in {stream for _, stream, _, _ in given_acks}:
        highest = max(ack.last_sequence for ack in found.acks if ack.stream == stream)
        assert highest == max(sequence for _, name, sequence, _ in given_acks if name == stream)
    assert sum(ack.duplicates for ack in found.acks) == sum(duplicate for *_, duplicate in given_acks)


def test_errors_and_statuses_are_refusals_of_their_message() -> None:
    found = answers(
        (3, b"", b'{"stream":"S","seq":9}'),
        (
            4,
            b"",
            b'{"error":{"code":503,"err_code":10077,"description":"maximum messages exceeded"},"stream":"S","seq":0}',
        ),
        (5, b"NATS/1.0 503\r\n\r\n", b""),
        (6, b"", b'{"stream":"S","seq":10,"domain":"hub"}'),
    )
    assert [ack.indices.tolist() for ack in found.acks] == [[3], [6]]
    assert found.refusals == {
        4: ErrorReply(503, 10077, "maximum messages exceeded"),
        5: ErrorReply(503, 0, "no responders"),
    }
    assert found.refusals[5].has_no_responders
    assert not found.refusals[4].has_no_responders


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"ok",
        b"[]",
        b"null",
        b'{"stream":"S"}',
        b'{"seq":1}',
        b'{"stream":"S","seq":}',
        b'{"stream":"S","sex":7}',
        b'{"stream":"S","seq":"x"}',
        b'"stream":"x","seq":1',
        b'{"stream":"a","seq":5]',
        b'{"stream":"S","seq":1x}',
    ],
)
def test_a_reply_that_is_not_an_ack_is_a_refusal(payload: bytes) -> None:
    found = answers((1, b"", payload), (2, b"", b'{"stream":"S","seq":2}'))
    assert list(found.refusals) == [1]
    assert [ack.indices.tolist() for ack in found.acks] == [[2]]


def test_frames_of_other_subscriptions_are_not_replies() -> None:
    assert answers((1, b"", b'{"stream":"S","seq":9}'), sid=4).acks == ()


def test_a_reply_with_spaces_is_parsed() -> None:
    assert parse_reply(b"", b'{"stream": "S", "seq": 3, "duplicate": true}') == Receipt("S", 3, duplicate=True)

"""The headers of a flow: they carry trace, state, stack, key and id, and what they cannot carry is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purveyor.jetstream import headers as header_codec
from purveyor.model.errors import InvalidInput, InvalidName, PublishRefused
from purveyor.queues.catalogue import check_endpoint, endpoint_of, endpoint_queue
from purveyor.stages.flow import (
    FLOW,
    Flow,
    Frame,
    check_sendable,
    flow_message,
    message_identity,
    read_key,
)
from purveyor.stages.handler_types import derived_id


def test_a_header_carries_a_flow_and_a_reply_goes_to_the_last_requester() -> None:
    flow = Flow("trace\n1", {"a": "ü"}, (Frame("stage.a.1", {"s": 1}, "k"),), interactive=True)
    header = flow.to_header()
    assert header.isascii()
    assert "\n" not in header
    assert Flow.from_headers({FLOW: (header,)}, "id") == flow
    asked = flow.for_request(Frame("stage.b.1", None, None), interactive=None)
    answered = asked.for_reply()
    assert answered is not None
    frame, outgoing = answered
    assert (frame.subject, outgoing.stack) == ("stage.b.1", flow.stack)
    assert Flow("t").for_reply() is None
    with pytest.raises(InvalidInput, match="Purveyor-Flow"):
        Flow.from_headers({FLOW: ("[]",)}, "id")
    assert derived_id("s", "m", 0) == derived_id("s", "m", 0) != derived_id("s", "m", 1)


def test_endpoint_names_and_their_queues_are_one_to_one() -> None:
    for name in ("orders.place", "a-b.c", "x"):
        queue = endpoint_queue(check_endpoint(name), 2)
        assert endpoint_of(queue.stream, queue.subjects) == name
    for wrong in ("", "a_b", "a..b", ".a", "a b", "a.*", "a>", "replies", "x" * 121):
        with pytest.raises(InvalidName):
            check_endpoint(wrong)
    assert endpoint_of("stream:stage-replies", ("stage-replies.>",)) is None


@given(st.text(st.characters(codec=None)), st.integers(0, 70_000))
def test_headers_carry_every_accepted_key(key: str, size: int) -> None:
    outgoing = flow_message("id-1", "stage.a.0", b"{}", Flow("t", state=["s" * size]), key)
    try:
        check_sendable(outgoing, 1 << 20)
    except InvalidInput:
        assert "\0" in key or any("\ud800" <= letter <= "\udfff" for letter in key)
    except PublishRefused:
        assert size > 60_000
    else:
        block = header_codec.encode(header_codec.normalise({**outgoing.headers, header_codec.MSG_ID: outgoing.id}))
        assert len(block) <= header_codec.MAX_HEADER_BLOCK_BYTES
        assert read_key(header_codec.decode(block).headers) == key


@given(st.binary(min_size=1, max_size=40))
def test_any_message_id_gives_a_storable_distinct_identity(given_id: bytes) -> None:
    def known_as(raw: bytes) -> str:
        return message_identity({header_codec.MSG_ID: (raw.decode("utf-8", "surrogateescape"),)}, "s", 1, "t")

    stored = known_as(given_id)
    assert "\0" not in stored
    assert stored.encode()
    assert known_as(given_id) == stored
    assert known_as(given_id + b"\xff") != stored

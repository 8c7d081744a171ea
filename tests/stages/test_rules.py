"""The pure rules: types and JSON, the scheduler, delays, how many messages share a transaction."""

import enum
import uuid
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

import purveyor.stages
from purveyor.jetstream import headers as header_codec
from purveyor.model.errors import InvalidConfig, InvalidInput, InvalidName, PublishRefused
from purveyor.queues.catalogue import check_endpoint, endpoint_of, endpoint_queue
from purveyor.stages import Retry
from purveyor.stages.flow import FLOW, Flow, Frame, check_sendable, derived_id, flow_message, message_identity, read_key
from purveyor.stages.key_scheduler import KeyScheduler
from purveyor.stages.message_codec import dump, load
from purveyor.stages.processor import GroupSize
from purveyor.stages.source import Incoming
from purveyor.stages.stage_options import Timing


class Colour(enum.Enum):
    RED = "red"


class Model(BaseModel):
    name: str
    at: datetime


@dataclass(frozen=True)
class Everything:
    number: int
    ratio: float
    colour: Colour
    when: datetime
    day: date
    length: timedelta
    id: uuid.UUID
    price: Decimal
    raw: bytes
    model: Model
    pair: tuple[int, str]
    many: tuple[int, ...] = ()
    names: list[str] = field(default_factory=list)
    by_name: dict[str, "Everything | None"] = field(default_factory=dict)
    maybe: int | None = None
    word: Literal["a", "b"] = "a"
    flags: set[int] = field(default_factory=set)
    anything: Any = None


def everything(**more: Any) -> Everything:
    moment = datetime(2026, 11, 16, 3, 0, tzinfo=UTC)
    plain: dict[str, Any] = {"number": 1, "ratio": 0.5, "colour": Colour.RED, "when": moment, "day": moment.date()}
    others: dict[str, Any] = {
        "length": timedelta(seconds=1.5),
        "id": uuid.UUID(int=7),
        "price": Decimal("1.10"),
        "raw": b"\xff",
    } | more
    return Everything(**plain, **others, model=Model(name="m", at=moment), pair=(1, "x"))


def test_what_a_type_can_hold_travels_and_comes_back() -> None:
    inner = everything()
    value = everything(many=(1, 2), names=["a\n"], by_name={"x": inner, "y": None}, maybe=3, word="b", flags={1, 2})
    assert load(Everything, dump(value)) == value


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        (int, b"true", "not of type int"),
        (Colour, b'"green"', "one of"),
        (list[int], b'["a"]', r"message\[0\]"),
        (dict[str, int], b'{"a": "b"}', r"message\.a"),
        (Model, b'{"name": 1}', "a Model"),
        (tuple[int, str], b"[1]", "a list of 2"),
    ],
)
def test_what_is_not_of_the_type_is_told_with_its_place(kind: Any, text: bytes, told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        load(kind, text)


def test_a_flow_travels_in_a_header_and_a_reply_goes_to_the_one_who_asked_last() -> None:
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


def test_delays_grow_and_end() -> None:
    retry = Retry.in_order()
    delays = [retry.after(failures) for failures in range(1, 8)]
    assert [delay.total_seconds() for delay in delays if delay] == [0.5, 1, 2, 4, 8, 16]
    assert delays[-1] is None
    assert not retry.is_exhausted(37)
    assert retry.is_exhausted(38)
    with pytest.raises(InvalidConfig):
        Retry.parallel(attempts=0)
    with pytest.raises(InvalidConfig, match="inbox"):
        Timing(inbox_kept=timedelta(days=1))


def test_quick_handlers_share_more_and_more_and_slow_ones_nothing() -> None:
    group_size = GroupSize()
    for _ in range(10):
        group_size.record(0.001 * group_size.limit, group_size.limit, truncated=False)
    assert group_size.limit == 128
    group_size.record(0.5, 3, truncated=True)
    assert group_size.limit == 3
    group_size.reset()
    assert group_size.limit == 1


def test_endpoint_names_and_their_queues_are_one_to_one() -> None:
    for name in ("orders.place", "a-b.c", "x"):
        queue = endpoint_queue(check_endpoint(name), 2)
        assert endpoint_of(queue.stream, queue.subjects) == name
    for wrong in ("", "a_b", "a..b", ".a", "a b", "a.*", "a>", "replies", "x" * 121):
        with pytest.raises(InvalidName):
            check_endpoint(wrong)
    assert endpoint_of("stream:stage-replies", ("stage-replies.>",)) is None


def incoming(number: int, key: str | None, *, interactive: bool = False) -> Incoming:
    return Incoming(
        id=str(number),
        subject="s",
        data=b"",
        headers={},
        sequence=number,
        deliveries=1,
        stored=datetime(2026, 1, 1, tzinfo=UTC),
        key=key,
        interactive=interactive,
    )


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4), st.booleans()), max_size=60), st.data())
def test_the_scheduler_never_lets_a_key_overtake_itself_and_lose_nothing(steps: list[Any], data: st.DataObject) -> None:
    scheduler = KeyScheduler(ordered=True)
    at_work: list[list[Incoming]] = []
    done: dict[str, list[int]] = {key: [] for key in "abc"}
    added: dict[str, list[int]] = {key: [] for key in "abc"}

    def finish(group: list[Incoming], *, fails: bool) -> None:
        if fails:
            scheduler.put_back(group)
        else:
            for message in group:
                done[message.key or ""].append(message.sequence)
        scheduler.release(message.key for message in group)

    for number, (key, limit, fails) in enumerate(steps):
        scheduler.add([incoming(number, key, interactive=number % 5 == 0)])
        added[key].append(number)
        if taken := scheduler.take(limit):
            busy = {message.key for group in at_work for message in group}
            assert not busy & {message.key for message in taken}
            at_work.append(taken)
        ends: bool = data.draw(st.booleans())
        if at_work and ends:
            finish(at_work.pop(0), fails=fails)
    for group in at_work:
        finish(group, fails=False)
    while taken := scheduler.take(3):
        finish(taken, fails=False)
    assert done == added


def test_in_parallel_interactive_messages_come_first() -> None:
    scheduler = KeyScheduler(ordered=False)
    scheduler.add([incoming(1, None), incoming(2, None), incoming(3, None, interactive=True)])
    assert [message.sequence for message in scheduler.take(2)] == [3, 1]
    scheduler.put_back([incoming(1, None)])
    assert [message.sequence for message in scheduler.drain()] == [1, 2]
    assert not scheduler.has_ready


def test_the_public_names() -> None:
    wanted = {"Stages", "SqlStore", "Retry", "Context", "Request", "Reply", "Next", "Goto", "Refuse"}
    assert wanted <= set(purveyor.stages.__all__)
    assert all(hasattr(purveyor.stages, name) for name in purveyor.stages.__all__)


@given(st.text(st.characters(codec=None)), st.integers(0, 70_000))
def test_what_is_accepted_travels_in_headers_and_the_rest_is_refused(key: str, size: int) -> None:
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
def test_any_id_of_a_message_can_be_stored_and_tells_it_from_others(given_id: bytes) -> None:
    def known_as(raw: bytes) -> str:
        return message_identity({header_codec.MSG_ID: (raw.decode("utf-8", "surrogateescape"),)}, "s", 1, "t")

    stored = known_as(given_id)
    assert "\0" not in stored
    assert stored.encode()
    assert known_as(given_id) == stored
    assert known_as(given_id + b"\xff") != stored

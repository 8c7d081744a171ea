"""A message that could not be processed is parked complete, once, with the reason and its origin."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from purveyor.jetstream import ServerOptions
from purveyor.jetstream.headers import POSITION
from purveyor.model.errors import InvalidInput
from purveyor.queues import connect
from purveyor.queues.catalogue import DEAD_LETTERS
from purveyor.queues.client import Queues
from purveyor.queues.dead_letters.letter import CUT_FROM_BYTES, DeadLetter, park
from tests.support.nats_servers import OwnServer

THEN = datetime(2026, 11, 15, 12, 0, 0, 123456, UTC)


def letter(**changes: object) -> DeadLetter:
    whole = DeadLetter(
        reason="no rule matches",
        origin="pipeline: transform",
        subject="ldif.people",
        data=b"\0\xff\r\nbody",
        headers={"Nats-Msg-Id": ("m-1",), "Tag": ("a", "ß")},
        position=17,
        attempts=3,
        failed_first=THEN,
        failed_last=THEN + timedelta(hours=1),
        details={"line": 7, "dn": "cn=ä\nb", "again": True},
    )
    return replace(whole, **changes)  # type: ignore[arg-type]


async def test_it_comes_back_as_it_was_parked(queues: Queues) -> None:
    await queues.ensure(DEAD_LETTERS)
    receipt = await park(queues, letter())
    stored = await queues.streams.get(DEAD_LETTERS.stream, receipt.sequence)
    assert stored.subject == "dead-letters.pipeline-transform"
    assert stored.data == letter().data
    assert DeadLetter.from_message(stored.headers, stored.data) == letter()


def test_a_letter_that_is_parked_out_of_order_has_its_position_in_another_header() -> None:
    late = letter(out_of_order=True)
    _, data, headers = late.to_message()
    assert POSITION not in headers
    assert DeadLetter.from_message(headers, data) == late
    assert late.id == letter().id, "however it is parked, it is the same"


async def test_it_is_parked_once_however_often_it_is_given_up(queues: Queues, unique: str) -> None:
    await queues.ensure(DEAD_LETTERS)
    first = await park(queues, letter(origin=unique))
    again = await park(queues, letter(origin=unique, reason="still none", attempts=9, failed_last=THEN))
    assert (again.duplicate, again.sequence) == (True, first.sequence)
    others = [
        letter(origin=f"{unique}-2"),
        letter(origin=unique, position=18),
        letter(origin=unique, data=b"other"),
        letter(origin=unique, headers={"Nats-Msg-Id": ("m-2",)}),
    ]
    assert not any([(await park(queues, other)).duplicate for other in others])


async def test_words_that_no_header_can_carry_do_not_stop_it(queues: Queues, unique: str) -> None:
    await queues.ensure(DEAD_LETTERS)
    odd = letter(
        origin=f"{unique}\n…",
        reason="two\r\nlines\0 and \udcff\ud800",
        subject="x\ny",
        headers={"Odd": ("\udce4 \n",)},
        details={},
    )
    receipt = await park(queues, odd)
    stored = await queues.streams.get(DEAD_LETTERS.stream, receipt.sequence)
    found = DeadLetter.from_message(stored.headers, stored.data)
    assert found.reason == "two lines  and ��"
    assert (found.subject, found.headers, found.details) == ("x y", {"Odd": ("�",)}, {})


async def test_a_body_that_does_not_fit_any_more_is_cut(own_server: OwnServer) -> None:
    server = own_server(ServerOptions(sync="2m", max_payload=4096))
    async with connect(server.address) as queues:
        await queues.ensure(DEAD_LETTERS)
        receipt = await park(queues, letter(data=bytes(4000)))
        stored = await queues.streams.get(DEAD_LETTERS.stream, receipt.sequence)
        assert 2000 < len(stored.data) < 4000
        assert DeadLetter.from_message(stored.headers, stored.data).details[CUT_FROM_BYTES] == 4000


def test_other_messages_are_not_dead_letters() -> None:
    for headers in ({}, {"Purveyor-First-Error": ("yesterday",)}):
        with pytest.raises(InvalidInput, match="not a dead letter"):
            DeadLetter.from_message(headers, b"")


@pytest.mark.parametrize(
    "headers",
    [
        {"Größe": ("x",), "a b": ("c",), "": ("d",), "\udcff:": ("e",)},
        {"Half": ("\ud800 and \udfff",)},
        {f"h{number}": ("v",) for number in range(30_000)},
        {"Large": ("x" * 800_000,), "Larger": ("y" * 900_000,), "Nats-Msg-Id": ("m-1",)},
    ],
    ids=["names", "half surrogates", "many", "large"],
)
async def test_a_message_with_any_headers_can_be_parked(
    own_server: OwnServer, headers: dict[str, tuple[str, ...]]
) -> None:
    async with connect(own_server(ServerOptions(max_payload=1 << 20, sync="2m")).address) as queues:
        await queues.ensure(DEAD_LETTERS)
        receipt = await park(queues, letter(headers=headers, reason="half \ud800", data=b"body"))
        stored = await queues.streams.get(DEAD_LETTERS.stream, receipt.sequence)
        found = DeadLetter.from_message(stored.headers, stored.data)
        assert found.data == b"body"
        left = found.details.get("headers_left_out", 0)
        assert isinstance(left, int)
        assert len(found.headers) + left == len(headers)
        if "Nats-Msg-Id" in headers:
            assert found.headers["Nats-Msg-Id"] == ("m-1",)

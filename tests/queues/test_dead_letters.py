"""A message that nobody could process is parked whole, once, with all that is known about it."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from purveyor.model.errors import InvalidInput
from purveyor.queues import ServerOptions, connect
from purveyor.queues.catalogue import DEAD_LETTERS
from purveyor.queues.client import Queues
from purveyor.queues.dead_letters import CUT, DeadLetter, park
from tests.conftest import OwnServer

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
        reason="two\r\nlines\0 and \udcff",
        subject="x\ny",
        headers={"Odd": ("\udce4 \n",)},
        details={},
    )
    receipt = await park(queues, odd)
    stored = await queues.streams.get(DEAD_LETTERS.stream, receipt.sequence)
    found = DeadLetter.from_message(stored.headers, stored.data)
    assert found.reason == "two lines  and �"
    assert (found.subject, found.headers, found.details) == ("x y", {"Odd": ("�",)}, {})


async def test_a_body_that_does_not_fit_any_more_is_cut(own_server: OwnServer) -> None:
    server = own_server(ServerOptions(sync="2m", max_payload=4096))
    async with connect(server.address) as queues:
        await queues.ensure(DEAD_LETTERS)
        receipt = await park(queues, letter(data=bytes(4000)))
        stored = await queues.streams.get(DEAD_LETTERS.stream, receipt.sequence)
        assert 2000 < len(stored.data) < 4000
        assert DeadLetter.from_message(stored.headers, stored.data).details[CUT] == 4000


def test_what_is_no_dead_letter_is_said_to_be_none() -> None:
    for headers in ({}, {"Purveyor-First-Error": ("yesterday",)}):
        with pytest.raises(InvalidInput, match="not a dead letter"):
            DeadLetter.from_message(headers, b"")

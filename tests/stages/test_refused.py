"""A message that cannot be sent becomes a dead letter with its reason, and blocks nothing behind it."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from purveyor.model.errors import InvalidHeader, InvalidInput, PublishRefused
from purveyor.queues.catalogue import DEAD_LETTERS, endpoint_queue
from purveyor.queues.client import Queues
from purveyor.queues.dead_letters.letter import CUT_FROM_BYTES, HEADERS_LEFT_OUT, DeadLetter
from purveyor.stages import Context, Refuse, Request, Retry, Stages
from purveyor.stages.flow import FLOW, KEY, Outgoing
from tests.support.stages import QUICK_RETRY, Order, effects, is_empty, letters, rows, sink, stored
from tests.support.waiting import until

ODD_KEYS = ["cn=a\r\ncn=b", " padded ", "trailing\t", "", "ü\x0b", '"quoted"', "plain"]
"""Keys that a header does not carry unchanged, and some that it does."""


@dataclass
class Bulky:
    text: str = ""


async def parked(queues: Queues, about: str) -> list[DeadLetter]:
    """Return the dead letters of outboxes for subjects that contain a text."""
    subject = "dead-letters.outbox"
    found: list[DeadLetter] = []
    sequence = 1
    for _ in range((await queues.streams.subjects(DEAD_LETTERS.stream, subject)).get(subject, 0)):
        message = await queues.streams.get_next(DEAD_LETTERS.stream, sequence, subject)
        found.append(DeadLetter.from_message(message.headers, message.data))
        sequence = message.sequence + 1
    return [letter for letter in found if about in letter.subject]


async def nothing_unsent(database: str) -> bool:
    return await rows(database, "SELECT 1 FROM purveyor_outbox WHERE sent_ms IS NULL LIMIT 1") == []


async def numbers(queues: Queues, name: str) -> list[int]:
    messages = await stored(queues, endpoint_queue(name, 1).stream, f"stage.{name}.0")
    return [json.loads(message["data"])["number"] for message in messages]


async def test_rows_of_an_older_version_that_cannot_be_sent_hold_up_nothing(
    stages: Stages, queues: Queues, database: str, unique: str
) -> None:
    await sink(queues, stages, unique)
    subject = f"stage.{unique}-sink.0"
    limit = queues.connection.max_payload

    def row(number: int, **more: Any) -> Outgoing:
        plain: dict[str, Any] = {"headers": {FLOW: '{"trace":"t"}'}, "key": "k", "subject": subject}
        return Outgoing(f"{unique}-{number}", data=b'{"number": %d}' % number, **plain | more)

    bad = {
        1: row(1, headers={KEY: "a\nb"}, key="a\nb"),
        3: row(3, headers={"no name": "x"}),
        5: row(5, headers={"X": "half \ud800"}),
        7: row(7, subject=f"stage.{unique}-sink. 0"),
        9: row(9, headers={"X": None}),
        11: row(11, headers={"X": "é" * 33_000}),
    }
    messages = [bad.get(number, row(number)) for number in range(13)]
    large = Outgoing(f"{unique}-13", subject, b"x" * (limit + 1), {}, "large")
    bad_id = Outgoing(f"{unique}\n14", subject, b'{"number": 14}', {})
    await stages.store.open()
    async with stages.store.transaction() as transaction:
        await transaction.put([*messages, large, bad_id, row(15)])
        await transaction.connection.exec_driver_sql(
            f"UPDATE purveyor_outbox SET headers = '[no JSON' WHERE message_id = '{unique}-4'"
        )
    async with stages:
        await until(lambda: nothing_unsent(database))
    assert await numbers(queues, f"{unique}-sink") == [0, 2, 6, 8, 10, 12, 15]
    found = await parked(queues, unique)
    reasons = {str(letter.details["message_id"]): letter for letter in found}
    assert set(reasons) == {f"{unique}-{number}" for number in (*bad, 4, 13)} | {f"{unique}\n14"}
    assert reasons[f"{unique}-1"].details["key"] == "a\nb"
    assert "line break" in reasons[f"{unique}-1"].reason
    assert "no name" in reasons[f"{unique}-3"].reason
    assert "white space" in reasons[f"{unique}-7"].reason
    assert "bytes" in reasons[f"{unique}-11"].reason
    assert reasons[f"{unique}-13"].details[CUT_FROM_BYTES] == limit + 1
    assert all(letter.data.startswith(b'{"number"') for id_, letter in reasons.items() if not id_.endswith("-13"))


async def test_a_row_too_large_for_its_stream_becomes_a_dead_letter_and_blocks_nothing(
    stages: Stages, queues: Queues, database: str, unique: str
) -> None:
    to = await sink(queues, stages, unique)
    await queues.streams.update(endpoint_queue(f"{unique}-sink", 1).stream, {"max_msg_size": 2000})
    async with stages:
        async with stages.store.engine.begin() as connection:
            for number in range(40):
                note = "x" * 3000 if number % 4 == 1 else ""
                await stages.send(to, Order(number, note), db=connection, key=f"k{number % 2}")
        await until(lambda: nothing_unsent(database))
    assert await numbers(queues, f"{unique}-sink") == [number for number in range(40) if number % 4 != 1]
    found = await parked(queues, unique)
    assert [json.loads(letter.data)["number"] for letter in found] == list(range(1, 40, 4))
    assert {letter.details["key"] for letter in found} == {"k1"}


async def test_a_held_subject_continues_after_its_oldest_row_is_refused_permanently(
    stages: Stages, queues: Queues, database: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("purveyor.stages.relay._PROBE_INTERVAL_SECONDS", 0.1)
    to = stages.remote(f"{unique}-sink", request=Order, reply=type(None))
    queue = endpoint_queue(f"{unique}-sink", 1)
    async with stages:
        async with stages.store.engine.begin() as connection:
            for number in range(4):
                await stages.send(to, Order(number, "" if number else "x" * 3000), db=connection)
        await until(lambda: _held(database, 4))
        # The relay may send at once when the stream is there: the limit has to be there with it.
        await queues.streams.add(dataclasses.replace(queue.config(), max_msg_size=2000))
        await until(lambda: nothing_unsent(database))
    assert sorted(await numbers(queues, f"{unique}-sink")) == [1, 2, 3]


async def _held(database: str, count: int) -> bool:
    return await rows(database, "SELECT count(*) FROM purveyor_outbox WHERE held") == [(count,)]


@pytest.mark.parametrize("exactly_once", [False, True])
async def test_any_key_is_kept_with_its_message_and_keeps_order(
    stages: Stages, queues: Queues, database: str, unique: str, exactly_once: bool
) -> None:
    first = stages.terminator(f"{unique}.first", message=Order)
    second = stages.terminator(f"{unique}.second", message=Order)
    seen: list[tuple[str | None, int]] = []

    @first.last_stage(exactly_once=exactly_once, retry=Retry.in_order())
    async def pass_on(ctx: Context[None], order: Order) -> None:
        ctx.send(second, order)

    @second.last_stage(exactly_once=exactly_once, retry=Retry.in_order(), concurrency=4)
    async def end(ctx: Context[None], order: Order) -> None:
        seen.append((ctx.key, order.number))

    async with stages:
        for number in range(3):
            for key in ODD_KEYS:
                if number % 2:
                    await stages.send(first, Order(number), key=key)
                else:
                    async with stages.store.engine.begin() as connection:
                        await stages.send(first, Order(number), key=key, db=connection)
                        await stages.send(first, Order(number + 100), key=key, db=connection)
            await until(lambda: nothing_unsent(database))
        await until(lambda: len(seen) >= 5 * len(ODD_KEYS))
    for key in ODD_KEYS:
        assert [number for each, number in seen if each == key] == [0, 100, 1, 2, 102]


@pytest.mark.parametrize("exactly_once", [False, True])
async def test_an_unsendable_message_makes_a_dead_letter_of_the_incoming_one(
    stages: Stages, queues: Queues, database: str, unique: str, exactly_once: bool
) -> None:
    to = await sink(queues, stages, unique)
    endpoint = stages.terminator(unique, message=Order)
    keys = {1: "nul \0", 3: "half \ud800", 5: "é" * 32_700}

    @endpoint.last_stage(exactly_once=exactly_once, retry=QUICK_RETRY)
    async def handle(ctx: Context[None], order: Order, db: AsyncSession) -> None:
        await db.execute(text("INSERT INTO effects (number) VALUES (:n)"), {"n": order.number})
        ctx.send(to, order, key=keys.get(order.number))

    async with stages:
        for number in range(7):
            await stages.send(endpoint, Order(number))
        await until(lambda: is_empty(queues, unique))
        await until(lambda: nothing_unsent(database))
    assert await effects(database) == [0, 2, 4, 6]
    assert sorted(await numbers(queues, f"{unique}-sink")) == [0, 2, 4, 6]
    found = {json.loads(letter.data)["number"]: letter.reason for letter in await letters(queues, unique)}
    assert "NUL" in found[1]
    assert "surrogate" in found[3]
    assert "bytes" in found[5]


async def test_a_state_too_large_for_headers_makes_a_dead_letter_of_the_incoming_message(
    stages: Stages, queues: Queues, database: str, unique: str
) -> None:
    endpoint = stages.endpoint(unique, request=Order, reply=Order, state=Bulky)
    other = stages.endpoint(f"{unique}.other", request=Order, reply=Order)
    done: list[int] = []

    @endpoint.stage(exactly_once=True, retry=QUICK_RETRY)
    async def begin(ctx: Context[Bulky], order: Order) -> Request[Order]:
        ctx.state.text = "x" * (65_000 if order.number < 2 else 65_535)  # with the rest of the flow, too much or not
        return Request(other, order)

    @endpoint.last_stage(exactly_once=True)
    async def finish(ctx: Context[Bulky], order: Order) -> Order:
        done.append(order.number)
        return order

    @other.last_stage(exactly_once=True)
    async def answer(ctx: Context[None], order: Order) -> Order:
        return order

    async with stages:
        for number in (2, 1):
            await stages.send(endpoint, Order(number))
        await until(lambda: is_empty(queues, unique))
        await until(lambda: done == [1])
        await until(lambda: nothing_unsent(database))
    [letter] = await letters(queues, unique)
    assert "bytes" in letter.reason


async def test_send_and_ask_raise_for_an_unsendable_message(stages: Stages, queues: Queues, unique: str) -> None:
    to = await sink(queues, stages, unique)
    limit = queues.connection.max_payload
    async with stages, stages.store.engine.begin() as connection:
        for db in (None, connection):
            with pytest.raises(InvalidHeader, match="line break"):
                await stages.send(to, Order(1), id="a\nb", db=db)
            with pytest.raises(InvalidInput, match="key"):
                await stages.send(to, Order(1), key="a\0b", db=db)
            with pytest.raises(PublishRefused, match="bytes of headers"):
                await stages.send(to, Order(1), key="é" * 33_000, db=db)
            with pytest.raises(PublishRefused, match="bytes with its headers"):
                await stages.send(to, Order(1, "x" * (limit - 50)), db=db)
            with pytest.raises(InvalidInput, match="surrogate"):
                await stages.send(to, Order(1, "\ud800"), db=db)


async def test_a_flow_header_with_rubbish_in_it_is_a_dead_letter(
    stages: Stages, queues: Queues, database: str, unique: str
) -> None:
    endpoint = stages.endpoint(unique, request=Order, reply=Order)

    @endpoint.last_stage(exactly_once=True, retry=QUICK_RETRY)
    async def handle(ctx: Context[None], order: Order) -> Order:
        return order

    stacks: list[Any] = [[["", None, None]], [["a b", None, None]], [["a.*", None, None]], [["x" * 5000, None, None]]]
    stacks += [[[unique, None, 5]], [[unique, None, "nul \0"]]]
    async with stages:
        for number, stack in enumerate(stacks):
            flow = json.dumps({"trace": "t", "stack": stack})
            await queues.publish(f"stage.{unique}.0", b'{"number": %d}' % number, headers={FLOW: flow})
        await queues.publish(f"stage.{unique}.0", b'{"number": 100}')
        await until(lambda: is_empty(queues, unique))
        await until(lambda: nothing_unsent(database))
    assert {json.loads(letter.data)["number"] for letter in await letters(queues, unique)} == set(range(len(stacks)))


@pytest.mark.parametrize("exactly_once", [False, True])
async def test_a_message_with_headers_that_no_dead_letter_can_carry_becomes_one(
    stages: Stages, queues: Queues, database: str, unique: str, exactly_once: bool
) -> None:
    """Other clients publish headers that ours refuses: odd names, bytes that are no text, odd ids, and large ones."""
    endpoint = stages.terminator(unique, message=Order)
    handled: list[int] = []

    @endpoint.last_stage(exactly_once=exactly_once, retry=QUICK_RETRY)
    async def handle(ctx: Context[None], order: Order) -> None:
        if order.number < 100:
            raise Refuse("half \ud800 of it")
        if order.number < 200:
            raise ValueError("half \ud800 of it")
        handled.append(order.number)

    blocks = [
        b"odd name\xff: x",
        b"Nats-Msg-Id: \xfe\xff %d",
        b"Nats-Msg-Id: nul \0 in %d",
        b"Nats-Msg-Id: %d" + bytes(33 + number * 7 % 90 for number in range(5000)),
        b"Purveyor-Key: \xfe\r\nX: \xff",
        b"X-Large: " + b"h" * 65_400,
        b"X: x\r\n" * 10_000 + b"Y: y",
    ]
    async with stages:
        for first in (0, 100):
            for number, block in enumerate(blocks, first):
                whole = b"NATS/1.0\r\n" + block.replace(b"%d", b"%d" % number) + b"\r\n\r\n"
                await queues.connection.request(f"stage.{unique}.0", b'{"number": %d}' % number, headers=whole)
        await queues.publish(f"stage.{unique}.0", b'{"number": 200}')
        await until(lambda: is_empty(queues, unique))
        await until(lambda: nothing_unsent(database))
    assert handled == [200]
    found = {json.loads(letter.data)["number"]: letter for letter in await letters(queues, unique)}
    assert set(found) == {*range(len(blocks)), *range(100, 100 + len(blocks))}
    assert HEADERS_LEFT_OUT in found[5].details
    assert HEADERS_LEFT_OUT in found[105].details

"""Dead letters from the command line: list, show, redrive and discard, only after confirmation."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TypeVar

import pytest

from purveyor.delivery.pull import open_pull
from purveyor.jetstream.address import Address
from purveyor.jetstream.headers import POSITION
from purveyor.queues.catalogue import DEAD_LETTERS
from purveyor.queues.client import Queues, connect
from purveyor.queues.dead_letters.letter import DeadLetter, park
from tests.support.command_line import Cli

T = TypeVar("T")
THEN = datetime(2026, 11, 15, 12, 0, 0, 0, UTC)


def on_server(address: Address, work: Callable[[Queues], Awaitable[T]]) -> T:
    async def run() -> T:
        async with connect(address) as queues:
            return await work(queues)

    return asyncio.run(run())


@pytest.fixture
def name(unique: str) -> str:
    return unique


@pytest.fixture
def ids(cli: Cli, address: Address, name: str) -> list[str]:
    """Add a subscription that has rejected three messages; return their ids."""
    cli("subscription", "add", name, "--topic", "udm:users/user", "--retention", "7d").ok()

    async def work(queues: Queues) -> None:
        async with open_pull(queues) as pull:
            for number in range(3):
                body = json.dumps({"number": number}).encode()
                await queues.publish(f"{name}.main", body, headers={POSITION: str(100 + number)})
                message = await pull.next(name)
                assert message is not None
                await pull.reject(name, message.sequence, "quota" if number else "no such mailbox")

    on_server(address, work)
    listed = cli("dlq", "list", "--subscription", name, "--json").ok().json
    return [str(each["id"]) for each in listed]


def delivered(address: Address, name: str) -> list[int]:
    async def work(queues: Queues) -> list[int]:
        async with open_pull(queues) as pull:
            got = []
            while (message := await pull.next(name, pop=True)) is not None:
                got.append(message.position or 0)
            return got

    return on_server(address, work)


def test_dead_letters_are_listed_by_filters(cli: Cli, name: str, ids: list[str]) -> None:
    reported = cli("dlq", "list", "--subscription", name).ok().out
    header, *lines = reported.splitlines()
    assert header.split() == ["ID", "PARKED", "ORIGIN", "SUBJECT", "ATTEMPTS", "REASON"]
    assert [line.split()[0] for line in lines] == ids
    assert "no such mailbox" in lines[0]
    by_reason = cli("dlq", "list", "--subscription", name, "--reason", "QUOTA", "--json").ok().json
    assert [str(each["id"]) for each in by_reason] == ids[1:]
    paged = cli("dlq", "list", "--origin", f"subscription:{name}", "--limit", "1", "--after", ids[0])
    assert (paged.code, paged.err) == (0, f"there are more: continue with --after {ids[1]}\n")
    cli("dlq", "list", "--subscription", "nobody").refused("no subscription 'nobody'")


def test_a_dead_letter_is_shown_completely(cli: Cli, name: str, ids: list[str], address: Address) -> None:
    shown = cli("dlq", "show", ids[0], "--json").ok().json
    assert (shown["reason"], shown["attempts"], shown["data"]) == ("no such mailbox", 1, '{"number": 0}')
    assert (shown["subject"], shown["headers"][POSITION]) == (f"{name}.main", ["100"])
    assert shown["details"]["position"] == 100
    assert [each["excerpt"] for each in shown["attempts_log"]] == ["no such mailbox"]
    text = cli("dlq", "show", ids[0]).ok().out
    assert "rejected by instance 'default'" in text
    assert text.startswith(f"Dead letter {ids[0]}:")
    assert text.endswith('{"number": 0}\n')
    assert cli("dlq", "show", ids[0], "--raw").ok().out == '{"number": 0}'
    cli("dlq", "show", "999999999").refused("no dead letter 999999999")

    async def with_attempts(queues: Queues) -> int:
        log = [{"time": THEN.isoformat(), "status": 503, "error": None, "excerpt": "busy\x1b[2J"}]
        letter = DeadLetter(
            reason="no answer that counts",
            origin=name,
            subject=f"{name}.main",
            data=b"\xff\x00",
            failed_first=THEN,
            failed_last=THEN,
            details={"attempts_log": json.dumps(log)},
        )
        return (await park(queues, letter)).sequence

    number = str(on_server(address, with_attempts))
    text = cli("dlq", "show", number).ok().out
    assert "2026-11-15 12:00:00 UTC  503" in text
    assert "\x1b" not in text
    assert cli("dlq", "show", number, "--json").ok().json["attempts_log"][0]["status"] == 503
    cli("dlq", "discard", number, "--yes").ok()


def test_dead_letters_are_redriven_once_and_only_after_confirmation(
    cli: Cli, name: str, ids: list[str], address: Address
) -> None:
    cli("dlq", "retry").refused("no dead letters are chosen")
    cli("dlq", "retry", ids[0]).refused("no terminal to confirm on", "fix: add --yes")
    cli("dlq", "retry", "--all", ids[0], "--yes").refused("exclude each other")
    dry = cli("dlq", "retry", "--subscription", name, "--reason", "quota", "--dry-run").ok().out
    assert dry == f"Would be put back: 2 dead letters to {name}.retry\n"
    done = cli("dlq", "retry", "--subscription", name, "--reason", "quota", "--yes").ok().out
    assert done == f"Put back: 2 dead letters to {name}.retry\n"
    cli("dlq", "retry", ids[1], "--yes").refused(f"no dead letter {ids[1]}")
    waiting = cli("subscription", "show", name, "--json").ok().json["backlog_by_kind"]
    assert waiting == {"main": 0, "prefill": 0, "retry": 2}
    assert delivered(address, name) == [101, 102]
    partly = cli("dlq", "retry", ids[0], ids[1], "--yes", "--json")
    assert partly.code == 1
    assert (partly.json["done"], [each["id"] for each in partly.json["failed"]]) == (1, [int(ids[1])])


def test_dead_letters_are_discarded_for_good(cli: Cli, name: str, ids: list[str], address: Address) -> None:
    cli("dlq", "discard", *ids).refused("no terminal to confirm on")
    assert cli("dlq", "discard", ids[0], "--dry-run").ok().out == "Would be discarded: 1 dead letter\n"
    assert cli("dlq", "discard", *ids, "--yes").ok().out == "Discarded: 3 dead letters\n"
    assert cli("dlq", "list", "--subscription", name, "--json").ok().json == []
    assert delivered(address, name) == []


def test_a_foreign_message_is_shown_and_can_be_discarded(cli: Cli, unique: str, address: Address) -> None:
    async def work(queues: Queues) -> int:
        await queues.ensure(DEAD_LETTERS)
        return (await queues.publish(f"dead-letters.{unique}", b"rubbish")).sequence

    number = str(on_server(address, work))
    assert "not a dead letter" in cli("dlq", "list", "--origin", unique).ok().out
    assert "not a dead letter" in cli("dlq", "show", number).ok().out
    refused = cli("dlq", "retry", number, "--yes")
    assert (refused.code, refused.out) == (1, "Put back: 0 dead letters\n")
    assert f"message {number} cannot be redriven: not a dead letter" in refused.err
    assert cli("dlq", "discard", "--origin", unique, "--yes").ok().out == "Discarded: 1 dead letter\n"


def test_a_subscription_shows_its_retention_and_its_expired_messages(cli: Cli, name: str, address: Address) -> None:
    cli("subscription", "add", name, "--topic", "udm:users/user", "--retention", "90m").ok()

    async def work(queues: Queues) -> None:
        await queues.publish(f"{name}.main", b"{}", headers={POSITION: "7"})
        async with open_pull(queues, clock=lambda: datetime.now(UTC).timestamp() + 6000) as pull:
            assert await pull.expire(name) == 1

    on_server(address, work)
    shown = cli("subscription", "show", name, "--json").ok().json
    assert (shown["retention_seconds"], shown["expired"]["count"], shown["expired"]["position"]) == (5400, 1, 7)
    text = cli("subscription", "show", name).ok().out
    assert "Kept for: 1h30m" in text
    assert "Expired: 1 unacknowledged messages, the last on " in text
    cli("subscription", "add", f"{name}-2", "--topic", "a:b", "--retention", "10ms").refused("retention")

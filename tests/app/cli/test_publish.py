"""`purveyor publish` checks and stores events, and prints their positions."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from purveyor.jetstream.address import Address
from purveyor.jetstream.streams import StoredMessage
from purveyor.model.event import Event
from purveyor.model.message_headers import EVENT_ID
from purveyor.queues.client import connect
from tests.support.command_line import Cli

EVENT: dict[str, Any] = {"realm": "udm", "topic": "users/user", "body": {"new": {"uuid": "u-1"}}}


def stored(address: Address, position: int) -> StoredMessage:
    async def get() -> StoredMessage:
        async with connect(address) as queues:
            return await queues.streams.get("stream:incoming", position)

    return asyncio.run(get())


def test_an_event_from_options_is_stored_at_a_position(cli: Cli, address: Address, unique: str) -> None:
    reported = cli(
        "publish", "--realm", "shop", "--topic", "orders", "--key", "17", "--new", '{"total": 12.5}', "--old", "{}",
        "--attribute", "tenant=north", "--attribute", "note=a=b", "--id", unique, "--json",
    ).ok().json  # fmt: skip
    assert (reported["id"], reported["duplicate"]) == (unique, False)
    message = stored(address, reported["position"])
    event = Event.decode(message.data)
    assert (message.subject, message.headers[EVENT_ID]) == ("incoming", (unique,))
    assert (event.realm, event.topic, event.object_key, event.new) == ("shop", "orders", "17", {"total": 12.5})
    assert (event.attributes, event.publisher_name) == ({"tenant": "north", "note": "a=b"}, "purveyor")

    out = cli("publish", "--realm", "shop", "--topic", "orders", "--new", '{"id": 1}', "--id", unique).ok().out
    assert out == f"Published at position {reported['position']}, a duplicate: not stored again\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "nothing to publish"),
        (("--topic", "t", "--new", '{"a": 1}'), "'realm'"),
        (("--realm", "r", "--new", '{"a": 1}'), "'topic'"),
        (("--realm", "r", "--topic", "t"), "neither an old nor a new"),
        (("--realm", "r", "--topic", "t", "--new", "{"), "new object is not JSON"),
        (("--realm", "r", "--topic", "t", "--old", "[1]"), "old object is a list"),
        (("--realm", "r", "--topic", "t", "--new", '{"a": 1}', "--attribute", "x"), "invalid attribute"),
        (("--realm", "r", "--topic", "t", "--new", '{"a": 1}', "--id", "a\nb"), "id holds the control character"),
        (("events.jsonl", "--realm", "r"), "--realm and a file"),
        (("missing.jsonl",), "missing.jsonl cannot be read"),
    ],
)
def test_an_invalid_event_is_refused(cli: Cli, argv: tuple[str, ...], words: str) -> None:
    cli("publish", *argv).refused(words)


def test_lines_are_stored_in_order_and_an_invalid_line_is_reported(cli: Cli, address: Address, unique: str) -> None:
    lines = [
        json.dumps(EVENT | {"id": f"{unique}-1"}),
        "",
        "{broken",
        json.dumps(EVENT | {"topic": None}),
        json.dumps(EVENT | {"id": 7}),
        json.dumps(EVENT | {"body": {"new": {"text": "x" * (16 << 20)}}}),
        json.dumps(EVENT | {"id": f"{unique}-2", "publisher_name": "hr", "ts": "2026-11-15T12:00:00Z"}),
        json.dumps(EVENT | {"id": f"{unique}-1"}),
    ]
    Path("events.jsonl").write_text("\n".join(lines), encoding="utf-8")
    done = cli("publish", "events.jsonl", "--publisher", "me", "--json")
    assert done.code == 1
    assert [line.partition(":")[0] for line in done.err.splitlines()] == ["line 3", "line 4", "line 5", "line 6"]
    reported = done.json
    assert (reported["stored"], reported["duplicates"], reported["broken"]) == (2, 1, 4)
    first, second = (stored(address, reported["position"] - back) for back in (1, 0))
    assert "line 3: the line is not JSON: expecting property name" in done.err
    assert done.err.splitlines()[0].endswith("at character 2")
    assert (first.headers[EVENT_ID], second.headers[EVENT_ID]) == ((f"{unique}-1",), (f"{unique}-2",))
    assert Event.decode(first.data).publisher_name == "me"
    assert Event.decode(second.data).publisher_name == "hr"


def test_lines_are_read_from_standard_input(cli: Cli) -> None:
    done = cli("publish", "-", stdin=b"\n".join([json.dumps(EVENT).encode()] * 3)).ok()
    assert done.out.startswith("Published 3 events, 0 duplicates, 0 broken; last position ")
    assert cli("publish", "-", stdin=b"").ok().out == "Published 0 events, 0 duplicates, 0 broken\n"

"""`purveyor next` and `purveyor ack`: a consumer by hand."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from purveyor.app.cli import consume
from purveyor.app.cli.consume import explain_no_message
from purveyor.jetstream.address import Address
from purveyor.jetstream.headers import POSITION
from purveyor.model.errors import ServerUnavailable, UnknownMessage
from purveyor.model.json_fields import Json
from purveyor.queues.client import Queues, connect
from tests.support.command_line import Cli


def on_server(address: Address, work: Callable[[Queues], Awaitable[object]]) -> None:
    async def run() -> None:
        async with connect(address) as queues:
            await work(queues)

    asyncio.run(run())


def store(address: Address, name: str, *bodies: bytes, first: int = 2) -> None:
    """Write messages as the dispatcher does."""

    async def write(queues: Queues) -> None:
        for position, body in enumerate(bodies, first):
            await queues.publish(f"{name}.main", body, headers={POSITION: str(position)})

    on_server(address, write)


def event(number: int) -> bytes:
    new = {"uuid": f"u-{number}", "title": None, "name": "\x1b[31mred\x9b"}
    fields = {"realm": "udm", "topic": "users/user", "publisher_name": "p", "ts": "2026-01-01T00:00:00+00:00"}
    return json.dumps({**fields, "body": {"old": {}, "new": new}}).encode()


@pytest.fixture
def name(cli: Cli, unique: str) -> str:
    cli("subscription", "add", unique, "--topic", "udm:users/user").ok()
    return unique


def test_the_oldest_message_comes_again_until_it_is_acknowledged(cli: Cli, address: Address, name: str) -> None:
    store(address, name, *map(event, (1, 2, 3)))
    first = cli("next", name, "--json").ok().json
    assert (first["sequence_number"], first["position"], first["num_delivered"]) == (1, 2, 1)
    assert (first["realm"], first["topic"], first["body"]["new"]["uuid"]) == ("udm", "users/user", "u-1")
    assert first["body"]["new"]["title"] is None, "null is a value of the event"
    assert first["lease_until"]
    again = cli("next", name, "--json").ok().json
    assert (again["sequence_number"], again["num_delivered"]) == (1, 2)

    text = cli("next", name).ok().out
    assert text.startswith(f"--- message 1 of {name}, position 2, delivery 3\n")
    assert '"uuid": "u-1"' in text
    assert "\x1b" not in text
    assert "\x9b" not in text
    assert text.endswith(f"Not acknowledged. To acknowledge: purveyor ack {name} 1\n")
    assert cli("ack", name, "1").ok().out == f"Acknowledged 1 message of {name}\n"
    assert cli("next", name, "--json").ok().json["sequence_number"] == 2
    cli("ack", name, "1").refused("has no message 1")

    both = cli("next", name, "--count", "10", "--json").ok().objects
    assert [each["sequence_number"] for each in both] == [2, 3]
    assert cli("ack", name, "3", "--up-to", "--json").ok().json["acknowledged"] == 2
    none = cli("next", name, "--wait", "0").refused(f"no message for subscription '{name}' within 0")
    assert f"purveyor subscription show {name}" in none.err


def test_another_instance_waits_for_the_lease_and_may_acknowledge(cli: Cli, address: Address, name: str) -> None:
    store(address, name, event(1))
    cli("next", name).ok()
    cli("next", name, "--instance", "other", "--wait", "0").refused("no message")
    cli("ack", name, "1", "--up-to", "--instance", "other").refused("1")
    assert cli("ack", name, "1", "--instance", "other", "--json").ok().json == {
        "name": name, "sequences": [1], "acknowledged": 1
    }  # fmt: skip


def test_an_empty_answer_says_why_there_is_no_message(cli: Cli, address: Address, name: str) -> None:
    start = f"no message for subscription '{name}' within 0"
    cli("publish", "--realm", "udm", "--topic", "x", "--new", '{"id": "1"}').ok()  # and no pipeline dispatches it
    cli("next", name, "--wait", "0").refused(f"{start}: the pipeline has not dispatched all events yet", "purveyor up")
    store(address, name, event(1))
    cli("next", name, "--instance", "other").ok()
    leased = cli("next", name, "--wait", "0").refused(f"{start}: 1 message is leased by 'other' until 20", " UTC\n")
    assert f"`purveyor subscription show {name}`" in leased.err
    cli("subscription", "pause", name).ok()
    cli("next", name, "--wait", "0").refused(f"{start}: it is paused", f"`purveyor subscription resume {name}`")
    cli("next", name, "--wait", "0", "--ack").refused(f"{start}: it is paused")


ABOUT: dict[str, Any] = {"name": "ox", "paused": False, "leases": [], "suspended": None, "prefill": None, "lag": 0}


@pytest.mark.parametrize(
    ("state", "reason", "fix"),
    [
        ({}, None, "see `purveyor subscription show ox`, or wait longer with --wait"),
        ({"lag": None}, None, "wait longer"),
        ({"paused": True, "pause_reason": "410"}, "it is paused (410)", "`purveyor subscription resume ox`"),
        ({"prefill": {"status": "pending"}}, "its prefill is pending, and comes before its events", "wait longer"),
        ({"prefill": {"status": "running"}}, "its prefill is running, and comes before its events", "wait longer"),
        ({"prefill": {"status": "done"}}, None, "wait longer"),
        (
            {"next_attempt": "2026-01-02T03:04:05+00:00"},
            "its next message is delivered again at 2026-01-02 03:04:05 UTC",
            "wait longer",
        ),
        (
            {"suspended": {"position": 7, "reason": "maximum bytes exceeded"}, "lag": 9},
            "dispatch is suspended at position 7: maximum bytes exceeded",
            "`purveyor subscription resume ox`",
        ),
        (
            {"leases": [{"instance": i, "messages": 2, "until": "2026-01-02T03:04:05+00:00"} for i in "ab"]},
            "4 messages are leased by 'a', 'b' until 2026-01-02 03:04:05 UTC",
            "`purveyor subscription show ox`",
        ),
    ],
)
def test_the_reason_of_an_empty_answer_comes_from_the_status(
    state: dict[str, Any], reason: str | None, fix: str
) -> None:
    found = explain_no_message("ox", {**ABOUT, **state})
    assert found.reason == reason
    assert fix in found.fix


def test_messages_are_acknowledged_after_they_are_printed(cli: Cli, address: Address, name: str) -> None:
    store(address, name, *map(event, range(1, 6)))
    got = cli("next", name, "--count", "2", "--ack", "--json").ok().objects
    assert [each["sequence_number"] for each in got] == [1, 2]
    followed = cli("next", name, "--follow", "--ack", "--count", "2", "--json")
    assert followed.code == 0
    assert [each["sequence_number"] for each in followed.objects] == [3, 4]
    last = cli("next", name, "--ack", "--count", "10")
    assert last.ok().out.startswith(f"--- message 5 of {name}")
    assert "Not acknowledged" not in last.out
    idle = cli("next", name, "--follow", "--ack", "--wait", "1s")
    assert (idle.code, idle.out) == (0, ""), "following ends without an error when nothing comes for --wait"
    assert cli("subscription", "show", name, "--json").ok().json["backlog"] == 0


def test_what_is_no_event_is_shown_and_can_be_acknowledged(cli: Cli, address: Address, name: str) -> None:
    store(address, name, b"\xff\x00", b'{"a":' * 5000 + b"1" + b"}" * 5000, b'{"number": NaN}')
    got = cli("next", name, "--count", "3", "--json").ok().objects
    assert [each["sequence_number"] for each in got] == [1, 2, 3]
    assert got[0]["raw"] == "/wA="
    assert cli("ack", name, "1", "2", "3").ok().out == f"Acknowledged 3 messages of {name}\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("next", "nobody", "--wait", "0"), "no subscription 'nobody'"),
        (("next", "foo.bar"), "invalid subscription name"),
        (("next", "ox", "--follow"), "--follow without --ack"),
        (("next", "ox", "--count", "1001"), "1001 messages"),
        (("next", "ox", "--wait", "soon"), "invalid duration"),
        (("ack", "nobody", "1"), "no subscription 'nobody'"),
        (("ack", "ox", "1", "2", "--up-to"), "--up-to"),
    ],
)
def test_an_error_has_a_fix(cli: Cli, argv: tuple[str, ...], words: str) -> None:
    assert "fix: " in cli(*argv).refused(words).err


@pytest.mark.parametrize("sequence", ["0", "-1", "x", "99999999999999999999"])
def test_a_wrong_sequence_is_refused(cli: Cli, name: str, sequence: str) -> None:
    outcome = cli("ack", name, "--", sequence)
    assert outcome.code in (1, 2)
    assert outcome.err.startswith("error: ")


def test_the_instance_is_of_this_user_and_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("getpass.getuser", lambda: "jürgen\n")
    monkeypatch.setattr("socket.gethostname", lambda: "h" * 300)
    assert consume.own_instance().startswith("cli-j?rgen?@hhh")
    assert len(consume.own_instance()) == 200

    def unknown() -> str:
        raise KeyError("no name of this user id")

    monkeypatch.setattr("getpass.getuser", unknown)
    assert consume.own_instance().startswith("cli-")


class Flaky:
    """Messages of a server that is away at every second call, and whose answer to an acknowledgement is lost."""

    def __init__(self) -> None:
        self.acknowledged: list[int] = []
        self._calls = 0

    def _fail_sometimes(self) -> None:
        self._calls += 1
        if self._calls % 2:
            raise ServerUnavailable("the server is away", fix="wait")

    async def lease(self, count: int, wait_seconds: float) -> list[Json]:
        self._fail_sometimes()
        return [{"sequence_number": len(self.acknowledged) + 1}]

    async def acknowledge(self, sequence: int) -> None:
        if sequence in self.acknowledged:
            raise UnknownMessage("acknowledged already", fix="nothing")
        self.acknowledged.append(sequence)
        self._fail_sometimes()

    async def acknowledge_up_to(self, sequence: int) -> int:
        raise NotImplementedError

    async def status(self) -> Json:
        raise NotImplementedError


def test_follow_waits_for_a_server_that_is_away(cli: Cli, monkeypatch: pytest.MonkeyPatch, unique: str) -> None:
    flaky = Flaky()
    monkeypatch.setattr(consume, "_call", lambda _cli, _consuming, work: asyncio.run(work(flaky)))
    monkeypatch.setattr(consume, "_RETRY_SECONDS", 0.01)
    outcome = cli("next", unique, "--follow", "--ack", "--count", "3", "--json")
    assert outcome.code == 0, outcome
    assert [each["sequence_number"] for each in outcome.objects] == [1, 2, 3]
    assert flaky.acknowledged == [1, 2, 3]
    assert "the server is away; the command tries again" in outcome.err
    monkeypatch.setattr(consume, "_call", lambda _cli, _consuming, work: asyncio.run(work(Flaky())))
    cli("next", unique, "--json").refused("the server is away")

import asyncio

import pytest

from purveyor.app.cli.queues import ReaderState, status_of
from purveyor.queues.catalogue import internal_queues
from purveyor.queues.client import connect
from purveyor.queues.config import StreamConfig, StreamInfo, StreamState
from purveyor.queues.ensure import Difference
from tests.app.conftest import Cli, invoke, url_of
from tests.conftest import OwnServer

NAMES = [queue.name for queue in internal_queues()]


@pytest.fixture
def own(own_server: OwnServer, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The command line against a server without any queue."""
    monkeypatch.setenv("PURVEYOR_NATS_URL", url_of(own_server().address))
    return invoke


def test_the_catalogue_is_shown_before_and_after_it_is_made(own: Cli) -> None:
    before = own("queues", "list", "--json").ok().json
    assert [(item["queue"], item["status"], item["exists"]) for item in before] == [
        (name, "missing", False) for name in NAMES
    ]
    assert own("stream", "ls", "--json").ok().json == []  # looking changed nothing
    made = own("queues", "ensure", "--json").ok().json
    assert [(item["queue"], item["action"]) for item in made] == [(name, "created") for name in NAMES]
    own("pub", "incoming", "event").ok()
    own("stream", "add", "stream:hr", "--subjects", "hr.main,hr.prefill", "--allow-atomic").ok()
    after = {item["queue"]: item for item in own("queues", "list", "--json").ok().json}
    assert list(after) == [*NAMES, "hr"]
    assert {item["status"] for item in after.values()} == {"ready"}
    assert after["incoming"]["messages"] == 1
    assert [(reader["durable"], reader["lag"]) for reader in after["incoming"]["readers"]] == [
        ("dispatcher", 1), ("archive", 1), ("transform-receipts", 0)
    ]  # fmt: skip
    lines = own("queues", "list").ok().out.splitlines()
    assert lines[0].split()[:3] == ["QUEUE", "STATUS", "MESSAGES"]
    assert "dispatcher (lag 1, unanswered 0)" in lines[2]


def test_what_ensure_would_change_is_told(own: Cli) -> None:
    own("queues", "ensure", "ldif").ok()
    own("consumer", "rm", "stream:ldif", "transformer", "--yes").ok()
    own("stream", "add", "stream:prefill", "--subjects", "prefill").ok()
    out = own("queues", "list").ok().out
    assert "ldif              needs update" in out
    assert "transformer (missing)" in out
    assert "prefill           needs migration" in out
    assert "prefill: stream retention: limits -> workqueue" in out
    assert own("queues", "ensure", "ldif", "--json").ok().json[0]["action"] == "updated"
    refused = own("queues", "ensure", "prefill")
    assert refused.code == 1
    assert refused.err.startswith("error: queue 'prefill': needs migration")


def test_an_unknown_queue_is_refused(own: Cli) -> None:
    own("queues", "ensure", "nope").refused("'nope'", "incoming")


def test_the_status_of_a_queue() -> None:
    info = StreamInfo(config=StreamConfig(name="x"), state=StreamState())
    sealed = StreamInfo(config=StreamConfig(name="x", sealed=True), state=StreamState())
    here, gone = ReaderState("a", "b", 0, 0), ReaderState("a", "b", None, None)
    easy, hard = Difference("stream", "f", 1, 2, True), Difference("stream", "f", 1, 2, False)
    assert status_of(None, (), ()) == "missing"
    assert status_of(info, (), (here,)) == "ready"
    assert status_of(info, (), (gone,)) == "needs update"
    assert status_of(info, (easy,), (here,)) == "needs update"
    assert status_of(info, (easy, hard), (here,)) == "needs migration"
    assert status_of(sealed, (hard,), (here,)) == "sealed for migration"


def test_the_replicas_of_the_settings_count(own: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PURVEYOR_REPLICAS", "3")
    own("queues", "ensure", "ldif").refused("stream:ldif", "10074")


def test_the_listing_agrees_with_ensure(own_server: OwnServer, monkeypatch: pytest.MonkeyPatch) -> None:
    address = own_server().address
    monkeypatch.setenv("PURVEYOR_NATS_URL", url_of(address))

    async def make() -> None:
        async with connect(address) as queues:
            for queue in internal_queues():
                (await queues.ensure(queue)).require_ready()

    asyncio.run(make())
    assert {item["status"] for item in invoke("queues", "list", "--json").ok().json} == {"ready"}

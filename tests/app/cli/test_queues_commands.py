import asyncio
from pathlib import Path

import pytest

from purveyor.app.cli.queues import ReaderState, status_of
from purveyor.jetstream.address import Address
from purveyor.jetstream.config import StreamConfig, StreamInfo, StreamState
from purveyor.queues.catalogue import internal_queues
from purveyor.queues.client import connect
from purveyor.queues.migration.events import MigrationOptions, Step
from purveyor.queues.migration.plan import Difference, Strategy
from tests.support.command_line import Cli, invoke, url_of
from tests.support.nats_servers import OwnServer

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
    own("stream", "add", "stream:hr", "--subjects", "hr.main,hr.prefill,hr.retry", "--allow-atomic").ok()
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


def test_list_shows_what_ensure_would_change(own: Cli) -> None:
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
    assert "migration not enabled. See docs/guides/migration.md" in refused.err


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


def test_queues_have_the_replicas_of_the_settings(own: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
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


def old_incoming(own: Cli, *messages: str) -> None:
    """The queue `incoming` as the older system made it."""
    own("stream", "add", "stream:incoming", "--subjects", "incoming", "--retention", "work").ok()
    own("consumer", "add", "stream:incoming", "durable_name:incoming").ok()
    for message in messages:
        own("pub", "incoming", message).ok()


def test_the_plan_shows_the_changes_of_apply_and_changes_nothing(own: Cli) -> None:
    old_incoming(own, "event")
    own("stream", "add", "stream:ldif", "--subjects", "ldif.>").ok()
    own("stream", "add", "stream:prefill-failures", "--subjects", "prefill-failures").ok()
    plans = {each["queue"]: each for each in own("queues", "plan", "--json").ok().json}
    assert {name: each["change"] for name, each in plans.items()} == {
        "ldif": "update in place",
        "incoming": "migrate by drain",
        "prefill": "create",
        "prefill-failures": "migrate by snapshot",
        "dead-letters": "create",
    }
    assert "stream retention: workqueue -> interest" in plans["incoming"]["why"]
    assert "until the readers have taken 1 messages" in plans["incoming"]["risks"][0]
    retention = next(each for each in plans["incoming"]["differences"] if each["field"] == "retention")
    assert (retention["is"], retention["wanted"], retention["in_place"]) == ("workqueue", "interest", False)
    out = own("queues", "plan", "incoming").ok().out
    assert "migrate by drain" in out
    assert "publishers wait" in " ".join(out.split())
    assert own("stream", "info", "stream:incoming", "--json").ok().json["config"]["retention"] == "workqueue"


def test_applying_migrates_and_applied_again_does_nothing(own: Cli, tmp_path: Path) -> None:
    old_incoming(own, "one", "two")
    own("queues", "apply", "incoming").refused("--yes", "migrate incoming by drain")
    own("queues", "apply", "prefill", "--strategy", "snapshot", "--yes").ok()  # nothing to migrate: it is made
    done = own("queues", "apply", "--strategy", "snapshot", "--yes", "--json").ok().json
    assert {each["queue"]: (each["change"], each["status"]) for each in done}["incoming"] == (
        "migrate by snapshot", "ready"
    )  # fmt: skip
    info = own("stream", "info", "stream:incoming", "--json").ok().json
    assert (info["config"]["retention"], info["state"]["messages"]) == ("interest", 2)
    readers = {each["name"] for each in own("consumer", "ls", "stream:incoming", "--json").ok().json}
    assert readers == {"dispatcher", "archive", "transform-receipts"}
    assert {each["change"] for each in own("queues", "migrate", "--json").ok().json} == {"nothing"}
    assert len(list((tmp_path / "xdg" / "purveyor" / "migrations").iterdir())) == 1


def test_an_empty_queue_is_migrated_by_drain_at_once(own: Cli) -> None:
    old_incoming(own)
    assert "migrate by drain" in own("queues", "apply", "incoming", "--yes").ok().out
    assert own("queues", "plan", "incoming", "--json").ok().json[0]["change"] == "nothing"


def test_an_impossible_strategy_is_refused_before_any_change(own: Cli) -> None:
    own("stream", "add", "stream:prefill-failures", "--subjects", "prefill-failures").ok()
    apply = ("queues", "apply", "prefill-failures", "--yes")
    own(*apply, "--strategy", "drain").refused("no durable reads it", "snapshot")
    assert not own("stream", "info", "stream:prefill-failures", "--json").ok().json["config"]["sealed"]
    own("queues", "plan", "nope").refused("'nope'")


def test_a_snapshot_whose_archive_is_elsewhere_is_reported_and_completed_when_it_is_here(
    own_server: OwnServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    address = own_server().address
    monkeypatch.setenv("PURVEYOR_NATS_URL", url_of(address))
    monkeypatch.setenv("PURVEYOR_DATA_DIR", str(tmp_path / "data"))
    invoke("stream", "add", "stream:incoming", "--subjects", "incoming", "--retention", "work").ok()
    invoke("pub", "incoming", "the first").ok()
    asyncio.run(_end_when_deleted(address, tmp_path / "elsewhere"))
    listed = next(item for item in invoke("queues", "list", "--json").ok().json if item["queue"] == "incoming")
    assert (listed["status"], listed["exists"]) == ("sealed for migration", False)
    assert str(tmp_path / "elsewhere") in listed["migration"]
    assert "incoming: is being migrated by snapshot" in invoke("queues", "list").ok().out.replace("\n", " ")
    (tmp_path / "elsewhere").rename(tmp_path / "away")
    refused = invoke("queues", "apply", "incoming", "--yes")
    assert refused.code == 1
    assert invoke("queues", "ensure", "incoming").code == 1  # nothing is made in its place
    for word in (str(tmp_path / "elsewhere"), "purveyor queues apply incoming", str(tmp_path / "data" / "migrations")):
        assert word in refused.err.replace("\n", " ")
    (tmp_path / "data").mkdir(exist_ok=True)
    (tmp_path / "away").rename(tmp_path / "data" / "migrations")
    invoke("queues", "apply", "incoming", "--yes").ok()
    assert invoke("stream", "info", "stream:incoming", "--json").ok().json["state"]["messages"] == 1


async def _end_when_deleted(address: Address, archives: Path) -> None:
    """Begin a migration by snapshot, and end in it when the stream is deleted."""

    def crash(step: Step) -> None:
        if step is Step.DELETED:
            raise KeyboardInterrupt

    queue = next(queue for queue in internal_queues() if queue.name == "incoming")
    async with connect(address) as queues:
        migrations = queues.migrations.with_options(MigrationOptions(archives=archives, on_step=crash))
        with pytest.raises(KeyboardInterrupt):
            await migrations.begin(queue, strategy=Strategy.SNAPSHOT)

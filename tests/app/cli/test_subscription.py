"""Subscriptions from the command line, from add to delete."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from purveyor.app.cli.parsers import parse_replay_point
from purveyor.jetstream.address import Address
from purveyor.jetstream.headers import POSITION
from purveyor.model.errors import InvalidInput
from purveyor.queues.client import Queues, connect
from purveyor.queues.registry import SUBSCRIPTIONS, DispatchState, PrefillState, PrefillStatus, Registry, Suspension
from purveyor.queues.sync_client import read_subscriptions
from tests.support.command_line import Cli


def on_server(address: Address, work: Callable[[Queues], Awaitable[object]]) -> None:
    async def run() -> None:
        async with connect(address) as queues:
            await work(queues)

    asyncio.run(run())


@pytest.fixture
def name(unique: str) -> str:
    return unique


def add(cli: Cli, name: str, *more: str) -> Any:
    return cli("subscription", "add", name, "--topic", "udm:users/user", *more, "--json").ok().json


def test_a_subscription_is_added_once(cli: Cli, name: str) -> None:
    argv = ("subscription", "add", name, "-t", "udm:users/user", "-t", "udm:groups/.*", "--prefill")
    begun = cli(*argv).ok().out
    assert begun.startswith(f"Added subscription {name}, begins after ")
    assert cli(*argv).ok().out == begun.replace("Added", "Unchanged:")
    cli(*argv[:-1]).refused("other parameters", "fix: choose another name")
    shown = cli("subscription", "show", name, "--json").ok().json
    assert shown["realms_topics"] == [
        {"realm": "udm", "topic": "users/user"}, {"realm": "udm", "topic": "groups/.*"}
    ]  # fmt: skip
    assert (shown["state"], shown["paused"], shown["prefill"]["status"]) == ("active", False, "pending")
    assert (shown["backlog"], shown["backlog_by_kind"]) == (0, {"main": 0, "prefill": 0, "retry": 0})


def test_filters_are_read_from_the_options(cli: Cli, name: str) -> None:
    reported = add(
        cli, name, "--filter-attribute", "tenant=north", "--filter-attribute", "tenant=south",
        "--filter-field", "level=3", "--filter-field", 'level="3"', "--filter-field", "new.department=it",
        "--filter-field", "active=true", "--filter-field", "odd=NaN",
    )  # fmt: skip
    assert reported["created"] is True
    assert reported["filter"] == {
        "attributes": {"tenant": ["north", "south"]},
        "fields": {"level": [3, "3"], "new.department": ["it"], "active": [True], "odd": ["NaN"]},
    }
    out = cli("subscription", "show", name).ok().out
    assert 'Only: tenant = north or south, level = 3 or "3", new.department = "it", active = true' in out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("add", "ox"), "needs a topic"),
        (("add", "ox", "--topic", "users"), "REALM:TOPIC"),
        (("add", "ox", "--topic", "udm:(?i)users"), "has a flag"),
        (("add", "a/b", "--topic", "udm:users"), "invalid subscription name"),
        (("add", "foo.bar", "--topic", "udm:users"), "invalid subscription name"),
        (("add", "incoming", "--topic", "udm:users"), "reserved"),
        (("add", "ox", "--topic", "udm:users", "--filter-field", "department"), "invalid filter"),
        (("add", "ox", "--topic", "udm:users", "--filter-field", "a b=1"), "invalid field"),
        (("show", "nobody"), "no subscription 'nobody'"),
        (("pause", "nobody"), "no subscription 'nobody'"),
        (("resume", "nobody"), "no subscription 'nobody'"),
        (("prefill", "nobody"), "no subscription 'nobody'"),
        (("replay", "nobody", "--from", "1"), "no subscription 'nobody'"),
        (("delete", "nobody", "--yes"), "no subscription 'nobody'"),
        (("delete", "nobody"), "--yes"),
        (("show", "foo.bar"), "invalid subscription name"),
        (("replay", "ox", "--from", "monday"), "invalid position or time 'monday'"),
    ],
)
def test_an_error_has_a_fix(cli: Cli, argv: tuple[str, ...], words: str) -> None:
    assert "fix: " in cli("subscription", *argv).refused(words).err


def test_show_prints_position_backlog_prefill_and_suspension(cli: Cli, address: Address, name: str) -> None:
    record = add(cli, name, "--prefill")

    async def fill(queues: Queues) -> None:
        for position in (5, 7):
            await queues.publish(f"{name}.main", b"{}", headers={POSITION: str(position)})
        await queues.publish(f"{name}.prefill", b"{}")
        registry = await Registry.open(queues)
        found = await registry.get(name)
        same = found.incarnation
        at = datetime(2026, 11, 15, 12, tzinfo=UTC)
        full = Suspension(position=9, reason="maximum bytes exceeded", at=at)
        await registry.put_dispatch(name, DispatchState(incarnation=same, next=9, suspended=full), 0)
        failed = PrefillState(
            incarnation=same,
            status=PrefillStatus.FAILED,
            position=4,
            attempt=2,
            total=10,
            written=3,
            reason="no archive",
        )
        await registry.put_prefill(name, failed, found.prefill_revision)

    on_server(address, fill)
    shown = cli("subscription", "show", name, "--json").ok().json
    waiting = {"main": 2, "prefill": 1, "retry": 0}
    assert (shown["position"], shown["backlog_by_kind"], shown["begin"]) == (7, waiting, record["begin"])
    assert shown["suspended"] == {
        "position": 9, "reason": "maximum bytes exceeded", "at": "2026-11-15T12:00:00+00:00"
    }  # fmt: skip
    assert (shown["prefill"]["status"], shown["prefill"]["reason"]) == ("failed", "no archive")
    out = cli("subscription", "show", name).ok().out
    for line in (
        "Topics: udm:users/user",
        "State: suspended",
        "Newest position: 7",
        f"Dispatched up to: {shown.get('dispatched_up_to', '-')}",
        "Prefill: failed, 3 of 10 written, attempt 2, as of 4: no archive",
        "Suspended: at position 9: maximum bytes exceeded",
        "Since: 2026-11-15 12:00:00 UTC",
    ):
        assert f" {line}\n" in out + "\n"
    assert " Waiting: 2 live, 1 of prefill and replay; the oldest for " in out
    listed = next(item for item in cli("subscription", "list", "--json").ok().json if item["name"] == name)
    assert (listed["backlog"], listed["suspended"]["position"]) == (3, 9)
    row = next(line for line in cli("subscription", "list").ok().out.splitlines() if line.startswith(name))
    assert row.split()[1:] == ["udm:users/user", "suspended", str(record["begin"]), "3", "failed"]

    assert cli("subscription", "resume", name).ok().out == f"Resumed {name}; catching up from position 9\n"
    assert cli("subscription", "prefill", name).ok().out == f"Prefill of {name}: pending, attempt 3, as of position 4\n"
    assert cli("subscription", "prefill", name, "--json").ok().json["attempt"] == 3


def test_a_replay_is_shown_as_a_replay_and_not_as_a_prefill(cli: Cli, address: Address, name: str) -> None:
    add(cli, name)
    job = cli("subscription", "replay", name, "--from", "1", "--json").ok().json["job"]

    async def run(queues: Queues) -> None:
        registry = await Registry.open(queues)
        found = await registry.get(name)
        running = PrefillState(
            incarnation=found.incarnation, status=PrefillStatus.RUNNING, position=1, job=job, written=3
        )
        await registry.put_prefill(name, running, found.prefill_revision)

    on_server(address, run)
    shown = cli("subscription", "show", name, "--json").ok().json
    assert "prefill" not in shown
    assert shown["replay"] == {"job": job, "status": "running", "written": 3}
    out = cli("subscription", "show", name).ok().out
    assert " Prefill: none\n" in out
    assert f" Replay: running, 3 written, job {job}\n" in out + "\n"
    row = next(line for line in cli("subscription", "list").ok().out.splitlines() if line.startswith(name))
    assert row.split()[-1] == "-"


def begin(address: Address, name: str, job: str) -> None:
    """Do what a prefill worker does when it begins a replay."""

    async def forget(queues: Queues) -> None:
        await (await Registry.open(queues)).waiting_replays.forget(name, job)

    on_server(address, forget)


def test_pause_resume_replay_delete(cli: Cli, address: Address, name: str) -> None:
    add(cli, name)
    assert cli("subscription", "pause", name).ok().out == f"Paused {name}\n"
    assert "State: paused" in cli("subscription", "show", name).ok().out
    assert cli("subscription", "resume", name).ok().out == f"Resumed {name}\n"
    job = cli("subscription", "replay", name, "--from", "1", "--to", "9", "-t", "udm:users/.*", "--json").ok().json
    assert (job["kind"], job["from"], job["to"]) == ("replay", 1, 9)
    assert job["topics"] == [{"realm": "udm", "topic": "users/.*"}]
    again = cli("subscription", "replay", name, "--from", "2h").refused(f"waits already, job {job['job']}")
    assert "fix: ask again when that replay has begun" in again.err
    begin(address, name, job["job"])
    assert f"Replay of {name} from 2h to now" in cli("subscription", "replay", name, "--from", "2h").ok().out
    cli("subscription", "prefill", name).refused("without a prefill", "--prefill")
    assert cli("subscription", "delete", name, "--yes", "--json").ok().json == {"name": name, "deleted": True}
    assert name not in read_subscriptions(address).subscriptions
    cli("subscription", "show", name).refused(f"no subscription {name!r}")


def test_one_damaged_record_does_not_hide_the_others(cli: Cli, address: Address, name: str) -> None:
    add(cli, name)

    async def break_one(queues: Queues) -> None:
        await (await queues.bucket(SUBSCRIPTIONS)).put(f"{name}x.definition", b"broken")

    async def mend(queues: Queues) -> None:
        await (await queues.bucket(SUBSCRIPTIONS)).delete(f"{name}x.definition")

    on_server(address, break_one)
    listed = cli("subscription", "list")
    assert listed.code == 0
    assert f"subscription {name}x is unreadable" in listed.err
    assert name in listed.out
    on_server(address, mend)


def test_an_unreadable_subscription_is_listed_and_shown_and_deleted_by_force(
    cli: Cli, address: Address, name: str
) -> None:
    begin = add(cli, name)["begin"]

    async def upgrade(queues: Queues) -> None:
        bucket = await queues.bucket(SUBSCRIPTIONS)
        record = json.loads((await bucket.get(f"{name}.definition")).value)
        await bucket.put(f"{name}.definition", json.dumps({**record, "version": 2}).encode())
        registry = await Registry.open(queues)
        why = Suspension(position=9, reason="too new", at=datetime(2026, 11, 15, 12, tzinfo=UTC), group="dispatcher")
        await registry.put_dispatch(name, DispatchState(incarnation=record["incarnation"], next=9, suspended=why), 0)

    on_server(address, upgrade)
    listed = cli("subscription", "list")
    assert f"subscription {name} is unreadable: the subscription record has version 2" in listed.err
    row = next(line for line in listed.out.splitlines() if line.startswith(name))
    assert row.split()[1:4] == ["-", "unreadable", str(begin)]
    reported = next(item for item in cli("subscription", "list", "--json").json if item["name"] == name)
    shown = cli("subscription", "show", name, "--json").ok().json
    assert {key: reported[key] for key in shown} == shown
    assert (shown["state"], shown["suspended"]["position"]) == ("unreadable", 9)
    assert "version 2" in shown["unreadable"]
    out = cli("subscription", "show", name).ok().out
    for line in ("State: unreadable", "upgrade this program", "Suspended: at position 9: too new"):
        assert line in out
    for command in ("pause", "resume", "prefill"):
        cli("subscription", command, name).refused("version 2", "upgrade this program")
    cli("subscription", "delete", name, "--yes").refused("version 2", "upgrade this program")
    assert cli("subscription", "delete", name, "--yes", "--force").ok().out == f"Deleted {name}\n"
    cli("subscription", "show", name).refused(f"no subscription {name!r}")


def test_parse_place_accepts_a_position_a_time_or_a_duration_ago() -> None:
    assert parse_replay_point("12") == 12
    assert parse_replay_point("2026-11-15T12:00:00Z") == datetime(2026, 11, 15, 12, tzinfo=UTC)
    ago = parse_replay_point("2h")
    assert isinstance(ago, datetime)
    assert ago < datetime.now(UTC)
    with pytest.raises(InvalidInput, match="invalid position or time"):
        parse_replay_point("2026-11-15T12:00:00")

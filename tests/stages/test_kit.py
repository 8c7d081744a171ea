"""The test kit runs an application with one fixture; the example runs; the commands show the stages."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.stages.shop import PlaceOrder, declare, metadata
from purveyor.app.cli.main import run
from purveyor.model.errors import NoAnswer
from purveyor.stages import Stages
from purveyor.stages.testing import StageKit
from tests.support.nats_servers import OwnServer
from tests.support.stages import fresh_database

Say = Callable[..., str]


@pytest.fixture
def say(stage_kit: StageKit, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """Run `purveyor stages ...` on the kit's broker and database, and return its output."""
    (host, port), *_ = stage_kit.address.hosts()
    url = f"nats://{stage_kit.address.user}:{stage_kit.address.password}@{host}:{port}"
    monkeypatch.setenv("PURVEYOR_NATS_URL", url)
    monkeypatch.setenv("PURVEYOR_DATABASE_URL", stage_kit.url)

    def call(*words: str) -> str:
        capsys.readouterr()
        code = run(["stages", *words])
        output = capsys.readouterr()
        return output.out if code == 0 else output.err

    return call


async def shop(kit: StageKit) -> None:
    orders = None

    def declared(stages: Stages) -> None:
        nonlocal orders
        orders = declare(stages)

    async with kit.running(declared, metadata=metadata) as stages:
        assert orders is not None
        answer = await stages.ask(orders, PlaceOrder("book", 2), key="customer-7")
        assert answer.text == "2 x book from shelf 4"
        with pytest.raises(NoAnswer):
            await stages.ask(orders, PlaceOrder("unicorn"), timeout=0.5)
        await kit.settled()


async def test_a_stage_runs_in_a_test_with_one_fixture(stage_kit: StageKit) -> None:
    await shop(stage_kit)
    assert await stage_kit.rows("SELECT item, count FROM orders ORDER BY item") == [("book", 2), ("unicorn", 1)]
    assert await stage_kit.rows("SELECT entry FROM books") == [("2 x book from shelf 4",)]
    (event,) = await stage_kit.published()
    assert (event.realm, event.topic, event.new["item"]) == ("shop", "orders/order", "book")
    (letter,) = await stage_kit.dead_letters()
    assert letter.reason == "we never had unicorns"
    assert letter.origin == "stage:inventory.reserve.0"


def test_the_commands_show_endpoints_stages_and_what_fails(stage_kit: StageKit, say: Say) -> None:
    import asyncio  # noqa: PLC0415 - commands have an event loop of their own

    asyncio.run(shop(stage_kit))
    listed = json.loads(say("list", "--json"))
    assert [each["endpoint"] for each in listed] == ["books.entry", "inventory.reserve", "orders.place"]
    assert [len(each["stages"]) for each in listed] == [1, 1, 2]
    assert listed[1]["stages"][0]["dead_letters"] == 1
    shown = json.loads(say("show", "orders.place", "--json"))
    assert {**shown, "database": None} == {**listed[2], "database": None}
    assert shown["database"]["unsent"] == 0
    lines = say("list").splitlines()
    assert lines[0].split() == ["ENDPOINT", "STAGES", "WAITING", "IN", "WORK", "INTERACTIVE", "DEAD", "LETTERS"]
    assert lines[2].split() == ["inventory.reserve", "1", "0", "0", "0", "1"]
    assert len(say("show", "orders.place").splitlines()) >= 3
    assert "no endpoint 'nothing'" in say("show", "nothing")
    assert "messages will be sent again" in say("replay", "--since", "1h", "--yes")
    assert "add --yes" in say("replay", "--since", "1h")
    assert json.loads(say("show", "orders.place", "--json"))["database"]["unsent"] > 0


def test_the_printed_statements_make_the_tables(say: Say, postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import psycopg  # noqa: PLC0415

    url = fresh_database(postgres, "template1")
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(say("ddl", "--dialect", "postgresql").encode())
    monkeypatch.setenv("PURVEYOR_DATABASE_URL", url)
    assert "Unsent: 0" in say("list")
    assert "CREATE TABLE shop.purveyor_inbox" in say("ddl", "--schema", "shop")
    assert "AUTOINCREMENT" in say("ddl", "--dialect", "sqlite")
    assert "choose one of postgresql, sqlite" in say("ddl", "--dialect", "oracle")


def test_the_example_runs(own_server: OwnServer, tmp_path: Path) -> None:
    address = own_server().address
    (host, port), *_ = address.hosts()
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "PYTHONPATH": str(root / "src"),
        "PURVEYOR_NATS_URL": f"nats://{address.user}:{address.password}@{host}:{port}",
    }
    environment.pop("PURVEYOR_DATABASE_URL", None)
    done = subprocess.run(
        [sys.executable, str(root / "examples" / "stages" / "shop.py")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "2 x book from shelf 4\n", done.stderr

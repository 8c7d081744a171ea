"""Listings with --json have one shape: an array, whose items have the names and types that `show` has."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer

from purveyor.app.cli.command_groups import command_of
from purveyor.app.cli.main import COMMANDS, load_command
from purveyor.delivery.pull import open_pull
from purveyor.jetstream.address import Address
from purveyor.queues.catalogue import endpoint_queue
from purveyor.queues.client import Queues, connect
from purveyor.queues.status_board import write_notice
from purveyor.sources.ldap.directory import Directory
from purveyor.sources.ldap.source_status import SourceStatus
from purveyor.sources.ldap.source_store import SourceStore
from tests.support.command_line import Cli

Make = Callable[[Cli, Address, str], None]


def on_server(address: Address, work: Callable[[Queues], Any]) -> None:
    async def run() -> None:
        async with connect(address) as queues:
            await work(queues)

    asyncio.run(run())


def nothing(cli: Cli, address: Address, name: str) -> None:
    """Needs nothing on the server."""


def add_stream(cli: Cli, address: Address, name: str) -> None:
    cli("stream", "add", name, "--subjects", f"{name}.>", "--max-age", "1h").ok()
    cli("consumer", "add", name, name).ok()
    cli("pub", f"{name}.x", "y").ok()


def add_topic(cli: Cli, address: Address, name: str) -> None:
    cli("topic", "add", f"{name}:orders", "--description", "all orders").ok()
    cli("schema", "add", name, "-", "--topic", f"{name}:orders", stdin=b'{"type": "object"}').ok()


def add_subscription(cli: Cli, address: Address, name: str) -> None:
    options = ("--prefill", "--delivery", "parallel", "--retention", "1d", "--filter-field", "level=3")
    cli("subscription", "add", name, "-t", "udm:users/user", *options).ok()
    cli("subscription", "pause", name).ok()


def add_dead_letter(cli: Cli, address: Address, name: str) -> None:
    cli("subscription", "add", name, "-t", "udm:users/user").ok()
    cli("pub", f"{name}.main", "{}").ok()

    async def reject(queues: Queues) -> None:
        async with open_pull(queues) as pull:
            message = await pull.next(name)
            assert message is not None
            await pull.reject(name, message.sequence, "no such mailbox")

    on_server(address, reject)


def add_endpoint(cli: Cli, address: Address, name: str) -> None:
    async def ensure(queues: Queues) -> None:
        (await queues.ensure(endpoint_queue(f"{name}.place", 2))).require_usable()

    on_server(address, ensure)


def add_source(cli: Cli, address: Address, name: str) -> None:
    async def take(queues: Queues) -> None:
        taken = await (await SourceStore.open(queues)).take(name)
        assert taken is not None
        status = SourceStatus(Directory(uri="ldap://a", base="dc=a", source=name))
        status.begin_refresh()
        status.end_refresh()
        await write_notice(queues, status.key, status.to_json())

    on_server(address, take)


def is_of(name: str) -> Callable[[Any], bool]:
    return lambda item: any(str(value).startswith((name, f"{name}.")) for value in item.values())


LISTINGS: dict[str, tuple[Make, tuple[str, ...], Callable[[Any], tuple[str, ...]] | None]] = {
    "stream": (add_stream, (), lambda item: (item["config"]["name"],)),
    "consumer": (add_stream, ("NAME",), lambda item: (item["stream_name"], item["name"])),
    "topic": (add_topic, (), lambda item: (f"{item['realm']}:{item['topic']}",)),
    "schema": (add_topic, (), lambda item: (item["name"],)),
    "subscription": (add_subscription, (), lambda item: (item["name"],)),
    "dlq": (add_dead_letter, ("--subscription", "NAME"), lambda item: (str(item["id"]),)),
    "source": (add_source, (), lambda item: (item["source"],)),
    "stages": (add_endpoint, (), lambda item: (item["endpoint"],)),
    "queues": (nothing, (), None),
}
"""For each group with a listing: how to make an item, the arguments of the listing, and those of `show`."""


@pytest.fixture
def own(unique: str, cli: Cli) -> Iterator[str]:
    yield unique[-20:].strip("-").replace("-", "")
    cli("subscription", "delete", unique[-20:].strip("-").replace("-", ""), "--yes")


def test_every_listing_is_known() -> None:
    groups = {name: typer.main.get_command(load_command(name)) for name in COMMANDS}
    listing = {name for name, group in groups.items() if command_of("list", [*getattr(group, "commands", ())])}
    assert listing == {*LISTINGS}


@pytest.mark.parametrize("group", LISTINGS)
def test_a_listing_is_an_array_of_what_show_shows(cli: Cli, address: Address, own: str, group: str) -> None:
    make, arguments, show = LISTINGS[group]
    make(cli, address, own)
    listed = cli(group, "list", *(own if each == "NAME" else each for each in arguments), "--json").ok().json
    assert isinstance(listed, list)
    assert listed, "the test adds an item"
    assert all(isinstance(item, dict) for item in listed)
    if show is None:
        return
    (item,) = [item for item in listed if any(own in part for part in show(item)) or group == "dlq"]
    shown = cli(group, "show", *show(item), "--json").ok().json
    assert isinstance(shown, dict)
    assert_same_types(item, shown, group)


def assert_same_types(item: dict[str, Any], shown: dict[str, Any], where: str) -> None:
    """Assert that `shown` has all names of a listed item, each with the same type."""
    assert {*item} <= {*shown}, where
    for name, value in item.items():
        assert type(value) is type(shown[name]), f"{where}.{name}"
        if isinstance(value, dict):
            assert_same_types(value, shown[name], f"{where}.{name}")


def test_an_empty_listing_is_an_empty_array(cli: Cli, own: str) -> None:
    cli("subscription", "add", own, "-t", "udm:users/user").ok()
    assert cli("consumer", "ls", f"stream:{own}", "--json").ok().json == []
    assert cli("subscription", "attempts", own, "--json").ok().json == []
    assert cli("dlq", "list", "--subscription", own, "--json").ok().json == []

"""The command line sets the password with which a subscription pulls messages over HTTP."""

import asyncio
from pathlib import Path

import pytest

from purveyor.delivery.credentials import Credentials, PasswordHasher
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.address import Address
from purveyor.queues.client import connect
from tests.support.command_line import Cli

TOPIC = ("--topic", "udm:users/user")


def opens(address: Address, name: str, *passwords: str) -> list[bool]:
    """Return the passwords that the API accepts."""

    async def check() -> list[bool]:
        hasher = PasswordHasher()
        async with connect(address) as queues:
            known = Credentials(queues, hasher)
            found = [await known.check_password(name, password) is not None for password in passwords]
        hasher.close()
        return found

    return asyncio.run(check())


def test_from_a_file_or_standard_input(cli: Cli, address: Address, unique: str) -> None:
    Path("secret").write_text("from the file\nnot this\n")
    add = ("subscription", "add", unique, *TOPIC, "--password-file")
    assert "Added" in cli(*add, "secret").ok().out
    assert "Unchanged" in cli(*add, "secret").ok().out
    cli(*add, "-", stdin=b"another\n").refused("with another password")
    assert opens(address, unique, "from the file", "not this", "another") == [True, False, False]
    shown = cli("subscription", "show", unique, "--json").ok().out
    assert "from the file" not in shown


def test_a_generated_one_is_shown_once(cli: Cli, address: Address, unique: str) -> None:
    said = cli("subscription", "add", unique, *TOPIC, "--generate-password").ok().out
    first = said.split()[-1]
    assert opens(address, unique, first) == [True]
    reported = cli("subscription", "password", unique, "--generate-password", "--keep", "1h", "--json").ok().json
    assert opens(address, unique, first, reported["password"]) == [True, True]
    cli("subscription", "password", unique, "--password-file", "-", stdin=b"third\n").ok()
    assert opens(address, unique, first, reported["password"], "third") == [False, False, True]
    cli("subscription", "delete", unique, "--yes").ok()
    assert opens(address, unique, "third") == [False]


def test_tokens_end_with_the_last_password_unless_they_are_kept(cli: Cli, address: Address, unique: str) -> None:
    cli("subscription", "add", unique, *TOPIC, "--generate-password").ok()

    async def work(known: Credentials, incarnation: str, text: str | None) -> str | None:
        if text is None:
            return (await known.add_token(unique, incarnation))[1]
        return None if await known.check_token(text) is None else text

    def call(text: str | None = None) -> str | None:
        async def connected() -> str | None:
            hasher = PasswordHasher()
            async with connect(address) as queues:
                found = await Subscriptions(queues).get(unique)
                result = await work(Credentials(queues, hasher), found.incarnation, text)
            hasher.close()
            return result

        return asyncio.run(connected())

    token = call()
    change = ("subscription", "password", unique, "--generate-password")
    cli(*change, "--keep-tokens").ok()
    assert call(token) == token
    cli(*change, "--keep", "1h").ok()
    assert call(token) == token
    cli(*change).ok()
    assert call(token) is None


def test_a_password_can_be_set_later(cli: Cli, address: Address, unique: str) -> None:
    cli("subscription", "add", unique, *TOPIC).ok()
    assert opens(address, unique, "") == [False]
    cli("subscription", "add", unique, *TOPIC, "--password-file", "-", stdin=b"pw").ok()
    assert opens(address, unique, "pw") == [True]


def test_invalid_arguments_are_refused_before_any_change(
    cli: Cli, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = ("subscription", "add", unique, *TOPIC)
    cli(*add, "--password-file", "none").refused("none", "--password-file")
    cli(*add, "--password-file", "-").refused("empty")
    cli(*add, "--ask-password").refused("no terminal")
    cli(*add, "--ask-password", "--generate-password").refused("more than one")
    cli("subscription", "password", unique).refused("no password")
    cli("subscription", "show", unique).refused("no subscription")
    cli("subscription", "password", unique, "--generate-password").refused("no subscription")
    cli("subscription", "add", "admin", *TOPIC).refused("belongs to a login")
    monkeypatch.setenv("PURVEYOR_EVENTS_USERNAME", unique)
    cli(*add, "--generate-password").refused("belongs to a login")

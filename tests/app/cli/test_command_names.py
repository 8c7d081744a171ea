"""Other names of commands work in every group, and a wrong name gets a useful suggestion."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from purveyor.app.cli.command_groups import ALIASES, command_of, suggestions
from purveyor.app.cli.main import COMMANDS, load_command
from tests.support.command_line import Cli, invoke

GROUPS: dict[str, list[str]] = {
    name: list(commands)
    for name in COMMANDS
    if (commands := getattr(typer.main.get_command(load_command(name)), "commands", None))
}


ROOT = Path(__file__).parents[3]


def named_commands() -> Iterator[tuple[str, list[str]]]:
    """Yield each command that a message or a guide names, with its file."""
    guides = (ROOT / "docs" / "guides").glob("*.md")
    for path in (
        *(ROOT / "src").rglob("*.py"),
        *guides,
        ROOT / "README.md",
        ROOT / "deploy" / "prometheus" / "rules.yml",
    ):
        for found in re.findall(r"`purveyor ((?:[a-z-]+ )*[a-z-]+)", path.read_text(encoding="utf-8")):
            yield str(path.relative_to(ROOT)), [word for word in found.split() if not word.startswith("-")]


def test_every_command_that_a_message_or_a_guide_names_exists() -> None:
    unknown, seen = [], 0
    for path, words in named_commands():
        seen += 1
        group = GROUPS.get(words[0], []) if words else []
        is_known = not words or words[0] in COMMANDS
        if not is_known or (len(words) > 1 and group and command_of(words[1], group) is None):
            unknown.append((path, " ".join(words[:2])))
    assert seen > 100
    assert unknown == []


@pytest.mark.parametrize("group", GROUPS)
def test_an_alias_is_the_same_command_and_is_listed_once(group: str) -> None:
    commands = GROUPS[group]
    listed = invoke(group, "--help").ok().out.partition("Commands:")[2].split("\n")
    names = [line.split()[0] for line in listed if line.startswith("  ") and line[2:3].strip()]
    assert names == commands
    for alias in ALIASES:
        meant = command_of(alias, commands)
        if meant is not None:
            assert invoke(group, alias, "--help").ok().out == invoke(group, meant, "--help").ok().out


def test_a_group_that_lists_shows_or_deletes_has_all_names() -> None:
    for group, commands in GROUPS.items():
        for names in ({"list", "ls"}, {"show", "info"}, {"delete", "rm"}):
            known = {command_of(name, commands) for name in names}
            assert len(known) == 1, (group, known)
    assert {group for group, commands in GROUPS.items() if command_of("rm", commands)} >= {
        "stream", "consumer", "topic", "schema", "subscription", "dlq"
    }  # fmt: skip


def test_aliases_do_what_the_commands_do(cli: Cli, stream: str) -> None:
    assert cli("stream", "show", stream, "--json").ok().json == cli("stream", "info", stream, "--json").ok().json
    assert stream in cli("stream", "list").ok().out
    cli("topic", "add", f"{stream}:orders").ok()
    assert f"{stream}" in cli("topic", "ls").ok().out
    assert cli("topic", "remove", f"{stream}:orders", "--yes").ok().out == f"Removed {stream}:orders\n"
    assert cli("stream", "delete", stream, "--yes").ok().out == f"Removed {stream}\n"


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (("subscription", "create"), "No such command 'create'. Did you mean 'add'?"),
        (("subscription", "update"), "No such command 'update'. Did you mean 'edit'?"),
        (("subscription", "stop"), "No such command 'stop'. Did you mean 'pause'?"),
        (("subscription", "resme"), "No such command 'resme'. Did you mean 'resume'?"),
        (("subscription", "deleet"), "No such command 'deleet'. Did you mean 'delete'?"),
        (("dlq", "redrive"), "No such command 'redrive'. Did you mean 'retry'?"),
        (("archive", "remove"), "No such command 'remove'."),
        (("subscriptions", "list"), "No such command 'subscriptions'. Did you mean 'subscription'?"),
        (("consume",), "No such command 'consume'. Did you mean 'next'?"),
        (("frobnicate",), "No such command 'frobnicate'."),
        (("\x1b[31m",), "No such command "),
    ],
)
def test_a_wrong_name_gets_a_useful_suggestion(argv: tuple[str, ...], error: str) -> None:
    outcome = invoke(*argv)
    assert outcome.code == 2
    first = outcome.err.splitlines()[0]
    assert first.startswith(f"error: {error}"), outcome.err
    assert first == f"error: {error}" or argv == ("\x1b[31m",)
    assert "\x1b" not in outcome.err


def test_a_word_for_deleting_never_suggests_resuming() -> None:
    for group, commands in GROUPS.items():
        for word in ("remove", "rm", "delete", "drop", "destroy", "erase"):
            assert "resume" not in suggestions(word, commands), group


def test_suggestions_are_commands_of_the_group() -> None:
    words: list[Any] = ["ad", "lst", "shw", "DELETE", "Pause", "", "x" * 1000, "serv"]
    for commands in GROUPS.values():
        for word in words:
            assert {*suggestions(word, commands)} <= {*commands}
    assert suggestions("DELETE", ["delete"]) == ["delete"]

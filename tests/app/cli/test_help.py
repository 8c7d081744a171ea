import shlex
import subprocess
import sys

import pytest
import typer

from purveyor.app.cli.main import COMMANDS, load_command
from tests.support.command_line import PROGRAM, Cli, invoke

SUBCOMMANDS = {
    "up": [],
    "demo": [],
    "serve": ["nats", "api", "pipeline", "ldap"],
    "stream": ["add", "edit", "ls", "info", "get", "purge", "seal", "rm"],
    "consumer": ["add", "ls", "info", "next", "pause", "resume", "rm", "samples"],
    "import": [],
    "source": ["list", "show", "refresh"],
    "publish": [],
    "next": [],
    "ack": [],
    "topic": ["list", "add", "show", "delete"],
    "schema": ["add", "list", "show", "check", "rollback", "delete"],
    "subscription": ["add", "password", "list", "show", "pause", "resume", "prefill", "replay", "delete"],
    "dlq": ["list", "show", "retry", "discard"],
    "archive": ["query", "snapshot", "compact"],
    "stages": ["ddl", "list", "show", "replay"],
    "pub": [],
    "sub": [],
    "queues": ["list", "ensure", "plan", "apply", "migrate", "permissions"],
    "env": [],
    "doctor": [],
}
LEAVES = [(name, sub) if sub else (name,) for name, subs in SUBCOMMANDS.items() for sub in subs or [""]]


def test_the_overview_names_every_command() -> None:
    assert list(COMMANDS) == list(SUBCOMMANDS)
    out = invoke("--help").ok().out
    assert invoke().ok().out == out
    for name, (_, purpose) in COMMANDS.items():
        assert name in out
        assert purpose in out


def test_the_overview_shows_the_way_to_the_first_event(cli: Cli, unique: str) -> None:
    shown = [line.strip() for line in invoke("--help").ok().out.splitlines() if line.startswith("    purveyor ")]
    commands = [shlex.split(line.replace("mail-server", unique))[1:] for line in shown]
    assert [words[0] for words in commands] == ["up", "subscription", "publish", "next"]
    cli(*commands[1]).ok()
    cli(*commands[2]).ok()
    cli(*commands[3][:-1], "0").refused("no message")  # without the first command, no pipeline runs


@pytest.mark.parametrize("group", [name for name, subs in SUBCOMMANDS.items() if subs])
def test_a_group_lists_its_commands_with_their_purpose(group: str) -> None:
    out = invoke(group, "--help").ok().out
    listed = [line.split() for line in out.partition("Commands:")[2].strip().splitlines()]
    assert {words[0] for words in listed if len(words) > 1} >= set(SUBCOMMANDS[group])
    assert COMMANDS[group][1] in out


@pytest.mark.parametrize("command", LEAVES, ids=" ".join)
def test_every_command_has_a_purpose_and_examples(command: tuple[str, ...]) -> None:
    out = invoke(*command, "--help").ok().out
    assert f"Usage: purveyor {' '.join(command)}" in out
    assert "Examples:\n" in out
    assert f"  purveyor {command[0]}" in out or f"| purveyor {command[0]}" in out or f" {command[0]} " in out
    assert "--json" in out


def test_help_comes_without_the_heavy_libraries() -> None:
    code = (
        "import sys; from purveyor.app.cli.main import run; run(['--help']); "
        "sys.exit(' '.join({'pyarrow', 'numpy', 'nats', 'pydantic'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_version() -> None:
    done = subprocess.run([*PROGRAM, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("purveyor 0.")


def test_every_lazy_command_loads() -> None:
    for name in COMMANDS:
        assert isinstance(load_command(name), typer.Typer)

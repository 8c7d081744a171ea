"""The reference of what a user can type, set and send: pages made from the commands, the settings and the routes."""

import importlib
import inspect
import re
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import typer

from purveyor.app.cli.main import COMMANDS
from purveyor.app.cli.main import app as root
from purveyor.app.http.application import ApiOptions, describe
from purveyor.app.settings import PREFIX, Settings
from purveyor.app.wiring import build_api
from purveyor.jetstream.address import Address

CLI_PAGE = Path("docs/reference/cli.md")
SETTINGS_PAGE = Path("docs/reference/settings.md")
HTTP_PAGE = Path("docs/reference/http.md")
_CLI = """\
`purveyor [OPTIONS] COMMAND`. The options of the first table stand before the command. Each setting is also an
environment variable and a key of `purveyor.toml`: see [Settings](settings.md)."""
_SETTINGS = """\
Flags go before environment variables, and those before `purveyor.toml`. What a flag is called,
[the command line](cli.md) tells."""
_HTTP = """\
`GET /openapi.json` has the same with the form of every body. How it is used, [the guide](../guides/api.md) shows.
Every route with a login may answer 401, 403, 408, 413, 429, 431 and 503."""
_MADE = "<!-- Made by `make docs` from {}: change it there. -->"


@cache
def reference_pages() -> dict[Path, str]:
    """Each page with its text."""
    return {CLI_PAGE: cli_page(), SETTINGS_PAGE: settings_page(), HTTP_PAGE: http_page()}


def cli_page() -> str:
    """Every command with its arguments and options."""
    parts = [
        "# The command line",
        _MADE.format("src/purveyor/app/cli/"),
        _CLI,
        _parameters(typer.main.get_command(root)),
    ]
    for name, (module, _) in COMMANDS.items():
        parts += _command(typer.main.get_command(importlib.import_module(module).app), f"purveyor {name}")
    return "\n\n".join(part for part in parts if part) + "\n"


def _command(command: Any, path: str) -> list[str]:
    words = inspect.cleandoc(command.help or "").replace("\b\n", "")
    below = getattr(command, "commands", None)
    parts = [f"## `{path}`" if path.count(" ") == 1 else f"### `{path}`", _escaped(words)]
    if not below:
        arguments = [_metavar(each) for each in command.params if each.param_type_name == "argument"]
        parts.insert(1, f"`{' '.join((path, *arguments))}`" if arguments else "")
        parts.append(_parameters(command))
    for name, inner in (below or {}).items():
        parts += _command(inner, f"{path} {name}")
    return parts


def _parameters(command: Any) -> str:
    rows = ["| | |", "|---|---|"]
    for each in command.params:
        if each.name == "help" or getattr(each, "hidden", False):
            continue
        names = ", ".join(f"`{name}`" for name in (*each.opts, *each.secondary_opts))
        label = f"`{_metavar(each)}`" if each.param_type_name == "argument" else names
        if each.param_type_name == "option" and not each.is_flag:
            label += f" `{_metavar(each)}`"
        rows.append(f"| {label.replace('|', chr(92) + '|')} | {_cell(each.help or '')} |")
    return "\n".join(rows) if len(rows) > 2 else ""


def _metavar(parameter: Any) -> str:
    kind = parameter.type_descriptor.annotation
    if parameter.metavar is None and isinstance(kind, type) and issubclass(kind, Enum):
        return "|".join(str(each.value) for each in kind)
    return str(parameter.metavar or parameter.name.upper())


def settings_page() -> str:
    """Every setting with its variable, its default and what it means."""
    said = _said(Settings)
    rows = ["| key | environment | default | |", "|---|---|---|---|"]
    for name, field in Settings.model_fields.items():
        default = getattr(field.default, "value", field.default)
        if field.default_factory is not None:
            shown = "`purveyor` in the user's data home"
        else:
            shown = (
                "" if default in (None, ()) else f"`{str(default).lower() if isinstance(default, bool) else default}`"
            )
        rows.append(f"| `{name}` | `{PREFIX}{name.upper()}` | {shown} | {_cell(said.get(name, ''))} |")
    return (
        "\n\n".join(
            (
                "# Settings",
                _MADE.format("src/purveyor/app/settings.py"),
                _SETTINGS,
                "\n".join(rows),
            )
        )
        + "\n"
    )


def _said(kind: type) -> dict[str, str]:
    """What stands in the source below each field."""
    found = re.findall(r'^    (\w+): .*\n    """(.*?)"""', inspect.getsource(kind), re.MULTILINE)
    return dict(found)


def http_page() -> str:
    """Every route with who may call it and what can go wrong."""
    description = describe(build_api(ApiOptions(find_address=lambda: Address.parse("nats://127.0.0.1:1"), logins=())))
    parts = [
        "# The HTTP API",
        _MADE.format("src/purveyor/app/http/"),
        _HTTP,
    ]
    common = {"401", "403", "408", "413", "429", "431", "503"}
    for path, routes in sorted(description["paths"].items()):
        for method, route in routes.items():
            answers = [
                f"{status} ({answer['description'].lower()})" if _tells(status, answer) else status
                for status, answer in sorted(route["responses"].items())
                if status not in common
            ]
            parts += [
                f"## {method.upper()} {path}",
                _escaped(route["description"]),
                "Answers: " + ", ".join(answers) + ".",
            ]
    return "\n\n".join(parts) + "\n"


def _tells(status: str, answer: dict[str, Any]) -> bool:
    """Whether more is said of an answer than its number says."""
    return status.startswith("2") and answer["description"] != "Successful Response"


def _escaped(text: str) -> str:
    """Prose that Markdown shows as it is."""
    return re.sub(r"(?<!`)<(\w)", r"\\<\1", text)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")

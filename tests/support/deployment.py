"""Check commands and settings that files in deploy/ use."""

from pathlib import Path
from typing import Any

import jsonschema_rs

from purveyor.app.settings import PREFIX, Settings
from tests.support.command_line import invoke

DEPLOY = Path(__file__).parents[2] / "deploy"


def valid(schema: dict[str, Any], given: object, where: str) -> None:
    errors = [
        f"{error.instance_path}: {error.message}" for error in jsonschema_rs.validator_for(schema).iter_errors(given)
    ]
    assert not errors, f"{where}: {errors}"


def check_setting(name: str, where: str) -> None:
    """Assert that a variable belongs to a setting; otherwise it would have no effect."""
    if name.startswith(PREFIX):
        assert name.removeprefix(PREFIX).lower() in Settings.model_fields, f"{where}: {name} is no setting"


def check_command(words: list[str], where: str) -> None:
    plain = [word for word in words if not word.startswith("-")]
    outcome = invoke(*plain, "--help")
    assert outcome.code == 0, f"{where}: {outcome.err}"
    for flag in (word for word in words if word.startswith("--")):
        assert flag in outcome.out, f"{where}: {flag}"

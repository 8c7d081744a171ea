"""Settings, read once at the start: flags before `PURVEYOR_*` environment variables before `purveyor.toml`.

A mistake is told with the key, its value and the place it came from, so that people know which of the three to mend.
"""

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from purveyor.model.errors import InvalidConfig, InvalidInput, PurveyorError
from purveyor.model.names import check_name
from purveyor.queues.address import Address
from purveyor.queues.catalogue import DEFAULT_GROUP
from purveyor.queues.server.config import check_sync

PREFIX = "PURVEYOR_"
FILE_NAME = "purveyor.toml"
_SECRET = frozenset({"nats_url"})
_FLAGS = {"spark_master": "master", "dispatcher_group": "group", "transform_mapping": "mapping"}
"""Flags that are shorter than their key, because their command says the rest."""


def default_data_dir() -> Path:
    """Where data goes when nothing is said: the data home of the XDG convention."""
    home = os.environ.get("XDG_DATA_HOME", "")
    return (Path(home) if Path(home).is_absolute() else Path.home() / ".local" / "share") / "purveyor"


def _ours(check: Any) -> AfterValidator:
    """One of our own checks as a validator of pydantic, which wants a ValueError."""

    def validate(value: Any) -> Any:
        try:
            check(value)
        except PurveyorError as error:
            raise ValueError(error.fix or error.message) from error
        return value

    return AfterValidator(validate)


def check_group(name: str) -> None:
    """A dispatcher group is a durable of `incoming`, beside the archive's."""
    check_name(name, "dispatcher group")
    if name == "archive":
        raise InvalidConfig("the group 'archive'", fix="choose another name: this durable is the archive's own")


class Settings(BaseSettings):
    """What can be chosen about a deployment. Every key is a flag, an environment variable and a key of the file."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True)

    data_dir: Annotated[Path, AfterValidator(Path.expanduser)] = Field(default_factory=default_data_dir)
    nats_url: Annotated[str, _ours(Address.parse)] | None = Field(default=None, repr=False)
    nats_credentials: Annotated[Path, AfterValidator(Path.expanduser)] | None = None
    replicas: Annotated[int, Field(ge=1, le=5)] = 1
    sync: Annotated[str, _ours(check_sync)] = "always"
    spark_master: Annotated[str, Field(min_length=1)] = "local[*]"
    dispatcher_group: Annotated[str, _ours(check_group)] = DEFAULT_GROUP
    transform_mapping: Annotated[Path, AfterValidator(Path.expanduser)] | None = None
    archive_seconds: Annotated[float, Field(gt=0, le=3600)] = 2.0

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags, then the environment, then the file."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    @property
    def nats_dir(self) -> Path:
        """The directory of the embedded server."""
        return self.data_dir / "nats"


def load(flags: Mapping[str, object], *, config: Path | None = None) -> Settings:
    """The settings in force. Raises InvalidConfig that names the key, the value and where it came from."""
    path = config if config is not None else Path(FILE_NAME)
    if config is not None and not config.is_file():
        raise InvalidConfig(f"the settings file {config} does not exist", fix="check --config")
    given: dict[str, Any] = {key: value for key, value in flags.items() if value is not None}

    class FromFile(Settings):
        model_config = SettingsConfigDict(toml_file=path)

    try:
        return FromFile(**given)
    except tomllib.TOMLDecodeError as error:
        raise InvalidConfig(f"{path} is not valid TOML: {error}", fix="mend it there") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path} cannot be read: {error}", fix="check the file") from None
    except ValidationError as error:
        raise _explain(error, given, path) from None


def refuse_secret_flag(nats_url: str | None) -> None:
    """A password or token in a flag shows in `ps`, in the shell's history and in logs of commands: refuse it."""
    if nats_url is not None and "@" in nats_url:
        raise InvalidInput(
            "--nats-url holds a user, password or token, and everyone on this machine can read flags with `ps`",
            fix="set the environment variable PURVEYOR_NATS_URL, or use --nats-credentials with a file",
        )


def _explain(error: ValidationError, flags: Mapping[str, object], path: Path) -> InvalidConfig:
    first = error.errors(include_url=False)[0]
    key = str(first["loc"][0]) if first["loc"] else "settings"
    if key in flags:
        origin = f"flag --{_FLAGS.get(key, key.replace('_', '-'))}"
    elif os.environ.get(PREFIX + key.upper()):
        origin = f"environment variable {PREFIX}{key.upper()}"
    else:
        origin = str(path)
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, list(Settings.model_fields), n=1)
        known = ", ".join(Settings.model_fields)
        return InvalidConfig(
            f"unknown key {key!r} (value {first['input']!r}) in {origin}",
            fix=f"did you mean {near[0]!r}?" if near else f"the keys are {known}",
        )
    value = "" if key in _SECRET else f" {first['input']!r}"
    return InvalidConfig(f"invalid {key}{value} from {origin}", fix=first["msg"].removeprefix("Value error, "))

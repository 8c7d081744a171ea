"""Settings, read once at the start: flags before `PURVEYOR_*` environment variables before `purveyor.toml`.

A mistake is told with the key, its value and the place it came from, so that people know which of the three to mend.
"""

import difflib
import os
import tomllib
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from purveyor.delivery.push.egress_policy import parse_ranges
from purveyor.jetstream.address import DEFAULT_INBOX, Address, Tls
from purveyor.jetstream.server.config import ServerTls, check_sync
from purveyor.model.errors import InvalidConfig, InvalidInput, PurveyorError
from purveyor.model.name_rules import check_name, check_subject, check_subscription_name
from purveyor.queues.catalogue import DEFAULT_GROUP

PREFIX = "PURVEYOR_"
DEFAULT_CONNECTIONS = 4096
FILE_NAME = "purveyor.toml"
_SHORTEST_LETTER_DAYS = 0.05
_SECRET = frozenset(
    {"nats_url", "database_url", "admin_password", "events_password", "prefill_password", "push_key", "publishers"}
)
_FLAGS = {
    "spark_master": "master",
    "dispatcher_group": "group",
    "transform_mapping": "mapping",
    "api_host": "host",
    "api_port": "port",
    "api_tls_cert": "tls-cert",
    "api_tls_key": "tls-key",
    "nats_subscription_users": "subscription-user",
    "push_allow": "allow",
    "push_per_host": "per-host",
    "database_url": "database",
}
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


def _words(value: Any) -> Any:
    """A list, or a text with commas, as an environment variable has it."""
    return [word.strip() for word in value.split(",") if word.strip()] if isinstance(value, str) else value


def check_username(name: str) -> None:
    """A user of the API: HTTP Basic ends it at a colon."""
    if not 0 < len(name) <= 128 or ":" in name or not name.isprintable():
        raise InvalidConfig(f"the user {name!r}", fix="use 1 to 128 printable characters without ':'")


def check_database_url(url: str) -> None:
    """A database that stages work with; the password in it is for nobody's eyes."""
    scheme, found, _ = url.partition("://")
    if not found or scheme.partition("+")[0] not in ("postgresql", "sqlite"):
        raise InvalidConfig("not a database of stages", fix="postgresql://user@host/name or sqlite:///file")


def check_collector(url: str) -> None:
    """Where traces go."""
    if not url.startswith(("http://", "https://")):
        raise InvalidConfig(f"{url!r} is no collector", fix="use http://host:4318, where it takes OTLP over HTTP")


class LogFormat(Enum):
    """How lines of logs look."""

    TEXT = "text"
    JSON = "json"


class LogLevel(Enum):
    """From which weight on there is a line."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


def check_letter_days(days: float) -> None:
    """A time to keep dead letters for: long enough that people see them."""
    if 0 < days < _SHORTEST_LETTER_DAYS:
        raise InvalidConfig(f"dead letters kept for {days:g} days", fix="give 0.05 or more, or 0 for no end")


Username = Annotated[str, _ours(check_username)]
Secret = Annotated[SecretStr, Field(min_length=1, max_length=1024)]
File = Annotated[Path, AfterValidator(Path.expanduser)]


class Publisher(BaseModel):
    """One more login that may publish events, into its realms alone."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    username: Username
    password: Secret | None = None
    password_env: Annotated[str, Field(min_length=1)] | None = None
    """The environment variable that holds the password, instead of the file."""
    realms: Annotated[tuple[str, ...], Field(min_length=1)]


class Settings(BaseSettings):
    """What can be chosen about a deployment. Every key is a flag, an environment variable and a key of the file."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True)

    data_dir: Annotated[Path, AfterValidator(Path.expanduser)] = Field(default_factory=default_data_dir)
    """Where data is kept: the embedded server's store, the archive, checkpoints, generated passwords, logs."""
    nats_url: Annotated[str, _ours(Address.parse)] | None = Field(default=None, repr=False)
    """A NATS server, or several parted by commas; unset: the embedded one."""
    nats_credentials: Annotated[Path, AfterValidator(Path.expanduser)] | None = None
    """A .creds or nkey seed file for it."""
    nats_inbox: Annotated[str, _ours(check_subject)] = DEFAULT_INBOX
    """How the subjects begin on which answers of the server come."""
    nats_tls_ca: File | None = None
    """Who is trusted to vouch for the NATS server (PEM)."""
    nats_tls_cert: File | None = None
    """The certificate that a client shows the NATS server (PEM)."""
    nats_tls_key: File | None = None
    """The key of that certificate."""
    nats_tls_hostname: Annotated[str, Field(min_length=1)] | None = None
    """The name that the server's certificate must have, if it is not that of its address."""
    nats_server_tls_cert: File | None = None
    """The certificate of the embedded server (PEM), which then speaks TLS."""
    nats_server_tls_key: File | None = None
    """The key of that certificate."""
    nats_subscription_users: tuple[Annotated[str, _ours(check_subscription_name)], ...] = ()
    """Subscriptions that the embedded server has a user of its own for."""
    replicas: Annotated[int, Field(ge=1, le=5)] = 1
    """How many servers of a cluster keep each queue."""
    migrate: bool = True
    """Whether a start may migrate a queue that cannot be updated in place."""
    sync: Annotated[str, _ours(check_sync)] = "always"
    """When the embedded server writes to disk: `always`, or a duration such as 2m."""
    database_url: Annotated[str, _ours(check_database_url)] | None = Field(default=None, repr=False)
    """The database of an application with stages, for the commands that look at both."""
    spark_master: Annotated[str, Field(min_length=1)] = "local[*]"
    """Where Spark runs."""
    spark_ui: bool = False
    """Whether Spark serves its own web pages; the console links to them."""
    dispatcher_group: Annotated[str, _ours(check_group)] = DEFAULT_GROUP
    """The durable by which this dispatcher reads `incoming`; each group gets all events."""
    transform_mapping: Annotated[Path, AfterValidator(Path.expanduser)] | None = None
    """How entries of a directory become objects (TOML); unset: as built in."""
    archive_seconds: Annotated[float, Field(gt=0, le=3600)] = 2.0
    """How often the archive writes, at most."""
    dead_letter_days: Annotated[float, Field(ge=0, le=36_500), _ours(check_letter_days)] | None = None
    """How long dead letters are kept; 0: for ever; unset: as the queue is set."""
    api_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Where the API listens."""
    api_port: Annotated[int, Field(ge=0, le=65535)] = 7777
    """The port of the API; 0: a free one."""
    api_tls_cert: File | None = None
    """The certificate of the API (PEM), for HTTPS."""
    api_tls_key: File | None = None
    """The key of that certificate."""
    api_connections: Annotated[int, Field(ge=16, le=1_000_000)] = DEFAULT_CONNECTIONS
    """How many connections an API process has open at most; one address that is no trusted proxy gets half of them."""
    trusted_proxies: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_words), _ours(parse_ranges)] = ()
    """Addresses or networks of proxies before the API: from them alone `X-Forwarded-For` and `-Proto` are taken."""
    console: bool = True
    """Whether the API serves the console at `/`."""
    push_allow: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_words), _ours(parse_ranges)] = ()
    """Address ranges that push may reach beyond public ones, and without TLS."""
    push_key: Secret | None = None
    """What secrets of push are encrypted with; None: a key in the data directory."""
    push_per_host: Annotated[int, Field(ge=1, le=10_000)] = 256
    """So many connections at a time go to one host."""
    admin_username: Username = "admin"
    """The login of administrators."""
    admin_password: Secret | None = None
    """Its password; unset: generated into passwords.toml of the data directory."""
    events_username: Username = "events"
    """The login of publishers."""
    events_password: Secret | None = None
    """Its password; unset: generated."""
    prefill_username: Username = "prefill"
    """The login of those who tell how far a prefill is."""
    prefill_password: Secret | None = None
    """Its password; unset: generated."""
    publishers: tuple[Publisher, ...] = ()
    """More logins that may publish, each into its realms alone."""
    metrics_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Where parts without an HTTP port of their own listen for Prometheus."""
    metrics_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Where parts without an HTTP port of their own answer Prometheus; None: nowhere."""
    log_format: LogFormat = LogFormat.TEXT
    """How lines of logs look."""
    log_level: LogLevel = LogLevel.WARNING
    """From which weight on there is a line."""
    otel_endpoint: Annotated[str, _ours(check_collector)] | None = None
    """An OpenTelemetry collector (OTLP over HTTP) that gets traces."""

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
    def nats_address(self) -> Address | None:
        """The server that is set; None: the embedded one."""
        if self.nats_url is None:
            return None
        _both("nats_tls_cert", self.nats_tls_cert, "nats_tls_key", self.nats_tls_key)
        tls = Tls(
            ca=self.nats_tls_ca,
            certificate=self.nats_tls_cert,
            key=self.nats_tls_key,
            hostname=self.nats_tls_hostname,
        )
        return Address.parse(
            self.nats_url,
            credentials=self.nats_credentials,
            tls=None if tls == Tls() else tls,
            inbox=self.nats_inbox,
        )

    @property
    def nats_server_tls(self) -> ServerTls | None:
        """The certificate of the embedded server; None: it speaks no TLS."""
        cert, key = self.nats_server_tls_cert, self.nats_server_tls_key
        _both("nats_server_tls_cert", cert, "nats_server_tls_key", key)
        if cert is None or key is None:
            return None
        return ServerTls(certificate=cert, key=key, ca=self.nats_tls_ca, hostname=self.nats_tls_hostname)

    @property
    def nats_dir(self) -> Path:
        """The directory of the embedded server."""
        return self.data_dir / "nats"


def _both(one: str, first: Path | None, other: str, second: Path | None) -> None:
    if (first is None) != (second is None):
        given, missing = (one, other) if second is None else (other, one)
        raise InvalidConfig(f"{given} without {missing}", fix="give both, or neither")


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


def refuse_secret_database(url: str | None) -> None:
    """The same for the URL of a database: one with a user is fine, one with a password is not."""
    if url is not None and ":" in url.partition("://")[2].rpartition("@")[0]:
        raise InvalidInput(
            "--database holds a password, and everyone on this machine can read flags with `ps`",
            fix="set the environment variable PURVEYOR_DATABASE_URL",
        )


def _explain(error: ValidationError, flags: Mapping[str, object], path: Path) -> InvalidConfig:
    first = error.errors(include_url=False)[0]
    key = str(first["loc"][0]) if first["loc"] else "settings"
    where = ".".join(map(str, first["loc"])) or key
    if key in flags:
        origin = f"flag --{_FLAGS.get(key, key.replace('_', '-'))}"
    elif os.environ.get(PREFIX + key.upper()):
        origin = f"environment variable {PREFIX}{key.upper()}"
    else:
        origin = str(path)
    if first["type"] == "extra_forbidden" and where == key:
        near = difflib.get_close_matches(key, list(Settings.model_fields), n=1)
        value = "" if _SECRET & {*near} else f" (value {first['input']!r})"
        known = ", ".join(Settings.model_fields)
        return InvalidConfig(
            f"unknown key {key!r}{value} in {origin}",
            fix=f"did you mean {near[0]!r}?" if near else f"the keys are {known}",
        )
    value = "" if key in _SECRET else f" {first['input']!r}"
    return InvalidConfig(f"invalid {where}{value} from {origin}", fix=first["msg"].removeprefix("Value error, "))

"""Settings, read once at the start: flags override `PURVEYOR_*` environment variables, which override `purveyor.toml`.

An error names the key, its value and its source, so that the user knows which of the three to correct.
"""

import difflib
import os
import tomllib
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from purveyor.app.ldap_settings import Base, Filter, LdapTable, SourceName, Uri
from purveyor.app.setting_types import File, Secret, validated_by
from purveyor.delivery.push.egress_policy import parse_ranges
from purveyor.jetstream.address import DEFAULT_INBOX, Address, Tls
from purveyor.jetstream.server.config import ServerTls, check_sync
from purveyor.jetstream.server.discovery import STORE_DIRECTORY, default_data_dir
from purveyor.model.errors import InvalidConfig, InvalidInput
from purveyor.model.name_rules import check_name, check_subject, check_subscription_name
from purveyor.queues.catalogue import DEFAULT_GROUP
from purveyor.sources.ldap.directory import DEFAULT_ACCESSLOG_BASE, DEFAULT_FILTER, DEFAULT_SOURCE, Mode

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

PREFIX = "PURVEYOR_"
DEFAULT_CONNECTIONS = 4096
MAX_API_WORKERS = 64
FILE_NAME = "purveyor.toml"
_MIN_DEAD_LETTER_DAYS = 0.05
_SECRET = frozenset(
    {
        "nats_url",
        "database_url",
        "api_url",
        "api_password",
        "api_token",
        "admin_password",
        "events_password",
        "prefill_password",
        "push_key",
        "publishers",
        "ldap_uri",
        "ldap_password",
        "ldap",
    }
)
_FLAGS = {
    "spark_master": "master",
    "dispatcher_group": "group",
    "api_host": "host",
    "api_port": "port",
    "api_workers": "workers",
    "api_tls_cert": "tls-cert",
    "api_tls_key": "tls-key",
    "api_url": "api",
    "api_username": "api-user",
    "nats_subscription_users": "subscription-user",
    "push_allow": "allow",
    "push_per_host": "per-host",
    "database_url": "database",
    "ldap_uri": "uri",
    "ldap_base": "base",
    "ldap_bind_dn": "bind-dn",
    "ldap_password_file": "password-file",
    "ldap_filter": "filter",
    "ldap_source": "source",
    "ldap_mode": "mode",
    "ldap_accesslog_base": "accesslog-base",
    "ldap_tls_ca": "tls-ca",
    "ldap_starttls": "starttls",
}
"""Flags with a shorter name than their key: their command gives the context."""
_RENAMED = {"transform_mapping": "mapping"}
"""Keys of earlier versions, with their new names."""


def check_group(name: str) -> None:
    """Check a dispatcher group. It is a durable of `incoming` and must not have the name of the archive's durable."""
    check_name(name, "dispatcher group")
    if name == "archive":
        raise InvalidConfig("the group 'archive'", fix="choose another name: the archive uses this durable")


def _split_commas(value: Any) -> Any:
    """Split a text at commas (environment variables); return a list unchanged."""
    return [word.strip() for word in value.split(",") if word.strip()] if isinstance(value, str) else value


def check_username(name: str) -> None:
    """Check a user name of the API: HTTP Basic ends it at a colon."""
    if not 0 < len(name) <= 128 or ":" in name or not name.isprintable():
        raise InvalidConfig(f"the user {name!r}", fix="use 1 to 128 printable characters without ':'")


def check_api_url(url: str) -> None:
    """Check the URL of an API. The error does not contain the URL, which may hold a password."""
    wrong = InvalidConfig("not the URL of an API", fix="use http://host:port or https://host:port")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:  # unbalanced brackets, or a port that is not a number
        raise wrong from None
    if "@" in parts.netloc:
        raise InvalidConfig("a URL with a user", fix="leave the user out; set api_username and api_password")
    if not host or parts.scheme not in ("http", "https") or parts.query or parts.fragment or not url.isprintable():
        raise wrong


def check_database_url(url: str) -> None:
    """Check the URL of a stage database. The error does not contain the URL, which may hold a password."""
    scheme, found, _ = url.partition("://")
    if not found or scheme.partition("+")[0] not in ("postgresql", "sqlite"):
        raise InvalidConfig("not a database for stages", fix="use postgresql://user@host/name or sqlite:///file")


def check_collector(url: str) -> None:
    """Check the URL of a trace collector."""
    if not url.startswith(("http://", "https://")):
        raise InvalidConfig(f"{url!r} is not a collector", fix="use an OTLP over HTTP address such as http://host:4318")


class LogFormat(Enum):
    """The format of log lines."""

    TEXT = "text"
    JSON = "json"


class LogLevel(Enum):
    """The lowest level that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


def check_dead_letter_days(days: float) -> None:
    """Check how long to keep dead letters: long enough that an operator sees them."""
    if 0 < days < _MIN_DEAD_LETTER_DAYS:
        raise InvalidConfig(f"dead letters kept for {days:g} days", fix="give 0.05 or more, or 0 for no limit")


Username = Annotated[str, validated_by(check_username)]


class Publisher(BaseModel):
    """An additional login that may publish events into its realms only."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    username: Username
    password: Secret | None = None
    password_env: Annotated[str, Field(min_length=1)] | None = None
    """The environment variable with the password, to keep it out of the file."""
    realms: Annotated[tuple[str, ...], Field(min_length=1)]


class Settings(BaseSettings):
    """The settings of a deployment. Every key is a flag, an environment variable and a key of the file."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_ignore_empty=True, extra="forbid", frozen=True)

    data_dir: Annotated[Path, AfterValidator(Path.expanduser)] = Field(default_factory=default_data_dir)
    """The data directory: the embedded server's store, the archive, checkpoints, generated passwords, logs."""
    nats_url: Annotated[str, validated_by(Address.parse)] | None = Field(default=None, repr=False)
    """The NATS server, or several separated by commas; unset: the embedded one."""
    nats_credentials: Annotated[Path, AfterValidator(Path.expanduser)] | None = None
    """A .creds or nkey seed file for the NATS server."""
    nats_inbox: Annotated[str, validated_by(check_subject)] = DEFAULT_INBOX
    """The subject prefix for replies of the NATS server."""
    nats_tls_ca: File | None = None
    """The certificate authority of the NATS server (PEM)."""
    nats_tls_cert: File | None = None
    """The client certificate for the NATS server (PEM)."""
    nats_tls_key: File | None = None
    """The key of that certificate."""
    nats_tls_hostname: Annotated[str, Field(min_length=1)] | None = None
    """The name in the server's certificate, if it differs from its address."""
    nats_server_tls_cert: File | None = None
    """The certificate of the embedded server (PEM), which enables TLS."""
    nats_server_tls_key: File | None = None
    """The key of that certificate."""
    nats_subscription_users: tuple[Annotated[str, validated_by(check_subscription_name)], ...] = ()
    """Subscriptions for which the embedded server has a separate user."""
    replicas: Annotated[int, Field(ge=1, le=5)] = 1
    """The number of cluster servers that store each queue."""
    migrate: bool = True
    """Whether a process may migrate a queue at its start if the queue cannot be updated in place."""
    sync: Annotated[str, validated_by(check_sync)] = "always"
    """When the embedded server syncs to disk: `always`, or a duration such as 2m."""
    database_url: Annotated[str, validated_by(check_database_url)] | None = Field(default=None, repr=False)
    """The database of an application with stages, for the commands that read it."""
    spark_master: Annotated[str, Field(min_length=1)] = "local[*]"
    """The Spark master."""
    standby: bool = False
    """Whether `up` runs a second pipeline that takes over within seconds when the first one dies."""
    warm_up: bool = True
    """Whether the pipeline runs batches on queues of its own before it is ready: then the first event is quick."""
    spark_ui: bool = False
    """Whether Spark serves its own web interface; the console links to it."""
    dispatcher_group: Annotated[str, validated_by(check_group)] = DEFAULT_GROUP
    """The durable with which this dispatcher reads `incoming`; each group gets all events."""
    mapping: Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)] = "udm"
    """How directory entries become objects: the built-in mapping `udm` or `plain`, or a file (TOML)."""
    archive_seconds: Annotated[float, Field(gt=0, le=3600)] = 2.0
    """The minimum time between two writes of the archive."""
    dead_letter_days: Annotated[float, Field(ge=0, le=36_500), validated_by(check_dead_letter_days)] | None = None
    """How long to keep dead letters; 0: for ever; unset: as the queue is configured."""
    api_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """The address of the API."""
    api_port: Annotated[int, Field(ge=0, le=65535)] = 7777
    """The port of the API; 0: a free one."""
    api_workers: Annotated[int, Field(ge=1, le=MAX_API_WORKERS)] = 1
    """The number of API processes that share the port."""
    api_tls_cert: File | None = None
    """The certificate of the API (PEM), for HTTPS."""
    api_tls_key: File | None = None
    """The key of that certificate."""
    api_url: Annotated[str, validated_by(check_api_url)] | None = Field(default=None, repr=False)
    """For commands: the URL of an API that they use instead of the NATS server, if it offers what they do."""
    api_username: Username | None = None
    """For commands: the login at that API, such as `admin`, `events` or the name of a subscription."""
    api_password: Secret | None = None
    """Its password."""
    api_password_file: File | None = None
    """A file with the password in its first line."""
    api_token: Secret | None = None
    """For commands: a token of the API, in place of a user and password."""
    api_token_file: File | None = None
    """A file with the token in its first line."""
    api_tls_ca: File | None = None
    """For commands: the certificate authority of that API (PEM); unset: those of the system."""
    api_connections: Annotated[int, Field(ge=16, le=1_000_000)] = DEFAULT_CONNECTIONS
    """The maximum number of open connections of an API process; one address that is no trusted proxy gets half."""
    trusted_proxies: Annotated[
        tuple[str, ...], NoDecode, BeforeValidator(_split_commas), validated_by(parse_ranges)
    ] = ()
    """Addresses or networks of proxies in front of the API: only their `X-Forwarded-For` and `-Proto` are trusted."""
    console: bool = True
    """Whether the API serves the console at `/`."""
    push_allow: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_commas), validated_by(parse_ranges)] = ()
    """Address ranges that push may reach in addition to public ones, also without TLS."""
    push_key: Secret | None = None
    """The key that encrypts the secrets of push; unset: a key in the data directory."""
    push_per_host: Annotated[int, Field(ge=1, le=10_000)] = 256
    """The maximum number of push connections to one host."""
    admin_username: Username = "admin"
    """The login of administrators."""
    admin_password: Secret | None = None
    """Its password; unset: generated into passwords.toml of the data directory."""
    events_username: Username = "events"
    """The login of publishers."""
    events_password: Secret | None = None
    """Its password; unset: generated."""
    prefill_username: Username = "prefill"
    """The login that reports the status of prefills."""
    prefill_password: Secret | None = None
    """Its password; unset: generated."""
    publishers: tuple[Publisher, ...] = ()
    """Additional logins that may publish, each into its realms only."""
    ldap_uri: Uri | None = None
    """The directory to follow, ldap://host:port or ldaps://host:port; unset: none."""
    ldap_base: Base | None = None
    """The entry below which to read, such as dc=example,dc=org."""
    ldap_bind_dn: Base | None = None
    """The account to bind with; unset: anonymous."""
    ldap_password: Secret | None = None
    """Its password."""
    ldap_password_file: File | None = None
    """A file with the password in its first line."""
    ldap_filter: Filter = DEFAULT_FILTER
    """Which entries to read."""
    ldap_source: SourceName = DEFAULT_SOURCE
    """The name of the source."""
    ldap_mode: Mode = Mode.AUTO
    """How to read changes: `accesslog`, `syncrepl`, or `auto` for what the server has."""
    ldap_accesslog_base: Base = DEFAULT_ACCESSLOG_BASE
    """The entry of the accesslog."""
    ldap_tls_ca: File | None = None
    """The certificate authority of the directory (PEM); unset: those of the system."""
    ldap_starttls: bool = False
    """Whether to use StartTLS on an ldap:// connection."""
    ldap: tuple[LdapTable, ...] = ()
    """Several directories, as `[[ldap]]` tables of the file."""
    metrics_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """The address of the metrics port of processes other than the API."""
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = None
    """The metrics port of processes other than the API; 0: a free one, whose page the API includes; unset: none."""
    log_format: LogFormat = LogFormat.TEXT
    """The format of log lines."""
    log_level: LogLevel = LogLevel.WARNING
    """The lowest level that is logged."""
    otel_endpoint: Annotated[str, validated_by(check_collector)] | None = None
    """The OpenTelemetry collector (OTLP over HTTP) for traces."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources in order of precedence: flags, environment, file."""
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)

    @property
    def nats_address(self) -> Address | None:
        """The configured NATS server; None: the embedded one."""
        if self.nats_url is None:
            return None
        _require_both("nats_tls_cert", self.nats_tls_cert, "nats_tls_key", self.nats_tls_key)
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
        """The certificate of the embedded server; None: it does not use TLS."""
        cert, key = self.nats_server_tls_cert, self.nats_server_tls_key
        _require_both("nats_server_tls_cert", cert, "nats_server_tls_key", key)
        if cert is None or key is None:
            return None
        return ServerTls(certificate=cert, key=key, ca=self.nats_tls_ca, hostname=self.nats_tls_hostname)

    @property
    def nats_dir(self) -> Path:
        """The directory of the embedded server."""
        return self.data_dir / STORE_DIRECTORY


def _require_both(one: str, first: Path | None, other: str, second: Path | None) -> None:
    if (first is None) != (second is None):
        given, missing = (one, other) if second is None else (other, one)
        raise InvalidConfig(f"{given} without {missing}", fix="set both, or neither")


def load(flags: Mapping[str, object], *, config: Path | None = None) -> Settings:
    """Return the settings. Raise InvalidConfig with the key, the value and its source."""
    path = config if config is not None else Path(FILE_NAME)
    if config is not None and not config.is_file():
        raise InvalidConfig(f"the settings file {config} does not exist", fix="check --config")
    given: dict[str, Any] = {key: value for key, value in flags.items() if value is not None}
    for former, key in _RENAMED.items():
        if os.environ.get(PREFIX + former.upper()):
            raise _renamed(f"the environment variable {PREFIX}{former.upper()}", PREFIX + key.upper())

    class FromFile(Settings):
        model_config = SettingsConfigDict(toml_file=path)

    try:
        return FromFile(**given)
    except tomllib.TOMLDecodeError as error:
        raise InvalidConfig(f"{path} is not valid TOML: {error}", fix="correct the file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"cannot read {path}: {error}", fix="check the file") from None
    except ValidationError as error:
        raise _explain(error, given, path) from None


def _renamed(what: str, name: str) -> InvalidConfig:
    return InvalidConfig(f"{what} has a new name", fix=f"use {name}")


def refuse_secret_flag(nats_url: str | None, api_url: str | None = None) -> None:
    """Refuse a password or token in a flag: it would show in `ps`, in the shell's history and in command logs."""
    if api_url is not None and "@" in api_url:
        raise InvalidInput(
            "--api holds a user, and everyone on this machine can read flags with `ps`",
            fix="give the URL without it, --api-user, and PURVEYOR_API_PASSWORD or --api-password-file",
        )
    if nats_url is not None and "@" in nats_url:
        raise InvalidInput(
            "--nats-url holds a user, password or token, and everyone on this machine can read flags with `ps`",
            fix="set the environment variable PURVEYOR_NATS_URL, or use --nats-credentials with a file",
        )


def refuse_secret_database(url: str | None) -> None:
    """Refuse a database URL with a password in a flag. A URL with only a user is allowed."""
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
        if key in _RENAMED:
            return _renamed(f"the key {key!r} in {origin}", repr(_RENAMED[key]))
        near = difflib.get_close_matches(key, list(Settings.model_fields), n=1)
        value = "" if _SECRET & {*near} else f" (value {first['input']!r})"
        known = ", ".join(Settings.model_fields)
        return InvalidConfig(
            f"unknown key {key!r}{value} in {origin}",
            fix=f"did you mean {near[0]!r}?" if near else f"the keys are {known}",
        )
    if key == "ldap" and len(first["loc"]) > 1:
        return _explain_table(first, origin)
    value = "" if key in _SECRET else f" {first['input']!r}"
    return InvalidConfig(f"invalid {where}{value} from {origin}", fix=first["msg"].removeprefix("Value error, "))


def _explain_table(first: "ErrorDetails", origin: str) -> InvalidConfig:
    """Explain an error in a `[[ldap]]` table, without its value, which may be a password."""
    where = f"[[ldap]] table {int(first['loc'][1]) + 1} from {origin}"
    name = str(first["loc"][2]) if len(first["loc"]) > 2 else ""
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, list(LdapTable.model_fields), n=1)
        known = f"the keys are {', '.join(LdapTable.model_fields)}"
        return InvalidConfig(f"unknown key {name!r} in {where}", fix=f"did you mean {near[0]!r}?" if near else known)
    if first["type"] == "missing":
        return InvalidConfig(f"no {name!r} in {where}", fix=f"add {name!r}")
    return InvalidConfig(f"invalid {name or 'table'} in {where}", fix=first["msg"].removeprefix("Value error, "))

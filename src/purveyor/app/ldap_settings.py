"""The directories that the settings name: one by `ldap_...` keys, and any number of `[[ldap]]` tables of the file."""

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

from purveyor.app.setting_types import File, Secret, validated_by
from purveyor.model.errors import InvalidConfig
from purveyor.sources.ldap.directory import (
    DEFAULT_ACCESSLOG_BASE,
    DEFAULT_FILTER,
    DEFAULT_SOURCE,
    Directory,
    Mode,
    check_base,
    check_filter,
    check_source_name,
    check_uri,
)

if TYPE_CHECKING:
    from purveyor.app.settings import Settings

Uri = Annotated[str, validated_by(check_uri)]
Base = Annotated[str, validated_by(check_base)]
Filter = Annotated[str, validated_by(check_filter)]
SourceName = Annotated[str, validated_by(check_source_name)]
_MOST_PASSWORD_BYTES: Final = 1024
_OTHER_KEYS: Final = (
    "base",
    "bind_dn",
    "password",
    "password_file",
    "filter",
    "source",
    "mode",
    "accesslog_base",
    "tls_ca",
    "starttls",
)


class LdapTable(BaseModel):
    """A directory in a `[[ldap]]` table."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    uri: Uri
    base: Base
    source: SourceName = DEFAULT_SOURCE
    bind_dn: Base | None = None
    password: Secret | None = None
    password_env: Annotated[str, Field(min_length=1)] | None = None
    """The environment variable with the password, to keep it out of the file."""
    password_file: File | None = None
    filter: Filter = DEFAULT_FILTER
    mode: Mode = Mode.AUTO
    accesslog_base: Base = DEFAULT_ACCESSLOG_BASE
    tls_ca: File | None = None
    starttls: bool = False


def has_directories(settings: "Settings") -> bool:
    """Return whether the settings name a directory."""
    return settings.ldap_uri is not None or bool(settings.ldap)


def find_directories(settings: "Settings") -> tuple[Directory, ...]:
    """Return the directories, with their passwords; raise InvalidConfig if the settings contradict each other."""
    found = [_directory(table, f"the [[ldap]] table of source {table.source!r}") for table in settings.ldap]
    if settings.ldap_uri is not None:
        if settings.ldap_base is None:
            raise InvalidConfig(
                "ldap_uri without ldap_base", fix="give --base or set PURVEYOR_LDAP_BASE, such as dc=example,dc=org"
            )
        table = LdapTable.model_construct(
            uri=settings.ldap_uri,
            base=settings.ldap_base,
            source=settings.ldap_source,
            bind_dn=settings.ldap_bind_dn,
            password=settings.ldap_password,
            password_file=settings.ldap_password_file,
            filter=settings.ldap_filter,
            mode=settings.ldap_mode,
            accesslog_base=settings.ldap_accesslog_base,
            tls_ca=settings.ldap_tls_ca,
            starttls=settings.ldap_starttls,
        )
        found.insert(0, _directory(table, "the settings ldap_..."))
    else:
        alone = [key for key in _OTHER_KEYS if f"ldap_{key}" in settings.model_fields_set]
        if alone:
            raise InvalidConfig(f"ldap_{alone[0]} without ldap_uri", fix="give --uri or set PURVEYOR_LDAP_URI as well")
    names = Counter(directory.source for directory in found)
    twice = next((name for name, count in names.items() if count > 1), None)
    if twice is not None:
        raise InvalidConfig(
            f"{names[twice]} directories have the source name {twice!r}",
            fix="give each [[ldap]] table its own `source`",
        )
    return tuple(found)


def _directory(table: LdapTable, where: str) -> Directory:
    password = _password(table, where)
    if (table.bind_dn is None) != (password is None):
        given, missing = ("a password", "a bind DN") if table.bind_dn is None else ("a bind DN", "a password")
        raise InvalidConfig(
            f"{where}: {given} without {missing}",
            fix="set both, the password in the environment or in a file, or neither for an anonymous bind",
        )
    if table.starttls and table.uri.startswith("ldaps:"):
        raise InvalidConfig(f"{where}: StartTLS on ldaps://", fix="use ldap:// with StartTLS, or ldaps:// without it")
    return Directory(
        uri=table.uri,
        base=table.base,
        source=table.source,
        bind_dn=table.bind_dn,
        password=password,
        filter=table.filter,
        mode=table.mode,
        accesslog_base=table.accesslog_base,
        tls_ca=table.tls_ca,
        starttls=table.starttls,
    )


def _password(table: LdapTable, where: str) -> str | None:
    given = [key for key in ("password", "password_env", "password_file") if getattr(table, key) is not None]
    if len(given) > 1:
        raise InvalidConfig(f"{where}: {' and '.join(given)} are set", fix="set one of them")
    if table.password is not None:
        return table.password.get_secret_value()
    if table.password_env is not None:
        value = os.environ.get(table.password_env)
        if not value:
            raise InvalidConfig(f"{where}: {table.password_env} is not set", fix="set it to the password")
        return value
    return None if table.password_file is None else _read_password(table.password_file, where)


def _read_password(file: Path, where: str) -> str:
    try:
        with file.open(encoding="utf-8") as lines:
            password = lines.readline(_MOST_PASSWORD_BYTES + 2).rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{where}: no password can be read from {file}: {error}", fix="check the file") from None
    if not 0 < len(password) <= _MOST_PASSWORD_BYTES:
        raise InvalidConfig(f"{where}: the first line of {file} holds no password", fix="write it there, alone")
    return password

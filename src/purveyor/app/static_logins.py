"""The logins of the API from the settings. A password that is not set is generated once and stored in a file.

The file is `passwords.toml` in the data directory, readable by its owner only. If other machines can reach the address
of the API, every password must be set: a generated password must not protect a public API unnoticed.
"""

import ipaddress
import os
import secrets
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from purveyor.app.http.authentication import Login, Role
from purveyor.app.settings import Publisher, Settings
from purveyor.model.errors import InvalidConfig, SetupError
from purveyor.model.file_lock import FileLock

FILE_NAME: Final = "passwords.toml"
_HEADER: Final = "# Generated passwords of the API. Keep this file private.\n"
_ROLES: Final = (Role.ADMIN, Role.EVENTS, Role.PREFILL)


@dataclass(frozen=True, slots=True)
class StaticLogins:
    """All logins of the settings, and the file with generated passwords if there are any."""

    logins: tuple[Login, ...]
    file: Path | None = None


def check_logins(settings: Settings) -> None:
    """Raise InvalidConfig if a required password is missing. Generate nothing."""
    missing = [role for role in _ROLES if _configured(settings, role) is None]
    if missing and not is_loopback(settings.api_host):
        names = ", ".join(f"PURVEYOR_{role.name}_PASSWORD" for role in missing)
        raise InvalidConfig(
            f"other machines can reach the API at {settings.api_host}, and not every password is set",
            fix=f"set {names}",
        )


def load_logins(settings: Settings) -> StaticLogins:
    """Return the logins; generate missing passwords. Raise InvalidConfig if settings are missing or conflict."""
    check_logins(settings)
    configured = {role: _configured(settings, role) for role in _ROLES}
    missing = [role for role in _ROLES if configured[role] is None]
    file = settings.data_dir / FILE_NAME if missing else None
    generated = {} if file is None else _read_or_generate(file, [_key(role) for role in missing])
    found = [
        Login(
            role=role,
            username=str(getattr(settings, f"{role.value}_username")),
            password=configured[role] or generated[_key(role)],
        )
        for role in _ROLES
    ]
    found += [_publisher_login(each) for each in settings.publishers]
    names_seen: set[str] = set()
    for login in found:
        if login.username in names_seen:
            raise InvalidConfig(f"two logins have the name {login.username!r}", fix="give each login its own name")
        names_seen.add(login.username)
    return StaticLogins(tuple(found), file)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("0.0.0.0"), is_loopback("example.org")
    (True, True, False, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _configured(settings: Settings, role: Role) -> str | None:
    found = getattr(settings, _key(role))
    return None if found is None else str(found.get_secret_value())


def _key(role: Role) -> str:
    return f"{role.value}_password"


def _publisher_login(given: Publisher) -> Login:
    if (given.password is None) == (given.password_env is None):
        raise InvalidConfig(
            f"publisher {given.username!r} has no password, or two", fix="set either password or password_env"
        )
    if given.password is not None:
        password = given.password.get_secret_value()
    else:
        password = os.environ.get(given.password_env or "", "")
        if not password:
            raise InvalidConfig(
                f"the password of publisher {given.username!r} is not set", fix=f"set {given.password_env}"
            )
    return Login(role=Role.EVENTS, username=given.username, password=password, realms=frozenset(given.realms))


def _read_or_generate(file: Path, keys: Iterable[str]) -> dict[str, str]:
    """Return the passwords of the file; generate missing ones. A lock lets one of several processes write."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(file.with_suffix(".lock")):
            known = _read(file)
            more = {key: secrets.token_urlsafe(24) for key in keys if key not in known}
            if more:
                known |= more
                _write(file, known)
            return known
    except OSError as error:
        raise SetupError(
            f"cannot store passwords in {file}: {error.strerror}",
            fix="set PURVEYOR_ADMIN_PASSWORD and the others",
        ) from error


def _read(file: Path) -> dict[str, str]:
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidConfig(
            f"{file} is not valid TOML: {error}", fix="correct it, or remove it to generate new passwords"
        ) from None
    if file.stat().st_mode & 0o077:
        raise SetupError(f"other users can read {file}", fix=f"change the passwords, or chmod 600 {file}")
    return {key: value for key, value in found.items() if isinstance(value, str) and value}


def _write(file: Path, passwords: dict[str, str]) -> None:
    new = file.with_suffix(".new")
    new.unlink(missing_ok=True)
    lines = "".join(f'{key} = "{value}"\n' for key, value in sorted(passwords.items()))
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
        out.write(_HEADER + lines)
        out.flush()
        os.fsync(out.fileno())
    new.replace(file)

"""The logins of the API from the settings; passwords that are set nowhere are generated once and kept in a file.

The file is `passwords.toml` in the data directory, for its owner alone. On an address that others can reach every
password must be set: nobody should find an open door with a key that they never chose.
"""

import fcntl
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

FILE_NAME: Final = "passwords.toml"
_HEADER: Final = "# Passwords of the API that were set nowhere else. Keep this file to yourself.\n"
_ROLES: Final = (Role.ADMIN, Role.EVENTS, Role.PREFILL)


@dataclass(frozen=True, slots=True)
class Logins:
    """All logins of the settings, and the file with generated passwords if one is in use."""

    logins: tuple[Login, ...]
    file: Path | None = None


def check_logins(settings: Settings) -> None:
    """InvalidConfig if a password is missing that must be set. Nothing is generated."""
    missing = [role for role in _ROLES if _given(settings, role) is None]
    if missing and not is_loopback(settings.api_host):
        names = ", ".join(f"PURVEYOR_{role.name}_PASSWORD" for role in missing)
        raise InvalidConfig(
            f"the API at {settings.api_host} can be reached by others, and not every password is set",
            fix=f"set {names}",
        )


def logins_of(settings: Settings) -> Logins:
    """The logins; InvalidConfig tells what is missing or contradicts itself."""
    check_logins(settings)
    given = {role: _given(settings, role) for role in _ROLES}
    missing = [role for role in _ROLES if given[role] is None]
    file = settings.data_dir / FILE_NAME if missing else None
    generated = {} if file is None else _generated(file, [_key(role) for role in missing])
    found = [
        Login(
            role=role,
            username=str(getattr(settings, f"{role.value}_username")),
            password=given[role] or generated[_key(role)],
        )
        for role in _ROLES
    ]
    found += [_publisher(each) for each in settings.publishers]
    names_seen: set[str] = set()
    for login in found:
        if login.username in names_seen:
            raise InvalidConfig(f"two logins are called {login.username!r}", fix="give each a name of its own")
        names_seen.add(login.username)
    return Logins(tuple(found), file)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("0.0.0.0"), is_loopback("example.org")
    (True, True, False, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _given(settings: Settings, role: Role) -> str | None:
    found = getattr(settings, _key(role))
    return None if found is None else str(found.get_secret_value())


def _key(role: Role) -> str:
    return f"{role.value}_password"


def _publisher(given: Publisher) -> Login:
    if (given.password is None) == (given.password_env is None):
        raise InvalidConfig(
            f"publisher {given.username!r} has no password, or two", fix="give it password or password_env"
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


def _generated(file: Path, keys: Iterable[str]) -> dict[str, str]:
    """The passwords in the file; those that are missing are added. Of processes that start at once one writes."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(file.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            known = _read(file)
            more = {key: secrets.token_urlsafe(24) for key in keys if key not in known}
            if more:
                known |= more
                _write(file, known)
            return known
        finally:
            os.close(lock)
    except OSError as error:
        raise SetupError(
            f"the passwords in {file} cannot be kept: {error.strerror}",
            fix="set PURVEYOR_ADMIN_PASSWORD and the others",
        ) from error


def _read(file: Path) -> dict[str, str]:
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{file} is not valid TOML: {error}", fix="mend it, or remove it for new ones") from None
    if file.stat().st_mode & 0o077:
        raise SetupError(f"others can read {file}", fix=f"change the passwords, or chmod 600 {file}")
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

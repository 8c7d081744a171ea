"""Find the server without an address from the caller: from the environment, else in the data directory.

The variables are those of the settings of Purveyor, so a program in the same environment finds the same server:

    PURVEYOR_NATS_URL            nats://[user:password@]host:port[,...]
    PURVEYOR_NATS_CREDENTIALS    a .creds or nkey seed file
    PURVEYOR_NATS_INBOX          the prefix of the subjects for replies
    PURVEYOR_NATS_TLS_CA, _CERT, _KEY, _HOSTNAME
    PURVEYOR_DATA_DIR            without a URL: the data directory, whose embedded server runs on this machine
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from purveyor.jetstream.address import DEFAULT_INBOX, Address, Tls
from purveyor.jetstream.server.files import find_running_server
from purveyor.model.errors import ServerMissing

NATS_URL: Final = "PURVEYOR_NATS_URL"
DATA_DIR: Final = "PURVEYOR_DATA_DIR"
_OTHER_VARIABLES: Final = (
    "PURVEYOR_NATS_CREDENTIALS",
    "PURVEYOR_NATS_INBOX",
    *(f"PURVEYOR_NATS_TLS_{name}" for name in ("CA", "CERT", "KEY", "HOSTNAME")),
    "XDG_DATA_HOME",
)
STORE_DIRECTORY: Final = "nats"
"""The directory of the embedded server in the data directory."""


def default_data_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the default data directory: the data home of the XDG convention."""
    home = environment.get("XDG_DATA_HOME", "")
    return (Path(home) if Path(home).is_absolute() else Path.home() / ".local" / "share") / "purveyor"


def find_server_address(environment: Mapping[str, str] = os.environ) -> Address:
    """Return the address of the server that the environment names; ServerMissing says what to set."""
    url = environment.get(NATS_URL)
    if url:
        return Address.parse(
            url,
            credentials=environment.get("PURVEYOR_NATS_CREDENTIALS") or None,
            tls=_tls(environment),
            inbox=environment.get("PURVEYOR_NATS_INBOX") or DEFAULT_INBOX,
        )
    given = environment.get(DATA_DIR)
    data_dir = Path(given).expanduser() if given else default_data_dir(environment)
    found = find_running_server(data_dir / STORE_DIRECTORY)
    if found is None:
        raise ServerMissing(
            f"no NATS server is given, {NATS_URL} is not set, and no embedded server runs on {data_dir.absolute()}",
            fix=f"set {NATS_URL}, or {DATA_DIR} to the data directory of a running `purveyor up`, or give the address",
        )
    return found


def discovery_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that `find_server_address` reads, for a program that starts others."""
    found = {name: environment[name] for name in (NATS_URL, DATA_DIR, *_OTHER_VARIABLES) if name in environment}
    if found.get(DATA_DIR):
        found[DATA_DIR] = str(Path(found[DATA_DIR]).expanduser().absolute())
    return found


def _tls(environment: Mapping[str, str]) -> Tls | None:
    def path(name: str) -> Path | None:
        value = environment.get(f"PURVEYOR_NATS_TLS_{name}")
        return Path(value).expanduser() if value else None

    tls = Tls(
        ca=path("CA"),
        certificate=path("CERT"),
        key=path("KEY"),
        hostname=environment.get("PURVEYOR_NATS_TLS_HOSTNAME") or None,
    )
    return None if tls == Tls() else tls

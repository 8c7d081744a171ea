"""The files beside the store of an embedded server: their names, and how they are written and read.

    <directory>/            mode 700
      jetstream/            the store, which nats-server fills
      nats.conf             its configuration, with the password
      nats.log              its log; nats.log.1 is the previous one
      nats.lock             locked by the owner of the store, with a note about it
      nats.pid              the process id of the server
      nats.json             the port file: the address of the server, for other processes of the same user
      password              of the administrator; kept between runs
      password.<user>       of each other user: a part that runs under its own user needs only this one

Each file has mode 600 and is replaced atomically, so that a reader never sees half of one, also after a crash.
"""

import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from purveyor.model.errors import SetupError

LOG_LIMIT_BYTES = 10 * 1024 * 1024
_PRIVATE = 0o600
_TAIL_BYTES = 16 * 1024
_OPTIONAL = ("tls_ca", "tls_hostname")


@dataclass(frozen=True, slots=True)
class PortFile:
    """The address of the server of a store, for other processes."""

    url: str
    port: int
    server_pid: int
    supervisor_pid: int
    user: str
    started_at: str
    tls_ca: str | None = None
    """The CA certificate to trust, if the server uses TLS."""
    tls_hostname: str | None = None


@dataclass(frozen=True, slots=True)
class Files:
    """The files of one store directory."""

    directory: Path

    @property
    def lock(self) -> Path:
        """The lock file of the owner of the store."""
        return self.directory / "nats.lock"

    @property
    def store(self) -> Path:
        """The data of nats-server."""
        return self.directory / "jetstream"

    @property
    def config(self) -> Path:
        """The configuration of the server."""
        return self.directory / "nats.conf"

    @property
    def log(self) -> Path:
        """The log of the server."""
        return self.directory / "nats.log"

    @property
    def pid(self) -> Path:
        """The process id of the server."""
        return self.directory / "nats.pid"

    @property
    def port(self) -> Path:
        """The port file."""
        return self.directory / "nats.json"

    @property
    def password(self) -> Path:
        """The password of the administrator."""
        return self.directory / "password"

    def password_of(self, user: str | None) -> Path:
        """Return the password file of a user; None is the administrator."""
        return self.password if user is None else self.directory / f"password.{user}"

    def prepare(self) -> None:
        """Create the directory, for its owner only.

        A directory with other files keeps its mode, because other users may need to enter it: our files are private by
        themselves. A directory that every user may write to is refused, because its files could be forged.
        """
        with translate_os_errors(self.directory):
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            is_ours = self.lock.exists() or not any(self.directory.iterdir())
            if is_ours:
                self.directory.chmod(0o700)
            elif self.directory.stat().st_mode & stat.S_IWOTH:
                raise SetupError(
                    f"every user may write to {self.directory}", fix="choose a directory that only the server uses"
                )

    def write_config(self, text: str) -> None:
        """Write nats.conf."""
        _write(self.config, text)

    def write_ports(self, ports: PortFile) -> None:
        """Write the port file and the pid file."""
        _write(self.pid, f"{ports.server_pid}\n")
        _write(self.port, json.dumps(asdict(ports), indent=2) + "\n")

    def read_ports(self) -> PortFile | None:
        """Read the port file of the current or last run; None if there was none. SetupError if the file is damaged."""
        with translate_os_errors(self.port):
            try:
                text = self.port.read_bytes()
            except FileNotFoundError:
                return None
        try:
            return _parse_ports(json.loads(text))
        except (ValueError, KeyError, TypeError) as error:
            raise SetupError(f"{self.port} is damaged", fix="restart the server: it writes the file again") from error

    def last_port(self) -> int | None:
        """Return the port of the last run; None if there was none or the file is damaged."""
        try:
            ports = self.read_ports()
        except SetupError:
            return None
        return ports.port if ports is not None and 1 <= ports.port <= 65535 else None

    def remove_pid(self) -> None:
        """Remove the pid file."""
        with suppress(OSError):  # a stale pid file is harmless: the lock decides
            self.pid.unlink()

    def ensure_password(self, user: str | None = None) -> str:
        """Return the password of a user of this store; generate it at the first start."""
        path = self.password_of(user)
        known = self.read_password(user)
        if known is not None:
            with translate_os_errors(path):
                path.chmod(_PRIVATE)
            return known
        _write(path, secrets.token_urlsafe(32) + "\n")
        made = self.read_password(user)
        assert made is not None
        return made

    def read_password(self, user: str | None = None) -> str | None:
        """Return the password of a user of this store; None before the first start."""
        path = self.password_of(user)
        with translate_os_errors(path):
            try:
                text = path.read_bytes().decode(errors="replace").strip()
            except FileNotFoundError:
                return None
        if not text or not text.isprintable() or "\ufffd" in text:
            raise SetupError(f"{path} is empty or not text", fix="remove it: the next start generates a new one")
        return text

    def open_log(self) -> int:
        """Open the log for the server; return the file descriptor."""
        self.trim_log()
        with translate_os_errors(self.log):
            return os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, _PRIVATE)

    def trim_log(self) -> None:
        """Rotate a large log, also while the server writes to it.

        It is copied and truncated, not renamed: the server appends to the open file. A line that is written in between
        is lost; if the disk is full, the old log is lost.
        """
        if self.log_size() <= LOG_LIMIT_BYTES:
            return
        older = self.log.with_name("nats.log.1")
        try:
            shutil.copyfile(self.log, older)
            older.chmod(_PRIVATE)
        except OSError:
            with suppress(OSError):
                older.unlink()
        with suppress(OSError):  # a log that cannot be truncated is no reason to stop the server
            os.truncate(self.log, 0)

    def log_size(self) -> int:
        """Return the size of the log."""
        try:
            return self.log.stat().st_size
        except OSError:
            return 0

    def log_tail(self, since: int, lines: int = 10) -> str:
        """Return the last lines of the log after an offset."""
        try:
            with self.log.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(since if since <= size else 0, size - _TAIL_BYTES))
                text = log.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])


@contextmanager
def translate_os_errors(path: Path) -> Iterator[None]:
    """Translate an OSError about a path into a SetupError."""
    try:
        yield
    except OSError as error:
        raise SetupError(
            f"{path} cannot be used for the NATS server: {error.strerror or error}", fix=_fix_for(error)
        ) from error


def _fix_for(error: OSError) -> str:
    match error:
        case FileExistsError() | NotADirectoryError():
            return "there is a file where a directory is needed: choose another directory"
        case PermissionError():
            return "choose a directory that you own, or change its owner"
        case _:
            return "make room or choose another directory"


def _parse_ports(fields: dict[str, object]) -> PortFile:
    known = {name: fields.get(name) if name in _OPTIONAL else fields[name] for name in PortFile.__slots__}
    ports = PortFile(**known)  # type: ignore[arg-type]  # checked below
    numbers = (ports.port, ports.server_pid, ports.supervisor_pid)
    texts = (ports.url, ports.user, ports.started_at)
    optional = (getattr(ports, name) for name in _OPTIONAL)
    if not (
        all(type(number) is int for number in numbers)
        and all(type(text) is str for text in texts)
        and all(text is None or type(text) is str for text in optional)
    ):
        raise TypeError("a field of the wrong type")
    return ports


def _write(path: Path, text: str) -> None:
    draft = path.with_name(f"{path.name}.new")  # only the owner of the store writes, so the name is unique
    with translate_os_errors(path):
        draft.unlink(missing_ok=True)
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _PRIVATE)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)


__all__ = ["LOG_LIMIT_BYTES", "Files", "PortFile", "translate_os_errors"]

"""The files beside the store of an embedded server, and the lock on the store.

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

Two servers on one store ruin the data. The lock is an flock on `nats.lock`, taken by the supervisor and inherited by
its server: the store counts as owned until both are gone, however they ended. The note in the file (which process took
the lock) only explains.
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

from purveyor.jetstream.address import DEFAULT_INBOX, Address, Tls
from purveyor.model.errors import SetupError, StoreInUse
from purveyor.model.file_lock import FileLock, LockOwner, is_locked, read_owner

LOG_LIMIT_BYTES = 10 * 1024 * 1024
_PRIVATE_MODE = 0o600
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

        A directory with other files keeps its mode, because other users may need to enter it: each of our files is
        private. A directory that every user may write to is refused, because its files could be forged.
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
                path.chmod(_PRIVATE_MODE)
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
            return os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, _PRIVATE_MODE)

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
            older.chmod(_PRIVATE_MODE)
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
        handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _PRIVATE_MODE)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)


WAIT_SECONDS = 15.0
"""How long to wait for a store whose owner is gone or unknown: its server is ending, or another process probes it."""


class StoreLock:
    """The lock on a store, held until `release` and until no process that inherited `fd` lives."""

    def __init__(self, lock: FileLock) -> None:
        self._lock = lock
        self.owner = lock.write_owner()

    @property
    def fd(self) -> int:
        """The descriptor that the server inherits."""
        return self._lock.fd

    def release(self) -> None:
        """Give the store back."""
        self._lock.release()


def lock_store(files: Files, *, wait_seconds: float = WAIT_SECONDS) -> StoreLock:
    """Take the store, or raise StoreInUse at once if its owner lives.

    If the owner is gone or unknown the lock is about to be free: its server is ending, a starter has not written its
    note yet, or `find_running_server` probes it. Then this function tries again for a while.
    """
    lock = FileLock(files.lock)
    with translate_os_errors(files.lock):
        if not lock.wait(wait_seconds, give_up=lambda owner: owner is not None and owner.is_alive):
            raise _in_use(files, lock.owner())
        try:
            os.fchmod(lock.fd, 0o600)
            return StoreLock(lock)
        except BaseException:
            lock.release()
            raise


def find_running_server(directory: Path, user: str | None = None) -> Address | None:
    """Return the address of the server that runs on this store, in any process; None if there is none (yet).

    For a user: with its password and its inbox; None is the user with all permissions. Raises SetupError if the files
    of the store cannot be read, or the server has no such user.
    """
    files = Files(directory.absolute())
    with translate_os_errors(files.lock):
        if not is_locked(files.lock):
            return None  # no process owns the store, even if a file names one
    owner = read_owner(files.lock)
    ports = files.read_ports()
    if ports is None or owner is None or not _written_by(ports, owner):
        return None  # still starting: the port file is from the run before
    password = files.read_password(user)
    if password is None and user is not None:
        raise SetupError(
            f"the NATS server on {files.directory} has no user {user!r}", fix="restart it: the start creates the user"
        )
    return address_of(ports, user, password) if password else None


def address_of(ports: PortFile, user: str | None, password: str) -> Address:
    """Return the address of the server for a user."""
    tls = None if ports.tls_ca is None else Tls(ca=Path(ports.tls_ca), hostname=ports.tls_hostname)
    inbox = DEFAULT_INBOX if user is None else f"{DEFAULT_INBOX}.{user}"
    return Address((ports.url,), user=user or ports.user, password=password, tls=tls, inbox=inbox)


def _written_by(ports: PortFile, owner: LockOwner) -> bool:
    return (ports.supervisor_pid, ports.started_at) == (owner.pid, owner.started_at)


def _in_use(files: Files, owner: LockOwner | None) -> StoreInUse:
    try:
        ports = files.read_ports()
    except SetupError:
        ports = None
    if owner is None:
        return StoreInUse(
            f"the store {files.directory} is in use by another process, which left no note",
            fix=f"find it with: fuser {files.lock}",
        )
    where = f", serving {ports.url}" if ports is not None and _written_by(ports, owner) else ""
    if owner.is_alive:
        return StoreInUse(
            f"the store {files.directory} is in use by process {owner.pid}, since {owner.started_at}{where}",
            fix=f"use that server, or stop it with: kill {owner.pid}; or choose another directory",
        )
    left = f"its server, process {ports.server_pid}," if ports is not None and where else "its server"
    return StoreInUse(
        f"the store {files.directory} was taken by process {owner.pid}, since {owner.started_at}{where}; "
        f"that process is gone, but {left} still holds the store",
        fix=f"end it with: kill {ports.server_pid}" if ports is not None and where else f"see: fuser {files.lock}",
    )


__all__ = [
    "LOG_LIMIT_BYTES",
    "WAIT_SECONDS",
    "Files",
    "PortFile",
    "StoreLock",
    "find_running_server",
    "lock_store",
    "translate_os_errors",
]

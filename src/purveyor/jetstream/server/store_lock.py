"""Who owns a store directory. One server per store, or the data is ruined: held by a lock of the system, not by pids.

The lock is an flock on `nats.lock`, taken by the supervisor and inherited by its server: the store counts as owned
until both are gone, however they ended. What the file says (who took the lock) only explains; a pid alone proves
nothing, as pids are used again.
"""

import fcntl
import json
import os
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from purveyor.jetstream.address import DEFAULT_INBOX, Address, Tls
from purveyor.jetstream.server.files import Files, PortFile, telling
from purveyor.model.errors import SetupError, StoreInUse

PATIENCE_SECONDS = 15.0
"""How long to wait for a store whose owner is gone or unknown: its server is just ending, or somebody just looks."""

_PAUSE_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Owner:
    """The supervisor that took the lock."""

    pid: int
    birth: str | None
    """When the system started that process, in its own terms: tells it from a later one with the same pid."""
    started_at: str

    @classmethod
    def myself(cls) -> "Owner":
        """This process, from now on."""
        return cls(os.getpid(), _birth(os.getpid()), datetime.now(UTC).isoformat(timespec="milliseconds"))

    @property
    def alive(self) -> bool:
        """Whether that very process still runs."""
        if self.birth is not None:
            return _birth(self.pid) == self.birth
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


class Claim:
    """The lock on a store, held until `release` and until no process that inherited `fd` lives."""

    def __init__(self, fd: int, owner: Owner) -> None:
        self.fd = fd
        self.owner = owner
        _held.add(self)

    def release(self) -> None:
        """Give the store back. The owner's name goes first, so that nobody is told a name that is no longer true."""
        if self not in _held:
            return
        _held.discard(self)
        try:
            os.ftruncate(self.fd, 0)
        finally:
            os.close(self.fd)


_held: set[Claim] = set()


def _forget_in_fork() -> None:
    # A plain fork (multiprocessing) copies the descriptor, and the copy would keep the store owned after us.
    for held in _held:
        os.close(held.fd)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_fork)


def claim(files: Files, *, patience_seconds: float = PATIENCE_SECONDS) -> Claim:
    """Take the store, or raise StoreInUse at once if its owner lives.

    If the owner is gone or unknown the lock is about to be free: its server is ending, a starter has not written its
    name yet, or `running` is looking. Then it is tried again for a while.
    """
    with telling(files.lock):
        fd = os.open(files.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        _lock_patiently(fd, files, patience_seconds)
        owner = Owner.myself()
        with telling(files.lock):
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, 0)
            os.pwrite(fd, json.dumps(asdict(owner)).encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return Claim(fd, owner)


def running(directory: Path, user: str | None = None) -> Address | None:
    """The address of the server that runs on this store, in whatever process; None if none does, or not yet.

    For a user: with its password and its inbox; None is the one that may do everything. Raises SetupError if the files
    that tell cannot be read, or the server has no such user.
    """
    files = Files(directory.absolute())
    with telling(files.lock):
        try:
            fd = os.open(files.lock, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
    try:
        if _try_lock(fd, fcntl.LOCK_SH, files):
            return None  # whatever the files say, nobody owns the store
        owner = read_owner(fd)
    finally:
        os.close(fd)
    ports = files.read_ports()
    if ports is None or owner is None or not _written_by(ports, owner):
        return None  # still starting: the port file is the one of the run before
    password = files.read_password(user)
    if password is None and user is not None:
        raise SetupError(
            f"the NATS server on {files.directory} has no user {user!r}", fix="stop it and start it again: it is made"
        )
    return address_of(ports, user, password) if password else None


def address_of(ports: PortFile, user: str | None, password: str) -> Address:
    """Where a user of the server reaches it."""
    tls = None if ports.tls_ca is None else Tls(ca=Path(ports.tls_ca), hostname=ports.tls_hostname)
    inbox = DEFAULT_INBOX if user is None else f"{DEFAULT_INBOX}.{user}"
    return Address((ports.url,), user=user or ports.user, password=password, tls=tls, inbox=inbox)


def read_owner(fd: int) -> Owner | None:
    """What the lock file says about its owner; None if it says nothing (yet)."""
    try:
        fields = json.loads(os.pread(fd, 4096, 0))
        birth = fields["birth"]
        return Owner(int(fields["pid"]), str(birth) if birth is not None else None, str(fields["started_at"]))
    except (ValueError, KeyError, TypeError):
        return None


def _written_by(ports: PortFile, owner: Owner) -> bool:
    return (ports.supervisor_pid, ports.started_at) == (owner.pid, owner.started_at)


def _lock_patiently(fd: int, files: Files, patience_seconds: float) -> None:
    deadline = time.monotonic() + patience_seconds
    while not _try_lock(fd, fcntl.LOCK_EX, files):
        owner = read_owner(fd)
        if (owner is not None and owner.alive) or time.monotonic() >= deadline:
            raise _in_use(files, owner)
        time.sleep(_PAUSE_SECONDS)


def _try_lock(fd: int, kind: int, files: Files) -> bool:
    with telling(files.lock):
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _in_use(files: Files, owner: Owner | None) -> StoreInUse:
    try:
        ports = files.read_ports()
    except SetupError:
        ports = None
    if owner is None:
        return StoreInUse(
            f"the store {files.directory} is in use by another process, which does not say who it is",
            fix=f"find it with: fuser {files.lock}",
        )
    where = f", serving {ports.url}" if ports is not None and _written_by(ports, owner) else ""
    if owner.alive:
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


def _birth(pid: int) -> str | None:
    """The start time of a process, in clock ticks since boot; None if it is gone, or where there is no /proc."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before may hold spaces and brackets
    return None if fields[0] in "ZX" else fields[19]  # a zombie holds nothing any more


__all__ = ["PATIENCE_SECONDS", "Claim", "Owner", "claim", "read_owner", "running"]

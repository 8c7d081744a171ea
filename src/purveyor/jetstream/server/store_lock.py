"""The lock on a store directory: two servers on one store ruin the data.

The lock is an flock on `nats.lock`, taken by the supervisor and inherited by its server: the store counts as owned
until both are gone, however they ended. The note in the file (which process took the lock) only explains.
"""

import os
from pathlib import Path

from purveyor.jetstream.address import DEFAULT_INBOX, Address, Tls
from purveyor.jetstream.server.files import Files, PortFile, translate_os_errors
from purveyor.model.errors import SetupError, StoreInUse
from purveyor.model.file_lock import FileLock, LockOwner, is_locked, read_owner

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
            return None  # whatever the files say, no process owns the store
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


__all__ = ["WAIT_SECONDS", "StoreLock", "find_running_server", "lock_store"]

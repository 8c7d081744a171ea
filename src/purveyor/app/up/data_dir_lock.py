"""The lock that allows one `purveyor up` for a data directory."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from purveyor.model.errors import SetupError, StoreInUse
from purveyor.model.file_lock import FileLock, LockOwner

FILE_NAME = "up.lock"


@contextlib.contextmanager
def hold_data_dir(data_dir: Path) -> Iterator[None]:
    """Lock the directory during the block; raise StoreInUse with the process that holds the lock."""
    lock = FileLock(data_dir / FILE_NAME)
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        is_ours = lock.try_lock()
    except OSError as error:
        raise SetupError(
            f"{data_dir} cannot be used for data: {error.strerror}", fix="choose another with --data-dir"
        ) from error
    if not is_ours:
        raise _in_use(data_dir, lock.owner())
    try:
        lock.write_owner()
        yield
    finally:
        lock.release()


def _in_use(data_dir: Path, owner: LockOwner | None) -> StoreInUse:
    if owner is None:
        return StoreInUse(
            f"`purveyor up` already runs on {data_dir}, in an unknown process",
            fix=f"find it with: fuser {data_dir / FILE_NAME}",
        )
    return StoreInUse(
        f"`purveyor up` already runs on {data_dir}: process {owner.pid}, since {owner.started_at}",
        fix=f"use that one, or stop it with: kill {owner.pid}; or choose another --data-dir",
    )

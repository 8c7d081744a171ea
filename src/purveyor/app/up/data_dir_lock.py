"""One supervisor for a data directory: held by a lock of the system, which ends with the process however it ends."""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from purveyor.jetstream.server.store_lock import Owner, read_owner
from purveyor.model.errors import SetupError, StoreInUse

FILE_NAME = "up.lock"


@contextlib.contextmanager
def owning(data_dir: Path) -> Iterator[None]:
    """Hold the directory; StoreInUse names the process that does."""
    path = data_dir / FILE_NAME
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise SetupError(
            f"{data_dir} cannot be used for data: {error.strerror}", fix="choose another with --data-dir"
        ) from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(data_dir, read_owner(fd)) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(asdict(Owner.myself())).encode(), 0)
        try:
            yield
        finally:
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def _in_use(data_dir: Path, owner: Owner | None) -> StoreInUse:
    if owner is None:
        return StoreInUse(
            f"`purveyor up` runs on {data_dir} already, and does not say in which process",
            fix=f"find it with: fuser {data_dir / FILE_NAME}",
        )
    return StoreInUse(
        f"`purveyor up` runs on {data_dir} already: process {owner.pid}, since {owner.started_at}",
        fix=f"use that one, or stop it with: kill {owner.pid}; or choose another --data-dir",
    )

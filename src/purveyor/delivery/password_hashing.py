"""Password hashes (argon2id), computed in threads: the event loop never waits for one.

A check is costly on purpose. So there are fewer threads than cores: other work continues while many clients log in at
once. When too many checks are waiting, further logins are refused.
"""

import asyncio
import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import argon2
from argon2.exceptions import Argon2Error, InvalidHashError

from purveyor.model.errors import Unavailable

# The minimum that OWASP recommends: about 20 ms and 19 MiB for each check.
_TIME_COST: Final = 2
_MEMORY_KIB: Final = 19 * 1024
_PARALLELISM: Final = 1
_MAX_WAITING: Final = 1000
_T = TypeVar("_T")


class PasswordHasher:
    """Hashes and checks passwords. `close` ends its threads."""

    def __init__(self) -> None:
        self._argon = argon2.PasswordHasher(time_cost=_TIME_COST, memory_cost=_MEMORY_KIB, parallelism=_PARALLELISM)
        self._threads = ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2), thread_name_prefix="purveyor-hash")
        self._waiting = 0
        self._random_hash = self._argon.hash(secrets.token_hex())

    async def hash(self, password: str) -> str:
        """Return a hash to store; it contains its salt and its costs."""
        return await self._run(lambda: self._argon.hash(password))

    async def verify(self, stored: str | None, password: str) -> bool:
        """Return whether a password matches a stored hash. Without a hash: False, after the same time."""
        matches = await self._run(lambda: self._verify(stored or self._random_hash, password))
        return matches and stored is not None

    def _verify(self, stored: str, password: str) -> bool:
        try:
            return self._argon.verify(stored, password)
        except (Argon2Error, InvalidHashError):
            return False

    async def _run(self, work: Callable[[], _T]) -> _T:
        if self._waiting >= _MAX_WAITING:
            raise Unavailable("too many logins are being checked", fix="try again in a moment")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """End the threads; drop waiting checks."""
        self._threads.shutdown(wait=False, cancel_futures=True)

"""Hashes of passwords (argon2id), made and checked in threads of their own: the event loop never waits for one.

A check is made costly on purpose. So there are fewer threads than cores, others get on with their work while many log
in at once, and so many waiting that nobody would wait for an answer are turned away.
"""

import asyncio
import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from argon2 import PasswordHasher
from argon2.exceptions import Argon2Error, InvalidHashError

from purveyor.model.errors import Unavailable

# What OWASP recommends as the least: about 20 ms and 19 MiB for each check.
_TIME_COST: Final = 2
_MEMORY_KIB: Final = 19 * 1024
_PARALLELISM: Final = 1
_MOST_WAITING: Final = 1000
_T = TypeVar("_T")


class Hasher:
    """See the module. `close` ends its threads."""

    def __init__(self) -> None:
        self._argon = PasswordHasher(time_cost=_TIME_COST, memory_cost=_MEMORY_KIB, parallelism=_PARALLELISM)
        self._threads = ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2), thread_name_prefix="purveyor-hash")
        self._waiting = 0
        self._nobody = self._argon.hash(secrets.token_hex())

    async def hash(self, password: str) -> str:
        """A hash to keep; it holds its salt and its costs."""
        return await self._run(lambda: self._argon.hash(password))

    async def verify(self, kept: str | None, password: str) -> bool:
        """Whether a password is the one that was hashed. Against None it never is, and takes as long to tell."""
        right = await self._run(lambda: self._verify(kept or self._nobody, password))
        return right and kept is not None

    def _verify(self, kept: str, password: str) -> bool:
        try:
            return self._argon.verify(kept, password)
        except (Argon2Error, InvalidHashError):
            return False

    async def _run(self, work: Callable[[], _T]) -> _T:
        if self._waiting >= _MOST_WAITING:
            raise Unavailable("too many logins are being checked", fix="try again in a moment")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """End its threads; what waits is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)

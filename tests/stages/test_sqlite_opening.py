"""A SQLite connection whose opening is cancelled is closed: aiosqlite itself would drop it with its thread."""

import asyncio
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest

from purveyor.stages import SqlStore
from tests.support.waiting import PATIENCE_SECONDS, until


def test_a_cancelled_opening_leaves_no_connection_and_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    opened: list[sqlite3.Connection] = []
    real = sqlite3.connect

    def slow(*given: Any, **options: Any) -> sqlite3.Connection:
        begun.set()
        assert may_end.wait(PATIENCE_SECONDS)
        opened.append(real(*given, **options))
        return opened[-1]

    async def cancel_opening() -> None:
        store = SqlStore(f"sqlite:///{tmp_path / 'stages.db'}")
        opening = asyncio.create_task(store.open())
        await until(begun.is_set)
        opening.cancel()
        asyncio.get_running_loop().call_later(0.1, may_end.set)
        with pytest.raises(asyncio.CancelledError):
            await opening
        await store.close()

    before = set(threading.enumerate())
    monkeypatch.setattr(sqlite3, "connect", slow)
    try:
        asyncio.run(cancel_opening())  # ends with a loop that is closed: a thread that reports to it afterwards fails
    finally:
        may_end.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
    assert len(opened) == 1
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        opened[0].execute("SELECT 1")

"""The phases of the demo: subscribers of every kind, a directory, changes, a crash, a late subscriber, an audit."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import aiohttp

from purveyor.app.demo.subscribers import (
    DeliveryCheck,
    MeasuredPeriod,
    consume,
    endpoint,
    fill_table,
    find_table_difference,
)
from purveyor.app.demo.system import DemoSystem, Print, Step, changes, initial_entries, run_system, wait_until
from purveyor.app.process_setup import event_loop_factory
from purveyor.jetstream.server import find_running_server

PEOPLE: Final = 2000
GROUPS: Final = 50
_CONCURRENT_HANDLERS: Final = 8
_PROGRESS_STEPS: Final = 20
_CHUNK_INTERVAL_SECONDS: Final = 0.5
_ALL_TOPICS: Final = ".*"
_USER_TOPIC: Final = "users/user"

OnProgress = Callable[[str, Sequence[DeliveryCheck]], None]
"""Called four times a second with the phase and the checks of all subscribers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of the demo; `wrong` is empty if every check succeeded."""

    imported: int
    checks: Sequence[DeliveryCheck]
    people: int
    dead_letters: int
    recovery_seconds: float
    """Time from the kill of the pipeline to the first delivery of an event that is newer than the kill."""
    audit: dict[str, Any]
    wrong: Sequence[str]


def run(
    directory: Path, print_line: Print, on_progress: OnProgress, *, people: int = PEOPLE, groups: int = GROUPS
) -> Result:
    """Run the demo on an empty directory."""

    async def run_scenario() -> Result:
        async with _reporting(on_progress, "starting all parts: Spark takes longest", []):
            starting = contextlib.AsyncExitStack()
            system = await starting.enter_async_context(run_system(directory, print_line))
        async with starting:
            return await Scenario(system, on_progress, initial_entries(people, groups)).run()

    with asyncio.Runner(loop_factory=event_loop_factory()) as runner:
        return runner.run(run_scenario())


class Scenario:
    """Runs the phases on a running system."""

    def __init__(self, system: DemoSystem, on_progress: OnProgress, first: Step) -> None:
        self._system = system
        self._on_progress = on_progress
        self._first = first
        self._second = changes(first, 1)
        self._third = changes(self._second, 2)
        self._password = secrets.token_urlsafe(16)
        self._ordered = DeliveryCheck("everything", "ordered pull")
        self._parallel = DeliveryCheck("by-key", f"parallel pull, {_CONCURRENT_HANDLERS} at once", by_key=True)
        self._pushed = DeliveryCheck("webhook", "push, by key; fails at times", by_key=True)
        self._table = DeliveryCheck("table", "stage that fills a table", by_key=True)
        self._late = DeliveryCheck("late", "ordered pull, prefilled")
        self._checks = [self._ordered, self._parallel, self._pushed, self._table, self._late]
        self._tasks: list[asyncio.Task[None]] = []
        self._imported = 0
        self._recovery_seconds = 0.0
        self._changes = system.directory / "changes.ldif"
        self._active = [self._ordered, self._parallel, self._pushed, self._table]

    async def run(self) -> Result:
        """Run all phases, from the first subscription to the checks."""
        database = self._system.directory / "people.db"
        async with aiohttp.ClientSession() as session, endpoint(self._pushed) as url:
            try:
                await self._subscribe(session, url, database)
                async with self._import_directory() as end:
                    await self._stream_changes_with_crash()
                    await self._add_late_subscriber(session)
                    followed = await end()
                await self._wait_for_all()
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
        async with self._phase("auditing every queue"):
            audit = await self._system.call("archive", "audit", "--json")
            letters = await self._system.call("dlq", "list", "--json")
        wrong = [problem for check in self._checks for problem in check.find_problems(self._third)]
        if (differs := await find_table_difference(database, self._table)) is not None:
            wrong.append(differs)
        if followed != self._imported - self._first.events:
            wrong.append(f"the import that followed the changes stored {followed:,} of them")
        if not audit.get("clean"):
            wrong.append("the audit found differences")
        if not self._pushed.retried:
            wrong.append("the endpoint never failed: retries were not tested")
        return Result(
            imported=self._imported,
            checks=self._checks,
            people=len(self._third.people),
            dead_letters=len(letters),
            recovery_seconds=self._recovery_seconds,
            audit=audit,
            wrong=wrong,
        )

    async def _subscribe(self, session: aiohttp.ClientSession, url: str, database: Path) -> None:
        """Add a subscriber of each kind before the import."""
        push = {"endpoint": url, "format": "raw"}
        retry = {"min_backoff_seconds": 0.2, "max_backoff_seconds": 2.0}
        await self._add(session, "everything", _ALL_TOPICS)
        await self._add(session, "by-key", _ALL_TOPICS, delivery="parallel", order_by="key")
        await self._add(session, "webhook", _USER_TOPIC, delivery="push", order_by="key", push=push, retry=retry)
        await self._add(session, "table", _USER_TOPIC)
        about_people = self._first.about_people + self._second.about_people + self._third.about_people
        self._ordered.expected = self._parallel.expected = sum(
            step.events for step in (self._first, self._second, self._third)
        )
        self._pushed.expected = self._table.expected = about_people
        self._late.expected = len(self._second.people) + self._third.about_people
        self._start_task(consume(self._system.url, self._password, self._ordered))
        self._start_task(consume(self._system.url, self._password, self._parallel, handlers=_CONCURRENT_HANDLERS))
        address = find_running_server(self._system.directory / "nats")
        assert address is not None
        self._start_task(fill_table(address, database, self._table))

    @contextlib.asynccontextmanager
    async def _import_directory(self) -> AsyncIterator[Callable[[], Awaitable[int]]]:
        """Import the initial entries, then follow a file of changes; yield a function that ends the second import."""
        path = self._system.directory / "directory.ldif"
        path.write_text(self._first.ldif, encoding="utf-8")
        self._changes.touch()
        async with contextlib.AsyncExitStack() as following:
            async with self._phase(f"importing a directory of {len(self._first.people):,} people"):
                result = await self._system.call("import", str(path), "--source", "directory", "--json")
                self._imported = int(result["added"])
                end = await following.enter_async_context(self._system.following(self._changes))
                await wait_until(self._is_caught_up, "the directory")
            yield end

    async def _stream_changes_with_crash(self) -> None:
        """Stream changes a few at a time, and kill the pipeline half-way."""
        chunks = _split_records(self._second.ldif)
        async with self._phase(f"streaming {self._second.events:,} changes"), self._measured_period(calm=True):
            await self._stream(chunks[: len(chunks) // 2])
        async with self._phase("kill -9 of the pipeline, while changes come"), self._measured_period(calm=False):
            await self._stream(chunks[len(chunks) // 2 :], midway=self._kill_pipeline)

    async def _kill_pipeline(self) -> None:
        killed = datetime.now(UTC)
        await self._system.kill_pipeline()
        self._start_task(self._measure_recovery(killed))

    async def _measure_recovery(self, killed: datetime) -> None:
        def has_recovered() -> bool:
            return self._ordered.newest is not None and self._ordered.newest > killed

        await wait_until(has_recovered, "recovery of the pipeline")
        self._recovery_seconds = (datetime.now(UTC) - killed).total_seconds()

    async def _add_late_subscriber(self, session: aiohttp.ClientSession) -> None:
        """Add a subscriber that begins after all changes so far, and is prefilled with the state of that moment."""
        chunks = _split_records(self._third.ldif)
        async with self._phase(f"a late subscriber, and {self._third.events:,} more changes while it is filled"):
            await self._add(session, "late", _USER_TOPIC, request_prefill=True)
            self._start_task(consume(self._system.url, self._password, self._late))
            self._active.append(self._late)  # its prefill is older than every period, so no latency counts it
            async with self._measured_period(calm=False):
                await self._stream(chunks[: len(chunks) // 2])
        async with (
            self._phase("the rest of the changes, with all subscribers"),
            self._measured_period(calm=True),
        ):
            await self._stream(chunks[len(chunks) // 2 :])

    async def _wait_for_all(self) -> None:
        async with self._phase("waiting until every subscriber has all messages"):
            await wait_until(self._is_complete, "the subscribers")
            await asyncio.sleep(1.0)  # a second delivery would arrive now

    @contextlib.asynccontextmanager
    async def _measured_period(self, *, calm: bool) -> AsyncIterator[None]:
        """Measure the latency of changes in this block; it ends when every subscriber has them."""
        period = MeasuredPeriod(datetime.now(UTC), calm)
        for check in self._active:
            check.periods.append(period)
        yield
        await wait_until(self._is_caught_up, "the changes")
        period.until = datetime.now(UTC)

    def _is_caught_up(self) -> bool:
        """Return whether every active subscriber has all that was imported; later records are all about people."""
        self._raise_failures()
        people = self._imported - self._first.events + self._first.about_people
        since_late = self._imported - self._first.events - self._second.events
        wanted = {
            **dict.fromkeys((self._ordered.name, self._parallel.name), self._imported),
            **dict.fromkeys((self._pushed.name, self._table.name), people),
            self._late.name: len(self._second.people) + since_late,
        }
        return all(check.got >= wanted[check.name] for check in self._active)

    def _is_complete(self) -> bool:
        self._raise_failures()
        return all(check.got >= check.expected for check in self._checks)

    def _raise_failures(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    async def _stream(self, chunks: Sequence[str], midway: Callable[[], Awaitable[None]] | None = None) -> None:
        """Append chunks to the file that the import follows."""
        with self._changes.open("a", encoding="utf-8") as file:
            for number, chunk in enumerate(chunks):
                if midway is not None and number == len(chunks) // 3:
                    await midway()
                file.write(chunk)
                file.flush()
                self._imported += chunk.count("changetype:")
                await asyncio.sleep(_CHUNK_INTERVAL_SECONDS)

    async def _add(self, session: aiohttp.ClientSession, name: str, topic: str, **more: object) -> None:
        wanted = {"name": name, "realms_topics": [{"realm": "udm", "topic": topic}], "password": self._password}
        await self._system.subscribe(session, wanted | more)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    def _phase(self, name: str) -> contextlib.AbstractAsyncContextManager[None]:
        return _reporting(self._on_progress, name, self._checks)


@contextlib.asynccontextmanager
async def _reporting(on_progress: OnProgress, phase: str, checks: Sequence[DeliveryCheck]) -> AsyncIterator[None]:
    async def report() -> None:
        while True:
            on_progress(phase, checks)
            await asyncio.sleep(0.25)

    reporting = asyncio.create_task(report())
    try:
        yield
    finally:
        reporting.cancel()
        await asyncio.gather(reporting, return_exceptions=True)


def _split_records(ldif: str) -> list[str]:
    """Split LDIF into chunks of whole records, each with the empty line that ends it."""
    records = [f"{record}\n\n" for record in ldif.split("\n\n") if record.strip()]
    size = max(1, -(-len(records) // _PROGRESS_STEPS))
    return ["".join(records[start : start + size]) for start in range(0, len(records), size)]

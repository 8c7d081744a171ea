"""The demo, scene by scene: every kind of subscriber, a directory, changes, a crash, a late one, an audit."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import aiohttp

from purveyor.app.demo.delivery_check import Ledger, Stretch
from purveyor.app.demo.sample_directory import Step, beginning, changes
from purveyor.app.demo.stage_subscriber import fill_table, table_differs
from purveyor.app.demo.subscribers import consume, endpoint
from purveyor.app.demo.system import Say, StageSet, running, until
from purveyor.app.runtime_tuning import loop_factory
from purveyor.jetstream.server import running as server_of

PEOPLE: Final = 2000
GROUPS: Final = 50
_HANDLERS: Final = 8
_PIECES: Final = 20
_PIECE_SECONDS: Final = 0.5
_ALL: Final = ".*"
_PEOPLE_ONLY: Final = "users/user"

Watch = Callable[[str, Sequence[Ledger]], None]
"""Is told, some times a second, which scene it is and how far everybody is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What happened. `wrong` is empty when all of it holds."""

    imported: int
    ledgers: Sequence[Ledger]
    people: int
    dead_letters: int
    recovery_seconds: float
    """From the kill of the pipeline to the next event at a subscriber whose record came after the kill."""
    audit: dict[str, Any]
    wrong: Sequence[str]


def run(directory: Path, say: Say, watch: Watch, *, people: int = PEOPLE, groups: int = GROUPS) -> Result:
    """Run it on an empty directory."""

    async def play() -> Result:
        async with _watching(watch, "starting all parts: Spark takes longest", []):
            starting = contextlib.AsyncExitStack()
            stage = await starting.enter_async_context(running(directory, say))
        async with starting:
            return await Story(stage, watch, beginning(people, groups)).play()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(play())


class Story:
    """What is played on a running system."""

    def __init__(self, stage: StageSet, watch: Watch, first: Step) -> None:
        self._stage = stage
        self._watch = watch
        self._first = first
        self._second = changes(first, 1)
        self._third = changes(self._second, 2)
        self._password = secrets.token_urlsafe(16)
        self._ordered = Ledger("everything", "ordered pull")
        self._parallel = Ledger("by-key", f"parallel pull, {_HANDLERS} at once", by_key=True)
        self._pushed = Ledger("webhook", "push, by key; fails at times", by_key=True)
        self._table = Ledger("table", "stage that fills a table", by_key=True)
        self._late = Ledger("late", "ordered pull, prefilled")
        self._ledgers = [self._ordered, self._parallel, self._pushed, self._table, self._late]
        self._tasks: list[asyncio.Task[None]] = []
        self._imported = 0
        self._recovery_seconds = 0.0
        self._changes = stage.directory / "changes.ldif"
        self._present = [self._ordered, self._parallel, self._pushed, self._table]

    async def play(self) -> Result:
        """From the first subscription to the last count."""
        database = self._stage.directory / "people.db"
        async with aiohttp.ClientSession() as session, endpoint(self._pushed) as url:
            try:
                await self._subscribe(session, url, database)
                async with self._directory_imported() as end:
                    await self._stream_changes_through_a_crash()
                    await self._let_a_late_one_in(session)
                    followed = await end()
                await self._until_all_have_all()
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
        async with self._scene("auditing every queue"):
            audit = await self._stage.call("archive", "audit", "--json")
            letters = await self._stage.call("dlq", "list", "--json")
        wrong = [problem for ledger in self._ledgers for problem in ledger.problems(self._third)]
        if (differs := await table_differs(database, self._table)) is not None:
            wrong.append(differs)
        if followed != self._imported - self._first.events:
            wrong.append(f"the import that followed the changes took {followed:,} of them")
        if not audit.get("clean"):
            wrong.append("the audit found differences")
        if not self._pushed.again:
            wrong.append("the endpoint never failed: nothing is proved of retries")
        return Result(
            imported=self._imported,
            ledgers=self._ledgers,
            people=len(self._third.people),
            dead_letters=len(letters["dead_letters"]),
            recovery_seconds=self._recovery_seconds,
            audit=audit,
            wrong=wrong,
        )

    async def _subscribe(self, session: aiohttp.ClientSession, url: str, database: Path) -> None:
        """One of each kind, before anything happens."""
        push = {"endpoint": url, "format": "raw"}
        retry = {"min_backoff_seconds": 0.2, "max_backoff_seconds": 2.0}
        await self._add(session, "everything", _ALL)
        await self._add(session, "by-key", _ALL, delivery="parallel", order_by="key")
        await self._add(session, "webhook", _PEOPLE_ONLY, delivery="push", order_by="key", push=push, retry=retry)
        await self._add(session, "table", _PEOPLE_ONLY)
        about_people = self._first.about_people + self._second.about_people + self._third.about_people
        self._ordered.expected = self._parallel.expected = sum(
            step.events for step in (self._first, self._second, self._third)
        )
        self._pushed.expected = self._table.expected = about_people
        self._late.expected = len(self._second.people) + self._third.about_people
        self._begin(consume(self._stage.url, self._password, self._ordered))
        self._begin(consume(self._stage.url, self._password, self._parallel, handlers=_HANDLERS))
        address = server_of(self._stage.directory / "nats")
        assert address is not None
        self._begin(fill_table(address, database, self._table))

    @contextlib.asynccontextmanager
    async def _directory_imported(self) -> AsyncIterator[Callable[[], Awaitable[int]]]:
        """Import what is there at first; then a second import follows a file of changes, until it is ended."""
        path = self._stage.directory / "directory.ldif"
        path.write_text(self._first.ldif, encoding="utf-8")
        self._changes.touch()
        async with contextlib.AsyncExitStack() as following:
            async with self._scene(f"importing a directory of {len(self._first.people):,} people"):
                told = await self._stage.call("import", str(path), "--source", "directory", "--json")
                self._imported = int(told["added"])
                end = await following.enter_async_context(self._stage.following(self._changes))
                await until(self._caught_up, "the directory")
            yield end

    async def _stream_changes_through_a_crash(self) -> None:
        """Changes come a few at a time; half-way the pipeline is killed."""
        pieces = _in_pieces(self._second.ldif)
        async with self._scene(f"streaming {self._second.events:,} changes"), self._stretch(calm=True):
            await self._stream(pieces[: len(pieces) // 2])
        async with self._scene("kill -9 of the pipeline, while changes come"), self._stretch(calm=False):
            await self._stream(pieces[len(pieces) // 2 :], midway=self._kill)

    async def _kill(self) -> None:
        killed = datetime.now(UTC)
        await self._stage.kill_pipeline()
        self._begin(self._note_recovery(killed))

    async def _note_recovery(self, killed: datetime) -> None:
        def goes_on() -> bool:
            return self._ordered.newest is not None and self._ordered.newest > killed

        await until(goes_on, "the pipeline, which was killed,")
        self._recovery_seconds = (datetime.now(UTC) - killed).total_seconds()

    async def _let_a_late_one_in(self, session: aiohttp.ClientSession) -> None:
        """It begins behind all that was imported so far, and is given the state of that moment first."""
        pieces = _in_pieces(self._third.ldif)
        async with self._scene(f"a late subscriber, and {self._third.events:,} more changes while it is filled"):
            await self._add(session, "late", _PEOPLE_ONLY, request_prefill=True)
            self._begin(consume(self._stage.url, self._password, self._late))
            self._present.append(self._late)  # what it is filled with happened before: no stretch has it
            async with self._stretch(calm=False):
                await self._stream(pieces[: len(pieces) // 2])
        async with self._scene("the rest of the changes, now that everybody is there"), self._stretch(calm=True):
            await self._stream(pieces[len(pieces) // 2 :])

    async def _until_all_have_all(self) -> None:
        async with self._scene("waiting until everybody has everything"):
            await until(self._all_there, "the subscribers")
            await asyncio.sleep(1.0)  # whatever is delivered twice would come now

    @contextlib.asynccontextmanager
    async def _stretch(self, *, calm: bool) -> AsyncIterator[None]:
        """Changes that come in this block are measured together; it ends when everybody has them."""
        stretch = Stretch(datetime.now(UTC), calm)
        for ledger in self._present:
            ledger.stretches.append(stretch)
        yield
        await until(self._caught_up, "the changes")
        stretch.until = datetime.now(UTC)

    def _caught_up(self) -> bool:
        """Whether everybody who is there has all that was imported so far; all but the first records are of people."""
        self._raise_failures()
        people = self._imported - self._first.events + self._first.about_people
        since_late = self._imported - self._first.events - self._second.events
        wanted = {
            **dict.fromkeys((self._ordered.name, self._parallel.name), self._imported),
            **dict.fromkeys((self._pushed.name, self._table.name), people),
            self._late.name: len(self._second.people) + since_late,
        }
        return all(ledger.got >= wanted[ledger.name] for ledger in self._present)

    def _all_there(self) -> bool:
        self._raise_failures()
        return all(ledger.got >= ledger.expected for ledger in self._ledgers)

    def _raise_failures(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    async def _stream(self, pieces: Sequence[str], midway: Callable[[], Awaitable[None]] | None = None) -> None:
        """Let the file grow that is followed."""
        with self._changes.open("a", encoding="utf-8") as file:
            for number, piece in enumerate(pieces):
                if midway is not None and number == len(pieces) // 3:
                    await midway()
                file.write(piece)
                file.flush()
                self._imported += piece.count("changetype:")
                await asyncio.sleep(_PIECE_SECONDS)

    async def _add(self, session: aiohttp.ClientSession, name: str, topic: str, **more: object) -> None:
        wanted = {"name": name, "realms_topics": [{"realm": "udm", "topic": topic}], "password": self._password}
        await self._stage.subscribe(session, wanted | more)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    def _scene(self, name: str) -> contextlib.AbstractAsyncContextManager[None]:
        return _watching(self._watch, name, self._ledgers)


@contextlib.asynccontextmanager
async def _watching(watch: Watch, scene: str, ledgers: Sequence[Ledger]) -> AsyncIterator[None]:
    async def look() -> None:
        while True:
            watch(scene, ledgers)
            await asyncio.sleep(0.25)

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


def _in_pieces(ldif: str) -> list[str]:
    """Whole records, a few at a time, each followed by the empty line that ends it."""
    records = [f"{record}\n\n" for record in ldif.split("\n\n") if record.strip()]
    size = max(1, -(-len(records) // _PIECES))
    return ["".join(records[start : start + size]) for start in range(0, len(records), size)]

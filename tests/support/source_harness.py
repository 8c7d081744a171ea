"""A source of a real slapd in this process, and the copy of the directory that its records build."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from purveyor.jetstream.address import Address
from purveyor.model.errors import UnknownStream
from purveyor.queues.catalogue import LDIF
from purveyor.queues.client import Queues
from purveyor.sources.ldap.directory import Directory
from purveyor.sources.ldap.source_runner import RunnerOptions, SourceRunner
from tests.support.slapd import READER_DN, READER_PASSWORD, SUFFIX, Slapd
from tests.support.waiting import until

Json = dict[str, Any]


@dataclass
class DirectoryCopy:
    """What a reader of the records knows, by the rules of `live_records`."""

    entries: dict[str, Json] = field(default_factory=dict)
    epoch: int = 0
    refreshes: list[bool] = field(default_factory=list)
    """Whether each refresh was a full one."""
    _seen: set[str] = field(default_factory=set)

    def apply(self, record: Json) -> None:
        if record["epoch"] < self.epoch:
            return
        self.epoch = record["epoch"]
        match record["change"]:
            case "refresh-begin":
                self.refreshes.append(record["full"])
                self._seen = set()
            case "entry":
                self.entries[record["uuid"]] = {"dn": record["dn"], **record["attributes"]}
                self._seen.add(record["uuid"])
            case "present":
                self._seen.update(record["uuids"])
            case "gone":
                for each in record["uuids"]:
                    self.entries.pop(each, None)
            case "refresh-end" if record["remove_unseen"]:
                self.entries = {uuid: entry for uuid, entry in self.entries.items() if uuid in self._seen}
            case _:
                pass

    @property
    def dns(self) -> set[str]:
        return {entry["dn"] for entry in self.entries.values()}

    def find(self, dn: str) -> Json:
        return next(entry for entry in self.entries.values() if entry["dn"] == dn)


@dataclass
class SourceHarness:
    """A source with a unique name."""

    queues: Queues
    address: Address
    directory: Directory
    events: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def of(cls, queues: Queues, slapd: Slapd, source: str, **changes: Any) -> "SourceHarness":
        directory = Directory(uri=slapd.uri, base=SUFFIX, source=source, bind_dn=READER_DN, password=READER_PASSWORD)
        return cls(queues, queues.address, replace(directory, **changes))

    def runner(self, *, find_address: Callable[[], Address] | None = None, **options: Any) -> SourceRunner:
        def on_event(_source: str, event: str, detail: str, _fields: Mapping[str, Any]) -> None:
            self.events.append((event, detail))

        given = RunnerOptions(find_address=find_address or (lambda: self.address), on_event=on_event, **options)
        return SourceRunner(self.directory, given)

    @contextlib.asynccontextmanager
    async def running(self, **options: Any) -> AsyncIterator[SourceRunner]:
        """Run the source during the block; stop it as a signal does."""
        runner, stop = self.runner(**options), asyncio.Event()
        task = asyncio.create_task(runner.run(stop))
        try:
            yield runner
        finally:
            stop.set()
            await task

    async def records(self) -> list[Json]:
        try:
            state = (await self.queues.streams.info(LDIF.stream)).state
        except UnknownStream:
            return []
        batches = self.queues.read_range(LDIF.stream, max(state.first_seq, 1), state.last_seq)
        rows = [row async for batch in batches for row in batch.to_pylist()]
        return [json.loads(row["data"]) for row in rows if row["subject"] == self.directory.subject]

    async def copy(self) -> DirectoryCopy:
        copy = DirectoryCopy()
        for record in await self.records():
            copy.apply(record)
        return copy

    async def until_copy(self, condition: Callable[[DirectoryCopy], object]) -> DirectoryCopy:
        """Wait until the copy of the directory is as wanted."""

        async def found() -> DirectoryCopy | None:
            copy = await self.copy()
            return copy if condition(copy) else None

        return await until(found)

    def event_names(self) -> list[str]:
        return [name for name, _ in self.events]

"""Whatever happens to a directory and to the source that follows it: subscribers know the directory, and truly.

Each example is a history of a model of a server. Its records pass through the transform's rules as bytes, in batches
over pages; some batches fail and run again. A subscriber folds the changes.
"""

import copy
import random
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from purveyor.model.ldif_changes import RefreshBegin, RefreshEnd
from purveyor.pipeline.transform.directory_pages import PagedDirectory
from purveyor.pipeline.transform.directory_records import InvalidRecord, Value, attribute_key
from purveyor.pipeline.transform.directory_rules import Entry, EntryChange
from purveyor.pipeline.transform.live_directory import LiveDirectory
from purveyor.pipeline.transform.live_records import LiveRecord as ParsedRecord
from purveyor.pipeline.transform.live_records import parse_message
from purveyor.pipeline.transform.live_rules import apply_live_record
from purveyor.sources.ldif.live_records import LiveEntry, LiveRecord, encode_live_record
from tests.pipeline.transform.live_directory_model import ROOT, Server, Source, csn_of
from tests.pipeline.transform.memory import MemoryPages


class Subscriber:
    """Folds changes; every one must start from what is known, and no deletion may be about an entry that is there."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.known: dict[str, Entry] = {}

    def take(self, change: EntryChange) -> None:
        about = change.after or change.before
        assert about is not None
        assert self.known.get(about.uuid) == change.before
        assert change.before != change.after
        if change.after is None:
            assert about.uuid not in self.server.nodes, "the entry is still there"
            del self.known[about.uuid]
        else:
            assert change.before is None or change.before.uuid == change.after.uuid
            self.known[about.uuid] = change.after


class Transform:
    """The rules over pages. A batch ends at random, and at random it fails before and runs again."""

    def __init__(self, server: Server, chance: random.Random) -> None:
        self.subscriber = Subscriber(server)
        self.chance = chance
        self.pages = MemoryPages()
        self.batch: list[bytes] = []

    def take(self, record: LiveRecord, epoch: int) -> None:
        self.batch.append(encode_live_record(record, epoch))

    def end_batch(self) -> None:
        if self.chance.random() < 0.3:
            self._run(copy.deepcopy(self.pages))  # it fails at its end
        for change in self._run(self.pages):
            self.subscriber.take(change)
        self.batch = []

    def _run(self, pages: MemoryPages) -> list[EntryChange]:
        directory = LiveDirectory(PagedDirectory(pages, max_held_bytes=2000), pages)
        changes = []
        for data in self.batch:
            record = parse_message(data)
            assert isinstance(record, ParsedRecord)
            directory.begin()
            try:
                changes += apply_live_record(directory, record)
            except InvalidRecord as error:
                raise AssertionError(f"{error}: {data!r}") from error
        directory.flush()
        return changes


def as_entry(entry: LiveEntry) -> Entry:
    attributes: dict[str, list[Value]] = {
        attribute_key(name): [value.decode() for value in values] for name, values in entry.attributes.items()
    }
    return Entry(entry.dn, entry.uuid, attributes)


def require_equal(transform: Transform, server: Server) -> None:
    expected = {uuid: as_entry(entry) for uuid, entry in server.entries().items()}
    assert transform.subscriber.known == expected
    directory = LiveDirectory(PagedDirectory(transform.pages), transform.pages)
    assert directory.state.displaced == 0
    assert {entry.uuid: entry for _, entry in PagedDirectory(transform.pages).items()} == expected
    for uuid in expected:
        found = directory.find(uuid)
        assert found is not None
        assert found[1].uuid == uuid
    assert {directory.find_known(known) is not None for known in directory.unseen()} <= {True}


NAMES = ["ou=a", "ou=b", "ou=c"]
KINDS = st.sampled_from(["full", "delete", "delete", "present", "present"])
PICK = st.integers(0, 40)
OPERATION = st.tuples(
    st.sampled_from(["add", "add", "modify", "delete", "delete", "rename", "move", "move", "swap"]), PICK, PICK, PICK
)
OPERATIONS = st.lists(OPERATION, max_size=6)


@dataclass(frozen=True)
class Attempt:
    """A refresh that does not come to its end: after some records the source loses the connection, or ends."""

    kind: str
    records: int
    meanwhile: list[tuple[str, int, int, int]]
    crash: bool


@dataclass(frozen=True)
class Round:
    """The directory changes while the source is away, then refreshes fail, then one succeeds and the source follows."""

    away: list[tuple[str, int, int, int]]
    attempts: list[Attempt]
    kind: str
    records: int
    meanwhile: list[tuple[str, int, int, int]]
    following: list[tuple[str, int, int, int]]
    stores_cookie: bool
    crash: bool


ROUNDS = st.lists(
    st.builds(
        Round,
        away=OPERATIONS,
        attempts=st.lists(st.builds(Attempt, KINDS, st.integers(0, 9), OPERATIONS, st.booleans()), max_size=2),
        kind=KINDS,
        records=st.integers(0, 9),
        meanwhile=OPERATIONS,
        following=OPERATIONS,
        stores_cookie=st.booleans(),
        crash=st.booleans(),
    ),
    min_size=1,
    max_size=5,
)


class History:
    """A server, a source and the transform; rounds change them."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.server = Server()
        self.transform = Transform(self.server, self.chance)
        self.source = Source(self.server, self.transform.take)
        for number in range(12):  # three levels, with equal names in different places
            uuids = list(self.server.nodes)
            self.server.add(NAMES[number % 3], uuids[number // 3])

    def mix(self, records: list[Any]) -> list[Any]:
        return self.chance.sample(records, len(records))

    def live(self, each: Round) -> None:
        """Run one round."""
        source = self.source
        self.operate(each.away)
        for attempt in each.attempts:
            source.begin_refresh(attempt.kind, self.mix)
            source.continue_refresh(attempt.records)
            self.operate(attempt.meanwhile)
            self.end_attempt(crash=attempt.crash)
        source.begin_refresh(each.kind, self.mix)
        source.continue_refresh(each.records)
        self.operate(each.meanwhile)
        source.continue_refresh(1 << 30)
        if each.stores_cookie:
            source.store_cookie()
        self.operate(each.following)
        self.transform.end_batch()
        require_equal(self.transform, self.server)
        self.end_attempt(crash=each.crash)

    def end_attempt(self, *, crash: bool) -> None:
        source = self.source
        if crash:
            source.crash()
            self.transform.take(RefreshBegin(full=not source.cookie), source.epoch)
            for stale in (LiveEntry(ROOT, "ou=never", {}), RefreshEnd(True), RefreshBegin(full=False)):
                self.transform.take(stale, source.epoch - 1)  # of the process that was only paused
        else:
            source.disconnect()
        if self.chance.random() < 0.5:
            self.transform.end_batch()

    def operate(self, operations: list[tuple[str, int, int, int]]) -> None:
        for what, one, two, three in operations:
            server = self.server
            uuids = [uuid for uuid in server.nodes if uuid != ROOT] or [ROOT]
            first, second, name = uuids[one % len(uuids)], uuids[two % len(uuids)], NAMES[three % len(NAMES)]
            parent = ROOT if three == 0 else second
            match what:
                case "add":
                    self._follow(server.add(name, parent) is not None)
                case "modify":
                    server.modify(first, str(two))
                    self._follow(True)
                case "delete":
                    self._follow(server.delete(first))
                case "rename":
                    self._follow(server.rename(first, name, server.nodes[first].parent or ROOT))
                case "move":
                    self._follow(server.rename(first, server.nodes[first].rdn, parent))
                case "swap":
                    self._swap(first, second)

    def _follow(self, done: bool) -> None:
        if done:
            self.source.follow()

    def _swap(self, first: str, second: str) -> None:
        server = self.server
        one, two = server.nodes[first], server.nodes[second]
        if one.parent is None or two.parent is None or not server.rename(first, "ou=swap", ROOT):
            return
        self._follow(True)
        self._follow(server.rename(second, one.rdn, one.parent))
        self._follow(server.rename(first, two.rdn, two.parent))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(ROUNDS, st.integers(0, 1000))
def test_after_any_history_subscribers_know_the_directory(rounds: list[Round], seed: int) -> None:
    history = History(seed)
    for each in rounds:
        history.live(each)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(
    st.lists(st.tuples(OPERATIONS, st.integers(0, 5), st.booleans(), OPERATIONS), min_size=1, max_size=6),
    st.integers(0, 1000),
)
def test_operations_that_come_again_or_are_in_the_refresh_already_have_no_effect(
    rounds: list[tuple[list[tuple[str, int, int, int]], int, bool, list[tuple[str, int, int, int]]]], seed: int
) -> None:
    history = History(seed)
    server, source, take = history.server, history.source, history.transform.take
    sent = 0
    for operations, again, refreshes, meanwhile in rounds:
        history.operate(operations)
        if refreshes or not sent:
            begin, begin_csn = len(server.operations), csn_of(server.now)
            history.operate(meanwhile)
            take(RefreshBegin(full=True), source.epoch)
            for entry in history.mix(list(server.entries().values())):
                take(entry, source.epoch)
            take(RefreshEnd(True, (begin_csn,)), source.epoch)
            for operation in server.operations[max(begin - again, 0) :]:
                take(replace(operation, catch_up=True), source.epoch)
        else:
            for operation in server.operations[max(sent - again, 0) :]:
                take(operation, source.epoch)
        sent = len(server.operations)
        history.transform.end_batch()
        require_equal(history.transform, server)

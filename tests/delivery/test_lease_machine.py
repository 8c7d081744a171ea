"""Order is kept, no message is in two hands, nothing is lost: for any interleaving of consumers, crashes and clocks."""

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from purveyor.delivery import lease_rules
from purveyor.delivery.done import Seen
from purveyor.delivery.failure_history import KEPT
from purveyor.delivery.lease_rules import (
    Acked,
    Again,
    Ask,
    Book,
    Kind,
    Lease,
    Pending,
    Rules,
    Taken,
)
from purveyor.delivery.state_codec import decode, encode
from purveyor.model.delivery_policy import OrderBy
from purveyor.model.errors import LeaseLost
from tests.scale import pick

LENGTH = 30_000
INSTANCES = ("a", "b", "c")


@dataclass
class Process:
    """What one process knows: a book of some revision, and what it has read of the queue."""

    book: Book | None = None
    revision: int = 0
    there: dict[Kind, list[int]] = field(default_factory=lambda: {kind: [] for kind in Kind})
    to: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))

    def forget(self) -> None:
        self.book, self.there, self.to = None, {kind: [] for kind in Kind}, dict.fromkeys(Kind, 0)

    def seen(self) -> dict[Kind, Seen]:
        return {kind: Seen(self.there[kind], self.to[kind]) for kind in Kind}


class Machine(RuleBasedStateMachine):
    """A queue, a book that several processes write by compare-and-set, and a record of who was promised what."""

    order_by: OrderBy | None = OrderBy.POSITION
    state_bytes: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.wanted = Rules(order_by=self.order_by)
        if self.state_bytes is not None:
            self.wanted = self.wanted._replace(state_bytes=self.state_bytes)
        self.now = 1_800_000_000_000
        self.queue: dict[int, Pending] = {}
        self.positions: dict[int, int] = {}
        self.removed: set[int] = set()
        self.acked: set[int] = set()
        self.promised: dict[int, tuple[str, int]] = {}
        self.handed: dict[int, int] = {}
        self.given_back: dict[int, int] = {}
        self.stored = encode(Book(incarnation="i"))
        self.revision = 1
        self.processes = [Process() for _ in range(3)]

    # what a desk does

    def read(self, process: Process, lag: int) -> None:
        """See the queue as a replica has it that lags in what came last, and in what was removed."""
        assert process.book is not None
        for kind in Kind:
            found = sorted(each for each, message in self.queue.items() if message.kind is kind)
            found = [each for each in found if each not in self.removed]
            seen = found[: max(len(found) - lag, 0)] if kind is Kind.MAIN else found
            process.there[kind] = [each for each in seen if each not in process.book.done(kind)]
            process.to[kind] = max(seen, default=0)

    def change(self, process: Process, decide, lag: int = 0):  # type: ignore[no-untyped-def]
        while True:
            if process.book is None:
                process.book, process.revision = decode(self.stored), self.revision
                self.read(process, lag)
            book, value = decide(process.book)
            if book is None:
                return value
            if process.revision != self.revision:
                process.book = None
                continue
            self.stored, self.revision = encode(book), self.revision + 1
            process.book, process.revision = book, self.revision
            for kind in Kind:
                process.there[kind] = [each for each in process.there[kind] if each not in book.done(kind)]
            return value

    def pending(self, process: Process) -> list[Pending]:
        return [self.queue[sequence] for kind in Kind for sequence in process.there[kind]]

    def in_order(self) -> list[Pending]:
        left = [message for sequence, message in sorted(self.queue.items()) if sequence not in self.acked]
        return sorted(left, key=lambda message: list(Kind).index(message.kind))

    def note(self, sequences: set[int], book: Book) -> None:
        self.acked |= sequences
        for sequence in sequences:
            self.promised.pop(sequence, None)

    # what happens

    @rule(
        kind=st.sampled_from([Kind.MAIN, Kind.MAIN, Kind.PREFILL, Kind.RETRY]),
        key=st.sampled_from(["x", "y", "z", None]),
    )
    def append(self, kind: Kind, key: str | None) -> None:
        sequence = len(self.queue) + 1
        self.queue[sequence] = Pending(sequence, kind, key)
        if kind is Kind.MAIN:
            self.positions[sequence] = 10 * sequence
        else:  # more of the others comes only with a change of the registry or the book, which all processes see
            for process in self.processes:
                process.forget()

    @rule(
        which=st.integers(0, 2),
        instance=st.sampled_from(INSTANCES),
        most=st.integers(1, 4),
        pop=st.booleans(),
        lag=st.integers(0, 3),
    )
    def take(self, which: int, instance: str, most: int, pop: bool, lag: int) -> None:
        process = self.processes[which]

        def decide(book: Book) -> tuple[Book | None, tuple[Taken, bool]]:
            ask = Ask(instance=instance, now=self.now, length=LENGTH, most=most)
            taken = lease_rules.take(book, self.pending(process), ask, self.wanted)
            if taken.lease is None:
                return None if taken.book is book else taken.book, (taken, False)
            if not pop:
                return taken.book, (taken, False)
            acked = [self.word(sequence) for sequence in taken.lease.sequences]
            return lease_rules.acknowledge(taken.book, acked, process.seen()), (taken, True)

        taken, popped = self.change(process, decide, lag)
        if taken.lease is not None:
            self.check_grant(taken.lease, taken.deliveries)
            if self.order_by is OrderBy.POSITION:  # asking again, it gave up what it had
                mine = [sequence for sequence, (who, _) in self.promised.items() if who == instance]
                for sequence in mine:
                    del self.promised[sequence]
            for sequence in taken.lease.sequences:
                self.promised[sequence] = (instance, taken.lease.until)
                self.handed[sequence] = self.handed.get(sequence, 0) + 1
            if popped:
                self.note(set(taken.lease.sequences), taken.book)
        elif taken.again_at is not None:
            assert taken.again_at > self.now

    def check_grant(self, lease: Lease, deliveries: tuple[int, ...]) -> None:
        granted = lease.sequences
        assert not self.acked.intersection(granted)
        assert len(set(granted)) == len(granted)
        for sequence, count in zip(granted, deliveries, strict=True):
            who, until = self.promised.get(sequence, (lease.instance, 0))
            assert until <= self.now or (who == lease.instance and self.order_by is OrderBy.POSITION)
            assert count == self.handed.get(sequence, 0) + 1 - self.given_back.get(sequence, 0)
        order = [message.sequence for message in self.in_order()]
        if self.order_by is OrderBy.POSITION:
            assert list(granted) == order[: len(granted)]
        if self.order_by is OrderBy.KEY:
            for sequence in granted:
                key = self.queue[sequence].key
                same = [each for each in order if self.queue[each].key == key]
                out = [each for each in same if each != sequence and self.promised.get(each, ("", 0))[1] > self.now]
                assert key is None or (same[0] == sequence and not out) or self.overtaken_by_prefill(same, sequence)

    def overtaken_by_prefill(self, same: list[int], sequence: int) -> bool:
        """More that goes before it may come while a message of that key is out; then that one goes first."""
        order = list(Kind)
        later = order.index(self.queue[sequence].kind) > order.index(self.queue[same[0]].kind)
        return sequence not in same[:1] and later and sequence < same[0]

    def word(self, sequence: int) -> Acked:
        return Acked(sequence, self.queue[sequence].kind, self.positions.get(sequence, 0))

    @precondition(lambda self: self.handed)
    @rule(which=st.integers(0, 2), data=st.data())
    def acknowledge(self, which: int, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.handed)))
        process = self.processes[which]

        def decide(book: Book) -> tuple[Book | None, bool]:
            if sequence in book.done(self.queue[sequence].kind):
                return None, False
            return lease_rules.acknowledge(book, [self.word(sequence)], process.seen()), True

        new = self.change(process, decide)
        if process.revision == self.revision:
            assert new == (sequence not in self.acked)
        if new:
            self.note({sequence}, process.book or Book(incarnation="i"))

    @precondition(lambda self: self.handed)
    @rule(which=st.integers(0, 2), instance=st.sampled_from(INSTANCES), data=st.data())
    def acknowledge_up_to(self, which: int, instance: str, data: st.DataObject) -> None:
        last = data.draw(st.sampled_from(sorted(self.handed)))
        process = self.processes[which]

        def decide(book: Book) -> tuple[Book | None, list[int]]:
            book = lease_rules.expire(book, self.now)
            if last not in process.there[self.queue[last].kind]:
                return None, []
            try:
                found = lease_rules.handed_out(book, self.pending(process), last, instance, self.wanted)
            except LeaseLost:
                return None, []
            acked = [self.word(message.sequence) for message in found]
            return lease_rules.acknowledge(book, acked, process.seen()), [message.sequence for message in acked]

        acked = self.change(process, decide)
        for sequence in acked:
            who, until = self.promised.get(sequence, (instance, 0))
            assert who == instance or until <= self.now
        self.note(set(acked), process.book or Book(incarnation="i"))

    @precondition(lambda self: self.promised)
    @rule(which=st.integers(0, 2), data=st.data(), delay=st.sampled_from([0, 5_000, 60_000]))
    def retry(self, which: int, data: st.DataObject, delay: int) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.promised)))
        instance = data.draw(st.sampled_from(INSTANCES))
        before = decode(self.stored).lease_of(sequence)

        def decide(book: Book) -> tuple[Book | None, bool]:
            try:
                again = Again(instance=instance, now=self.now, delay=delay)
                return lease_rules.retry(book, sequence, again, self.wanted), True
            except LeaseLost:
                return None, False

        process = self.processes[which]
        process.book = None
        if self.change(process, decide):
            who, until = self.promised[sequence]
            assert who == instance or until <= self.now
            released = [sequence]
            if before is not None and before.until > self.now and self.order_by is OrderBy.POSITION:
                behind = before.sequences[before.sequences.index(sequence) :]
                for each in behind[1:]:
                    self.given_back[each] = self.given_back.get(each, 0) + 1
                released = list(behind)
            for each in released:
                self.promised.pop(each, None)

    @precondition(lambda self: self.promised)
    @rule(which=st.integers(0, 2), data=st.data())
    def extend(self, which: int, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.promised)))
        instance = data.draw(st.sampled_from(INSTANCES))

        def decide(book: Book) -> tuple[Book | None, Lease | None]:
            try:
                return lease_rules.extend(book, sequence, instance, self.now, LENGTH)
            except LeaseLost:
                return None, None

        lease = self.change(self.processes[which], decide)
        if lease is not None:
            assert self.promised[sequence][0] == instance
            for each in lease.sequences:
                self.promised[each] = (instance, lease.until)

    @rule(which=st.integers(0, 2))
    def crash(self, which: int) -> None:
        self.processes[which].forget()

    @rule(which=st.integers(0, 2))
    def tidy(self, which: int) -> None:
        book = self.processes[which].book or decode(self.stored)
        gone = {each for each, message in self.queue.items() if each in book.done(message.kind)}
        assert gone <= self.acked
        self.removed |= gone

    @rule(milliseconds=st.sampled_from([1, 1_000, 29_999, 30_000, 61_000, -1, -31_000, -3_600_000, 3_600_000]))
    def clock(self, milliseconds: int) -> None:
        self.now += milliseconds
        # A clock set back does not prolong a promise, nor renew one that was over.
        self.promised = {
            sequence: (who, min(until, self.now + LENGTH))
            for sequence, (who, until) in self.promised.items()
            if until > self.now
        }

    # what always holds

    @invariant()
    def the_book_is_sound(self) -> None:
        book = decode(self.stored)
        assert encode(book) == self.stored
        out = [sequence for lease in book.leases for sequence in lease.sequences]
        assert len(set(out)) == len(out)
        assert not self.acked.intersection(out)
        assert {each for each, message in self.queue.items() if each in book.done(message.kind)} == self.acked
        assert book.position == max((self.positions.get(sequence, 0) for sequence in self.acked), default=0)
        if self.order_by is OrderBy.POSITION:
            assert len({lease.instance for lease in book.leases}) <= 1
        assert {each: len(found) for each, found in book.ends.items()} == {
            each: min(count, KEPT) for each, count in book.tries.items()
        }

    def teardown(self) -> None:
        """Whatever happened, one consumer that goes on gets all the rest, in order, and the queue is empty then."""
        process, got = Process(), []
        for kind in Kind:
            self.append(kind, None)
        rest = [message.sequence for message in self.in_order()]
        for _ in range(2 * len(self.queue) + 3):
            self.now += 2 * LENGTH + 1
            process.forget()

            def decide(book: Book) -> tuple[Book | None, tuple[int, ...]]:
                ask = Ask(instance="last", now=self.now, length=LENGTH, most=3)
                taken = lease_rules.take(book, self.pending(process), ask, self.wanted)
                if taken.lease is None:
                    return None if taken.book is book else taken.book, ()
                acked = [self.word(sequence) for sequence in taken.lease.sequences]
                return lease_rules.acknowledge(taken.book, acked, process.seen()), taken.lease.sequences

            got += self.change(process, decide)
        assert sorted(got) == sorted(rest)
        assert got == rest or self.order_by is not OrderBy.POSITION
        book = decode(self.stored)
        for kind in Kind:
            mine = [sequence for sequence, message in self.queue.items() if message.kind is kind]
            assert book.done(kind).floor >= max(mine, default=0)
            assert not book.done(kind).ranges


class ByKey(Machine):
    order_by = OrderBy.KEY


class Parallel(Machine):
    order_by = None


class Full(Machine):
    """As much is out as the stored state has room for, which is not much."""

    state_bytes = 1500

    @invariant()
    def the_state_fits(self) -> None:
        assert self.state_bytes is not None
        book = decode(self.stored)
        assert len(encode(book._replace(ends={}))) <= self.state_bytes * 11 // 10


class FullByKey(Full):
    order_by = OrderBy.KEY


class FullParallel(Full):
    order_by = None


MANY = settings(
    max_examples=pick(25, 1000),
    stateful_step_count=pick(30, 50),
    suppress_health_check=list(HealthCheck),
)
TestOrdered = Machine.TestCase
TestOrdered.settings = MANY
TestByKey = ByKey.TestCase
TestByKey.settings = MANY
TestParallel = Parallel.TestCase
TestParallel.settings = MANY
TestFullByKey = FullByKey.TestCase
TestFullByKey.settings = MANY
TestFullParallel = FullParallel.TestCase
TestFullParallel.settings = MANY

"""Order is kept, no message is in two hands, nothing is lost: for any interleaving of consumers, crashes and clocks."""

import json
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from purveyor.delivery import leases
from purveyor.delivery.book import decode, encode
from purveyor.delivery.done import Done, Seen
from purveyor.delivery.ends import KEPT, MOST_KEPT, log
from purveyor.delivery.leases import Acked, Again, Ask, Book, Kind, Lease, Pending, Rules, Taken
from purveyor.delivery.words import End, Ended
from purveyor.model.errors import InvalidInput, LeaseLost
from purveyor.model.policy import OrderBy
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

    def __init__(self) -> None:
        super().__init__()
        self.wanted = Rules(order_by=self.order_by)
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
            taken = leases.take(book, self.pending(process), ask, self.wanted)
            if taken.lease is None:
                return None if taken.book is book else taken.book, (taken, False)
            if not pop:
                return taken.book, (taken, False)
            acked = [self.word(sequence) for sequence in taken.lease.sequences]
            return leases.acknowledge(taken.book, acked, process.seen()), (taken, True)

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
            return leases.acknowledge(book, [self.word(sequence)], process.seen()), True

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
            book = leases.expire(book, self.now)
            if last not in process.there[self.queue[last].kind]:
                return None, []
            try:
                found = leases.handed_out(book, self.pending(process), last, instance, self.wanted)
            except LeaseLost:
                return None, []
            acked = [self.word(message.sequence) for message in found]
            return leases.acknowledge(book, acked, process.seen()), [message.sequence for message in acked]

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
                return leases.retry(book, sequence, again, self.wanted), True
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
                return leases.extend(book, sequence, instance, self.now, LENGTH)
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
                taken = leases.take(book, self.pending(process), ask, self.wanted)
                if taken.lease is None:
                    return None if taken.book is book else taken.book, ()
                acked = [self.word(sequence) for sequence in taken.lease.sequences]
                return leases.acknowledge(taken.book, acked, process.seen()), taken.lease.sequences

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


MANY = settings(
    max_examples=pick(25, 1000),
    stateful_step_count=pick(30, 50),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestOrdered = Machine.TestCase
TestOrdered.settings = MANY
TestByKey = ByKey.TestCase
TestByKey.settings = MANY
TestParallel = Parallel.TestCase
TestParallel.settings = MANY


def message(sequence: int, kind: Kind = Kind.MAIN, key: str | None = None) -> Pending:
    return Pending(sequence, kind, key)


def ask(instance: str = "a", most: int = 1, now: int = 0) -> Ask:
    return Ask(instance=instance, now=now, length=LENGTH, most=most)


NEW = Book(incarnation="i")
ORDERED, ANY, KEYED = Rules(), Rules(order_by=None), Rules(order_by=OrderBy.KEY)


def test_the_oldest_comes_again_to_its_instance_at_once_and_to_another_when_the_lease_is_over() -> None:
    queue = [message(1), message(2)]
    first = leases.take(NEW, queue, ask("a"), ORDERED)
    again = leases.take(first.book, queue, ask("a", now=1), ORDERED)
    assert again.lease is not None
    assert (again.lease.main, again.deliveries) == ((1,), (2,))
    standby = leases.take(again.book, queue, ask("b", now=2), ORDERED)
    assert (standby.lease, standby.again_at) == (None, 1 + LENGTH)
    over = leases.take(again.book, queue, ask("b", now=1 + LENGTH), ORDERED)
    assert over.lease is not None
    assert (over.lease.instance, over.lease.main, over.deliveries) == ("b", (1,), (3,))


def test_a_message_put_off_holds_back_all_behind_it_in_order_and_only_its_key_by_key() -> None:
    queue = [message(1, key="x"), message(2, key="x"), message(3, key="y")]
    for rules, given in ((ORDERED, None), (KEYED, (3,)), (ANY, (2, 3))):
        taken = leases.take(NEW, queue, ask(), rules)
        put_off = leases.retry(taken.book, 1, Again(instance="a", now=0, delay=5000), rules)
        rest = leases.take(put_off, queue, ask("b", most=9, now=1), rules)
        assert (rest.lease and rest.lease.main) == given
        due = leases.take(put_off, queue, ask("b", now=5000), rules)
        assert due.lease is not None
        assert (due.lease.main, due.deliveries) == ((1,), (2,))


def test_of_one_object_one_message_is_out_and_messages_without_a_key_wait_for_nobody() -> None:
    queue = [message(1, key="x"), message(2), message(3, key="x"), message(4), message(5, key="y")]
    first = leases.take(NEW, queue, ask(most=9), KEYED)
    assert first.lease is not None
    assert first.lease.main == (1, 2, 4, 5)
    assert leases.take(first.book, queue, ask("b", most=9), KEYED).lease is None
    freed = leases.acknowledge(first.book, [Acked(1, Kind.MAIN, 7)])
    second = leases.take(freed, queue[1:], ask("b", most=9), KEYED)
    assert second.lease is not None
    assert second.lease.main == (3,)


def test_prefill_comes_first_and_up_to_means_the_order_of_delivery() -> None:
    queue = [message(8, Kind.PREFILL), message(9, Kind.PREFILL), message(1), message(2), message(3)]
    taken = leases.take(NEW, queue, ask(most=4), ORDERED)
    assert taken.lease is not None
    assert taken.lease.sequences == (8, 9, 1, 2)
    up_to = leases.handed_out(taken.book, queue, 1, "a", ORDERED)
    assert [each.sequence for each in up_to] == [8, 9, 1]
    with pytest.raises(LeaseLost):
        leases.handed_out(taken.book, queue, 3, "a", ORDERED)
    with pytest.raises(LeaseLost, match="instance 'a'"):
        leases.handed_out(taken.book, queue, 1, "b", ORDERED)


def test_up_to_touches_nothing_that_another_has() -> None:
    queue = [message(number) for number in range(1, 7)]
    mine = leases.take(NEW, queue, ask("a", most=2), ANY)
    theirs = leases.take(mine.book, queue, ask("b", most=4), ANY)
    found = leases.handed_out(theirs.book, queue, 5, "b", ANY)
    assert [each.sequence for each in found] == [3, 4, 5]


def test_after_the_last_attempt_a_message_is_to_be_given_up() -> None:
    rules = Rules(order_by=None, max_attempts=2)
    queue = [message(1), message(2)]
    book = NEW
    for now in (0, LENGTH):
        book = leases.take(book, queue, ask(now=now), rules).book
    last = leases.take(book, queue, ask(most=9, now=2 * LENGTH), rules)
    assert last.lease is not None
    assert ([each.sequence for each in last.exhausted], last.lease.main) == ([1], (2,))
    ordered = leases.take(book, queue, ask(most=9, now=2 * LENGTH), Rules(max_attempts=2))
    assert ([each.sequence for each in ordered.exhausted], ordered.lease) == ([1], None)


def test_a_message_that_is_acknowledged_when_it_first_comes_leaves_nothing_in_the_book() -> None:
    queue = [message(1), message(2)]
    taken = leases.take(NEW, queue, ask(most=2), ORDERED)
    after = leases.acknowledge(taken.book, [Acked(1, Kind.MAIN), Acked(2, Kind.MAIN)])
    assert (after.ends, after.tries) == ({}, {})
    assert b"ends" not in encode(taken.book) + encode(after)


def test_how_deliveries_ended_is_told_until_the_message_is_acknowledged() -> None:
    queue = [message(1), message(2)]
    first = leases.take(NEW, queue, ask("a", most=2), ORDERED)
    again = leases.take(first.book, queue, ask("a", most=2, now=7), ORDERED)
    over = leases.take(again.book, queue, ask("b", now=99_999), ORDERED)
    back = leases.retry(over.book, 1, Again(instance="b", now=100_000), ORDERED)
    book = decode(encode(back))
    shared = (End(7, Ended.ASKED_AGAIN, "a"), End(7 + LENGTH, Ended.RAN_OUT, "a"))
    assert book.ends == {1: (*shared, End(100_000, Ended.RETRY, "b")), 2: shared}
    assert [each["error"] for each in log(book.ends[1])] == [
        "instance 'a' asked for the next one without an answer to this one",
        "the lease of instance 'a' ran out",
        "instance 'b' gave it back, to be delivered again",
    ]
    assert log(book.ends[2])[0] | {"error": ""} == {
        "time": "1970-01-01T00:00:00.007000+00:00",
        "status": None,
        "error": "",
        "excerpt": "",
    }
    assert leases.acknowledge(book, [Acked(1, Kind.MAIN)]).ends == {2: shared}
    given_up = leases.take(book, queue, ask(now=100_001), Rules(max_attempts=3))
    assert ([each.sequence for each in given_up.exhausted], given_up.ends) == ([1], book.ends)


def test_notes_of_how_deliveries_ended_are_bounded_and_those_of_a_lease_are_one() -> None:
    queue = [message(number) for number in range(1, leases.MOST_IN_FLIGHT + 1)]
    book = NEW
    for number in range(KEPT + 5):
        book = leases.take(book, queue[:1], ask("i" * 200, now=number), ORDERED).book
    assert [end.at for end in book.ends[1]] == [*range(5, KEPT + 5)][-len(book.ends[1]) :]
    assert len(book.ends[1]) == KEPT
    assert len(encode(book)) < 3000
    for number in range(3):
        book = leases.take(book, queue, ask("a", len(queue), now=LENGTH * (number + 2)), ANY).book
    assert len(book.ends) == MOST_KEPT
    assert sum(map(len, book.ends.values())) <= MOST_KEPT
    assert len(encode(book._replace(tries={}))) < 1000


def test_an_end_of_which_only_a_newer_version_knows_is_left_out_and_rubbish_is_refused() -> None:
    known, other = [5, "retry", "a", [[1, 2]]], [6, "abducted", "a", [[1, 1]]]
    ends = json.dumps([known, other]).encode()
    end = End(5, Ended.RETRY, "a")
    assert decode(b'{"incarnation": "i", "position": 7, "ends": %s}' % ends).ends == {1: (end,), 2: (end,)}
    for rubbish in (b"[[1]]", b"[7]", b'[["x", "retry", "a", [[1, 1]]]]', b"7"):
        with pytest.raises(InvalidInput):
            decode(b'{"incarnation": "i", "position": 7, "ends": %s}' % rubbish)


def test_what_is_out_and_put_off_is_bounded() -> None:
    queue = [message(number) for number in range(1, leases.MOST_IN_FLIGHT + 3)]
    taken = leases.take(NEW, queue, ask(most=leases.MOST_IN_FLIGHT + 2), ANY)
    assert taken.lease is not None
    assert len(taken.lease.main) == leases.MOST_IN_FLIGHT
    assert leases.take(taken.book, queue, ask("b"), ANY).lease is None
    assert len(encode(taken.book)) < 1000
    put_off = leases.retry(taken.book, 7, Again(instance="a", now=0, delay=1), ANY)
    assert leases.take(put_off, queue, ask("b"), ANY).lease is None


def test_only_the_holder_extends_retries_and_rejects() -> None:
    taken = leases.take(NEW, [message(1), message(2)], ask("a"), ANY)
    for sequence, who in ((1, "b"), (2, "a")):
        with pytest.raises(LeaseLost):
            leases.extend(taken.book, sequence, who, 1, LENGTH)
        with pytest.raises(LeaseLost):
            leases.retry(taken.book, sequence, Again(instance=who, now=1), ANY)
        with pytest.raises(LeaseLost):
            leases.may_give_up(taken.book, sequence, who)
    book, longer = leases.extend(taken.book, 1, "a", 1000, LENGTH)
    assert longer.until == 1000 + LENGTH
    assert leases.expire(book, LENGTH + 1).leases == (longer,)


def test_a_book_that_knows_only_a_position_is_a_book() -> None:
    book = decode(b'{"incarnation": "i", "position": 7}')
    assert book == Book(incarnation="i", position=7)


def test_what_is_done_out_of_turn_becomes_one_floor_when_the_gaps_are_filled() -> None:
    seen = Seen([3, 5, 8, 13, 21], 21)
    done = Done(1).plus([8, 13], seen)
    assert done == Done(1, ((8, 13),))
    assert [number for number in (1, 3, 8, 10, 13, 21) if number in done] == [1, 8, 10, 13]
    assert done.plus([3], seen) == Done(3, ((8, 13),))
    assert done.plus([3], seen).plus([5], Seen([5, 21], 21)) == Done(13)
    assert done.plus([3, 5], Seen([3, 5], 13)) == Done(13)
    assert Done().plus([7]) == Done(0, ((7, 7),))  # without knowledge nothing is joined
    assert Done.from_json(done.to_json()) == done

"""Order holds, no message has two leases, nothing is lost: for any interleaving of consumers, crashes and clocks."""

from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from purveyor.delivery import lease_rules
from purveyor.delivery.lease_rules import MAX_FAILURES_PER_MESSAGE
from purveyor.delivery.lease_types import AckTarget, LeaseDecision, LeasePolicy, LeaseRequest, NackRequest, Pending
from purveyor.model.ack_ranges import SeenMessages
from purveyor.model.delivery_policy import OrderBy
from purveyor.model.delivery_state import DeliveryState, Lease, SubjectKind, decode, encode
from purveyor.model.errors import LeaseLost
from tests.support.scale import pick

LENGTH = 30_000
INSTANCES = ("a", "b", "c")


@dataclass
class Process:
    """What one process knows: a state of some revision, and what it has read of the queue."""

    state: DeliveryState | None = None
    revision: int = 0
    there: dict[SubjectKind, list[int]] = field(default_factory=lambda: {kind: [] for kind in SubjectKind})
    to: dict[SubjectKind, int] = field(default_factory=lambda: dict.fromkeys(SubjectKind, 0))

    def forget(self) -> None:
        self.state, self.there, self.to = None, {kind: [] for kind in SubjectKind}, dict.fromkeys(SubjectKind, 0)

    def seen(self) -> dict[SubjectKind, SeenMessages]:
        return {kind: SeenMessages(self.there[kind], self.to[kind]) for kind in SubjectKind}


class Machine(RuleBasedStateMachine):
    """A queue, a state that several processes write by compare-and-set, and the leases that were granted."""

    order_by: OrderBy | None = OrderBy.POSITION
    max_state_bytes: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.policy = LeasePolicy(order_by=self.order_by)
        if self.max_state_bytes is not None:
            self.policy = self.policy._replace(max_state_bytes=self.max_state_bytes)
        self.now = 1_800_000_000_000
        self.queue: dict[int, Pending] = {}
        self.positions: dict[int, int] = {}
        self.removed: set[int] = set()
        self.acked: set[int] = set()
        self.leased: dict[int, tuple[str, int]] = {}
        self.delivered: dict[int, int] = {}
        self.given_back: dict[int, int] = {}
        self.stored = encode(DeliveryState(incarnation="i"))
        self.revision = 1
        self.processes = [Process() for _ in range(3)]

    # what a state writer does

    def read(self, process: Process, lag: int) -> None:
        """Read the queue from a replica that lags in added and deleted messages."""
        assert process.state is not None
        for kind in SubjectKind:
            found = sorted(each for each, message in self.queue.items() if message.kind is kind)
            found = [each for each in found if each not in self.removed]
            seen = found[: max(len(found) - lag, 0)] if kind is SubjectKind.MAIN else found
            process.there[kind] = [each for each in seen if each not in process.state.acked(kind)]
            process.to[kind] = max(seen, default=0)

    def change(self, process: Process, transition, lag: int = 0):  # type: ignore[no-untyped-def]
        while True:
            if process.state is None:
                process.state, process.revision = decode(self.stored), self.revision
                self.read(process, lag)
            state, value = transition(process.state)
            if state is None:
                return value
            if process.revision != self.revision:
                process.state = None
                continue
            self.stored, self.revision = encode(state), self.revision + 1
            process.state, process.revision = state, self.revision
            for kind in SubjectKind:
                process.there[kind] = [each for each in process.there[kind] if each not in state.acked(kind)]
            return value

    def pending(self, process: Process) -> list[Pending]:
        return [self.queue[sequence] for kind in SubjectKind for sequence in process.there[kind]]

    def in_order(self) -> list[Pending]:
        left = [message for sequence, message in sorted(self.queue.items()) if sequence not in self.acked]
        return sorted(left, key=lambda message: list(SubjectKind).index(message.kind))

    def record_acked(self, sequences: set[int], state: DeliveryState) -> None:
        self.acked |= sequences
        for sequence in sequences:
            self.leased.pop(sequence, None)

    # events

    @rule(
        kind=st.sampled_from([SubjectKind.MAIN, SubjectKind.MAIN, SubjectKind.PREFILL, SubjectKind.RETRY]),
        key=st.sampled_from(["x", "y", "z", None]),
    )
    def append(self, kind: SubjectKind, key: str | None) -> None:
        sequence = len(self.queue) + 1
        self.queue[sequence] = Pending(sequence, kind, key)
        if kind is SubjectKind.MAIN:
            self.positions[sequence] = 10 * sequence
        else:  # more of the others comes only with a change of the registry or the state, which all processes see
            for process in self.processes:
                process.forget()

    @rule(
        which=st.integers(0, 2),
        instance=st.sampled_from(INSTANCES),
        max_messages=st.integers(1, 4),
        pop=st.booleans(),
        lag=st.integers(0, 3),
    )
    def take(self, which: int, instance: str, max_messages: int, pop: bool, lag: int) -> None:
        process = self.processes[which]

        def transition(state: DeliveryState) -> tuple[DeliveryState | None, tuple[LeaseDecision, bool]]:
            request = LeaseRequest(instance=instance, now=self.now, duration=LENGTH, max_messages=max_messages)
            decision = lease_rules.lease_pending(state, self.pending(process), request, self.policy)
            if decision.lease is None:
                return None if decision.state is state else decision.state, (decision, False)
            if not pop:
                return decision.state, (decision, False)
            acked = [self.target(sequence) for sequence in decision.lease.sequences]
            return lease_rules.ack(decision.state, acked, process.seen()), (decision, True)

        decision, popped = self.change(process, transition, lag)
        if decision.lease is not None:
            self.check_grant(decision.lease, decision.deliveries)
            if self.order_by is OrderBy.POSITION:  # a new request gives up the earlier lease
                mine = [sequence for sequence, (who, _) in self.leased.items() if who == instance]
                for sequence in mine:
                    del self.leased[sequence]
            for sequence in decision.lease.sequences:
                self.leased[sequence] = (instance, decision.lease.until)
                self.delivered[sequence] = self.delivered.get(sequence, 0) + 1
            if popped:
                self.record_acked(set(decision.lease.sequences), decision.state)
        elif decision.next_check_at is not None:
            assert decision.next_check_at > self.now

    def check_grant(self, lease: Lease, deliveries: tuple[int, ...]) -> None:
        granted = lease.sequences
        assert not self.acked.intersection(granted)
        assert len(set(granted)) == len(granted)
        for sequence, count in zip(granted, deliveries, strict=True):
            who, until = self.leased.get(sequence, (lease.instance, 0))
            assert until <= self.now or (who == lease.instance and self.order_by is OrderBy.POSITION)
            assert count == self.delivered.get(sequence, 0) + 1 - self.given_back.get(sequence, 0)
        order = [message.sequence for message in self.in_order()]
        if self.order_by is OrderBy.POSITION:
            assert list(granted) == order[: len(granted)]
        if self.order_by is OrderBy.KEY:
            for sequence in granted:
                key = self.queue[sequence].key
                same = [each for each in order if self.queue[each].key == key]
                out = [each for each in same if each != sequence and self.leased.get(each, ("", 0))[1] > self.now]
                assert key is None or (same[0] == sequence and not out) or self.overtaken_by_prefill(same, sequence)

    def overtaken_by_prefill(self, same: list[int], sequence: int) -> bool:
        """Earlier messages may arrive while a message of that key is leased; then the leased one comes first."""
        order = list(SubjectKind)
        later = order.index(self.queue[sequence].kind) > order.index(self.queue[same[0]].kind)
        return sequence not in same[:1] and later and sequence < same[0]

    def target(self, sequence: int) -> AckTarget:
        return AckTarget(sequence, self.queue[sequence].kind, self.positions.get(sequence, 0))

    @precondition(lambda self: self.delivered)
    @rule(which=st.integers(0, 2), data=st.data())
    def acknowledge(self, which: int, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.delivered)))
        process = self.processes[which]

        def transition(state: DeliveryState) -> tuple[DeliveryState | None, bool]:
            if sequence in state.acked(self.queue[sequence].kind):
                return None, False
            return lease_rules.ack(state, [self.target(sequence)], process.seen()), True

        new = self.change(process, transition)
        if process.revision == self.revision:
            assert new == (sequence not in self.acked)
        if new:
            self.record_acked({sequence}, process.state or DeliveryState(incarnation="i"))

    @precondition(lambda self: self.delivered)
    @rule(which=st.integers(0, 2), instance=st.sampled_from(INSTANCES), data=st.data())
    def acknowledge_up_to(self, which: int, instance: str, data: st.DataObject) -> None:
        last = data.draw(st.sampled_from(sorted(self.delivered)))
        process = self.processes[which]

        def transition(state: DeliveryState) -> tuple[DeliveryState | None, list[int]]:
            state = lease_rules.expire_leases(state, self.now)
            if last not in process.there[self.queue[last].kind]:
                return None, []
            try:
                found = lease_rules.leased_up_to(state, self.pending(process), last, instance, self.policy)
            except LeaseLost:
                return None, []
            acked = [self.target(message.sequence) for message in found]
            return lease_rules.ack(state, acked, process.seen()), [message.sequence for message in acked]

        acked = self.change(process, transition)
        for sequence in acked:
            who, until = self.leased.get(sequence, (instance, 0))
            assert who == instance or until <= self.now
        self.record_acked(set(acked), process.state or DeliveryState(incarnation="i"))

    @precondition(lambda self: self.leased)
    @rule(which=st.integers(0, 2), data=st.data(), delay=st.sampled_from([0, 5_000, 60_000]))
    def retry(self, which: int, data: st.DataObject, delay: int) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.leased)))
        instance = data.draw(st.sampled_from(INSTANCES))
        before = decode(self.stored).lease_of(sequence)

        def transition(state: DeliveryState) -> tuple[DeliveryState | None, bool]:
            try:
                again = NackRequest(instance=instance, now=self.now, delay=delay)
                return lease_rules.nack(state, sequence, again, self.policy), True
            except LeaseLost:
                return None, False

        process = self.processes[which]
        process.state = None
        if self.change(process, transition):
            who, until = self.leased[sequence]
            assert who == instance or until <= self.now
            released = [sequence]
            if before is not None and before.until > self.now and self.order_by is OrderBy.POSITION:
                behind = before.sequences[before.sequences.index(sequence) :]
                for each in behind[1:]:
                    self.given_back[each] = self.given_back.get(each, 0) + 1
                released = list(behind)
            for each in released:
                self.leased.pop(each, None)

    @precondition(lambda self: self.leased)
    @rule(which=st.integers(0, 2), data=st.data())
    def extend(self, which: int, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.leased)))
        instance = data.draw(st.sampled_from(INSTANCES))

        def transition(state: DeliveryState) -> tuple[DeliveryState | None, Lease | None]:
            try:
                return lease_rules.extend_lease(state, sequence, instance, self.now, LENGTH)
            except LeaseLost:
                return None, None

        lease = self.change(self.processes[which], transition)
        if lease is not None:
            assert self.leased[sequence][0] == instance
            for each in lease.sequences:
                self.leased[each] = (instance, lease.until)

    @rule(which=st.integers(0, 2))
    def crash(self, which: int) -> None:
        self.processes[which].forget()

    @rule(which=st.integers(0, 2))
    def delete_acked(self, which: int) -> None:
        state = self.processes[which].state or decode(self.stored)
        gone = {each for each, message in self.queue.items() if each in state.acked(message.kind)}
        assert gone <= self.acked
        self.removed |= gone

    @rule(milliseconds=st.sampled_from([1, 1_000, 29_999, 30_000, 61_000, -1, -31_000, -3_600_000, 3_600_000]))
    def clock(self, milliseconds: int) -> None:
        self.now += milliseconds
        # A clock that is set back neither prolongs a lease nor renews an expired one.
        self.leased = {
            sequence: (who, min(until, self.now + LENGTH))
            for sequence, (who, until) in self.leased.items()
            if until > self.now
        }

    # invariants

    @invariant()
    def the_state_is_sound(self) -> None:
        state = decode(self.stored)
        assert encode(state) == self.stored
        out = [sequence for lease in state.leases for sequence in lease.sequences]
        assert len(set(out)) == len(out)
        assert not self.acked.intersection(out)
        assert {each for each, message in self.queue.items() if each in state.acked(message.kind)} == self.acked
        assert state.position == max((self.positions.get(sequence, 0) for sequence in self.acked), default=0)
        if self.order_by is OrderBy.POSITION:
            assert len({lease.instance for lease in state.leases}) <= 1
        assert {each: len(found) for each, found in state.failures.items()} == {
            each: min(count, MAX_FAILURES_PER_MESSAGE) for each, count in state.delivery_counts.items()
        }

    def teardown(self) -> None:
        """After any history, one consumer gets all remaining messages in order, and the queue is empty then."""
        process, got = Process(), []
        for kind in SubjectKind:
            self.append(kind, None)
        rest = [message.sequence for message in self.in_order()]
        for _ in range(2 * len(self.queue) + 3):
            self.now += 2 * LENGTH + 1
            process.forget()

            def transition(state: DeliveryState) -> tuple[DeliveryState | None, tuple[int, ...]]:
                request = LeaseRequest(instance="last", now=self.now, duration=LENGTH, max_messages=3)
                decision = lease_rules.lease_pending(state, self.pending(process), request, self.policy)
                if decision.lease is None:
                    return None if decision.state is state else decision.state, ()
                acked = [self.target(sequence) for sequence in decision.lease.sequences]
                return lease_rules.ack(decision.state, acked, process.seen()), decision.lease.sequences

            got += self.change(process, transition)
        assert sorted(got) == sorted(rest)
        assert got == rest or self.order_by is not OrderBy.POSITION
        state = decode(self.stored)
        for kind in SubjectKind:
            mine = [sequence for sequence, message in self.queue.items() if message.kind is kind]
            assert state.acked(kind).floor >= max(mine, default=0)
            assert not state.acked(kind).ranges


class ByKey(Machine):
    order_by = OrderBy.KEY


class Parallel(Machine):
    order_by = None


class Full(Machine):
    """The stored state has room for few leases."""

    max_state_bytes = 1500

    @invariant()
    def the_state_fits(self) -> None:
        assert self.max_state_bytes is not None
        state = decode(self.stored)
        assert len(encode(state._replace(failures={}))) <= self.max_state_bytes * 11 // 10


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

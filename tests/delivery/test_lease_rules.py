"""The lease rules one by one: which instance gets a message, when it is delivered again, and what the state keeps."""

import json

import pytest

from purveyor.delivery import lease_rules
from purveyor.delivery.dead_letters.park import as_attempt_log
from purveyor.delivery.lease_rules import MAX_FAILURES_PER_MESSAGE, MAX_FAILURES_PER_SUBSCRIPTION
from purveyor.delivery.lease_types import AckTarget, LeasePolicy, LeaseRequest, NackRequest, Pending
from purveyor.model.ack_ranges import AckRanges, SeenMessages
from purveyor.model.delivery_policy import OrderBy
from purveyor.model.delivery_state import DeliveryState, FailedDelivery, FailureCause, SubjectKind, decode, encode
from purveyor.model.errors import LeaseLost, UnreadableRecord

LENGTH = 30_000


def message(sequence: int, kind: SubjectKind = SubjectKind.MAIN, key: str | None = None) -> Pending:
    return Pending(sequence, kind, key)


def request(instance: str = "a", max_messages: int = 1, now: int = 0) -> LeaseRequest:
    return LeaseRequest(instance=instance, now=now, duration=LENGTH, max_messages=max_messages)


NEW = DeliveryState(incarnation="i")
ORDERED, ANY, KEYED = LeasePolicy(), LeasePolicy(order_by=None), LeasePolicy(order_by=OrderBy.KEY)


def test_the_oldest_comes_again_to_its_instance_at_once_and_to_another_when_the_lease_is_over() -> None:
    queue = [message(1), message(2)]
    first = lease_rules.lease_pending(NEW, queue, request("a"), ORDERED)
    again = lease_rules.lease_pending(first.state, queue, request("a", now=1), ORDERED)
    assert again.lease is not None
    assert (again.lease.main, again.deliveries) == ((1,), (2,))
    standby = lease_rules.lease_pending(again.state, queue, request("b", now=2), ORDERED)
    assert (standby.lease, standby.next_check_at) == (None, 1 + LENGTH)
    over = lease_rules.lease_pending(again.state, queue, request("b", now=1 + LENGTH), ORDERED)
    assert over.lease is not None
    assert (over.lease.instance, over.lease.main, over.deliveries) == ("b", (1,), (3,))


def test_a_delayed_message_blocks_later_ones_in_order_and_only_its_key_by_key() -> None:
    queue = [message(1, key="x"), message(2, key="x"), message(3, key="y")]
    for policy, given in ((ORDERED, None), (KEYED, (3,)), (ANY, (2, 3))):
        decision = lease_rules.lease_pending(NEW, queue, request(), policy)
        delayed = lease_rules.nack(decision.state, 1, NackRequest(instance="a", now=0, delay=5000), policy)
        rest = lease_rules.lease_pending(delayed, queue, request("b", max_messages=9, now=1), policy)
        assert (rest.lease and rest.lease.main) == given
        due = lease_rules.lease_pending(delayed, queue, request("b", now=5000), policy)
        assert due.lease is not None
        assert (due.lease.main, due.deliveries) == ((1,), (2,))


def test_one_message_per_key_is_leased_and_messages_without_a_key_are_free() -> None:
    queue = [message(1, key="x"), message(2), message(3, key="x"), message(4), message(5, key="y")]
    first = lease_rules.lease_pending(NEW, queue, request(max_messages=9), KEYED)
    assert first.lease is not None
    assert first.lease.main == (1, 2, 4, 5)
    assert lease_rules.lease_pending(first.state, queue, request("b", max_messages=9), KEYED).lease is None
    freed = lease_rules.ack(first.state, [AckTarget(1, SubjectKind.MAIN, 7)])
    second = lease_rules.lease_pending(freed, queue[1:], request("b", max_messages=9), KEYED)
    assert second.lease is not None
    assert second.lease.main == (3,)


def test_prefill_comes_first_and_up_to_means_the_order_of_delivery() -> None:
    queue = [message(8, SubjectKind.PREFILL), message(9, SubjectKind.PREFILL), message(1), message(2), message(3)]
    decision = lease_rules.lease_pending(NEW, queue, request(max_messages=4), ORDERED)
    assert decision.lease is not None
    assert decision.lease.sequences == (8, 9, 1, 2)
    up_to = lease_rules.leased_up_to(decision.state, queue, 1, "a", ORDERED)
    assert [each.sequence for each in up_to] == [8, 9, 1]
    with pytest.raises(LeaseLost):
        lease_rules.leased_up_to(decision.state, queue, 3, "a", ORDERED)
    with pytest.raises(LeaseLost, match="instance 'a'"):
        lease_rules.leased_up_to(decision.state, queue, 1, "b", ORDERED)


def test_ack_up_to_does_not_touch_messages_of_another_instance() -> None:
    queue = [message(number) for number in range(1, 7)]
    mine = lease_rules.lease_pending(NEW, queue, request("a", max_messages=2), ANY)
    theirs = lease_rules.lease_pending(mine.state, queue, request("b", max_messages=4), ANY)
    found = lease_rules.leased_up_to(theirs.state, queue, 5, "b", ANY)
    assert [each.sequence for each in found] == [3, 4, 5]


def test_after_the_last_attempt_a_message_is_exhausted() -> None:
    policy = LeasePolicy(order_by=None, max_attempts=2)
    queue = [message(1), message(2)]
    state = NEW
    for now in (0, LENGTH):
        state = lease_rules.lease_pending(state, queue, request(now=now), policy).state
    last = lease_rules.lease_pending(state, queue, request(max_messages=9, now=2 * LENGTH), policy)
    assert last.lease is not None
    assert ([each.sequence for each in last.exhausted], last.lease.main) == ([1], (2,))
    ordered = lease_rules.lease_pending(
        state, queue, request(max_messages=9, now=2 * LENGTH), LeasePolicy(max_attempts=2)
    )
    assert ([each.sequence for each in ordered.exhausted], ordered.lease) == ([1], None)


def test_a_message_acknowledged_at_its_first_delivery_leaves_nothing_in_the_state() -> None:
    queue = [message(1), message(2)]
    decision = lease_rules.lease_pending(NEW, queue, request(max_messages=2), ORDERED)
    after = lease_rules.ack(decision.state, [AckTarget(1, SubjectKind.MAIN), AckTarget(2, SubjectKind.MAIN)])
    assert (after.failures, after.delivery_counts) == ({}, {})
    assert b"ends" not in encode(decision.state) + encode(after)


def test_failed_deliveries_are_recorded_until_the_message_is_acknowledged() -> None:
    queue = [message(1), message(2)]
    first = lease_rules.lease_pending(NEW, queue, request("a", max_messages=2), ORDERED)
    again = lease_rules.lease_pending(first.state, queue, request("a", max_messages=2, now=7), ORDERED)
    over = lease_rules.lease_pending(again.state, queue, request("b", now=99_999), ORDERED)
    back = lease_rules.nack(over.state, 1, NackRequest(instance="b", now=100_000), ORDERED)
    state = decode(encode(back))
    shared = (
        FailedDelivery(7, FailureCause.REQUESTED_AGAIN, "a"),
        FailedDelivery(7 + LENGTH, FailureCause.LEASE_EXPIRED, "a"),
    )
    assert state.failures == {1: (*shared, FailedDelivery(100_000, FailureCause.NACKED, "b")), 2: shared}
    assert [each["error"] for each in as_attempt_log(state.failures[1])] == [
        "instance 'a' asked for the next message without an answer to this one",
        "the lease of instance 'a' expired",
        "instance 'b' asked for a retry",
    ]
    assert as_attempt_log(state.failures[2])[0] | {"error": ""} == {
        "time": "1970-01-01T00:00:00.007000+00:00",
        "status": None,
        "error": "",
        "excerpt": "",
    }
    assert lease_rules.ack(state, [AckTarget(1, SubjectKind.MAIN)]).failures == {2: shared}
    given_up = lease_rules.lease_pending(state, queue, request(now=100_001), LeasePolicy(max_attempts=3))
    assert ([each.sequence for each in given_up.exhausted], given_up.failures) == ([1], state.failures)


def test_recorded_failures_are_bounded_and_those_of_a_lease_are_stored_once() -> None:
    queue = [message(number) for number in range(1, lease_rules.MAX_IN_FLIGHT_MESSAGES + 1)]
    state = NEW
    for number in range(MAX_FAILURES_PER_MESSAGE + 5):
        state = lease_rules.lease_pending(state, queue[:1], request("i" * 200, now=number), ORDERED).state
    assert [end.at for end in state.failures[1]] == [*range(5, MAX_FAILURES_PER_MESSAGE + 5)][-len(state.failures[1]) :]
    assert len(state.failures[1]) == MAX_FAILURES_PER_MESSAGE
    assert len(encode(state)) < 3000
    for number in range(3):
        state = lease_rules.lease_pending(state, queue, request("a", len(queue), now=LENGTH * (number + 2)), ANY).state
    assert len(state.failures) == MAX_FAILURES_PER_SUBSCRIPTION
    assert sum(map(len, state.failures.values())) <= MAX_FAILURES_PER_SUBSCRIPTION
    assert len(encode(state._replace(delivery_counts={}))) < 1000


def test_an_unknown_failure_cause_is_ignored_and_damaged_failures_are_refused() -> None:
    known, other = [5, "retry", "a", [[1, 2]]], [6, "abducted", "a", [[1, 1]]]
    ends = json.dumps([known, other]).encode()
    end = FailedDelivery(5, FailureCause.NACKED, "a")
    assert decode(b'{"incarnation": "i", "position": 7, "ends": %s}' % ends).failures == {1: (end,), 2: (end,)}
    for rubbish in (b"[[1]]", b"[7]", b'[["x", "retry", "a", [[1, 1]]]]', b"7"):
        with pytest.raises(UnreadableRecord):
            decode(b'{"incarnation": "i", "position": 7, "ends": %s}' % rubbish)


def test_leased_and_delayed_messages_are_bounded() -> None:
    queue = [message(number) for number in range(1, lease_rules.MAX_IN_FLIGHT_MESSAGES + 3)]
    decision = lease_rules.lease_pending(NEW, queue, request(max_messages=lease_rules.MAX_IN_FLIGHT_MESSAGES + 2), ANY)
    assert decision.lease is not None
    assert len(decision.lease.main) == lease_rules.MAX_IN_FLIGHT_MESSAGES
    assert lease_rules.lease_pending(decision.state, queue, request("b"), ANY).lease is None
    assert len(encode(decision.state)) < 1000
    delayed = lease_rules.nack(decision.state, 7, NackRequest(instance="a", now=0, delay=1), ANY)
    assert lease_rules.lease_pending(delayed, queue, request("b"), ANY).lease is None


def test_only_the_holder_extends_retries_and_rejects() -> None:
    decision = lease_rules.lease_pending(NEW, [message(1), message(2)], request("a"), ANY)
    for sequence, who in ((1, "b"), (2, "a")):
        with pytest.raises(LeaseLost):
            lease_rules.extend_lease(decision.state, sequence, who, 1, LENGTH)
        with pytest.raises(LeaseLost):
            lease_rules.nack(decision.state, sequence, NackRequest(instance=who, now=1), ANY)
        with pytest.raises(LeaseLost):
            lease_rules.check_may_settle(decision.state, sequence, who)
    state, longer = lease_rules.extend_lease(decision.state, 1, "a", 1000, LENGTH)
    assert longer.until == 1000 + LENGTH
    assert lease_rules.expire_leases(state, LENGTH + 1).leases == (longer,)


def test_a_state_with_a_position_only_is_readable() -> None:
    state = decode(b'{"incarnation": "i", "position": 7}')
    assert state == DeliveryState(incarnation="i", position=7)


def test_acked_ranges_become_one_floor_when_the_gaps_are_filled() -> None:
    seen = SeenMessages([3, 5, 8, 13, 21], 21)
    done = AckRanges(1).plus([8, 13], seen)
    assert done == AckRanges(1, ((8, 13),))
    assert [number for number in (1, 3, 8, 10, 13, 21) if number in done] == [1, 8, 10, 13]
    assert done.plus([3], seen) == AckRanges(3, ((8, 13),))
    assert done.plus([3], seen).plus([5], SeenMessages([5, 21], 21)) == AckRanges(13)
    assert done.plus([3, 5], SeenMessages([3, 5], 13)) == AckRanges(13)
    assert AckRanges().plus([7]) == AckRanges(0, ((7, 7),))  # without known messages nothing is joined
    assert AckRanges.from_json(done.to_json()) == done


@pytest.mark.parametrize("policy", [ORDERED, ANY, KEYED])
def test_a_lease_is_truncated_at_its_byte_limit(policy: LeasePolicy) -> None:
    queue = [Pending(number, SubjectKind.MAIN, f"k{number}", size=40) for number in range(1, 6)]
    wanted = request(max_messages=9)._replace(max_bytes=100)
    decision = lease_rules.lease_pending(NEW, queue, wanted, policy)
    assert decision.lease is not None
    assert (decision.lease.main, decision.truncated, decision.wants_more) == ((1, 2), True, False)
    large = lease_rules.lease_pending(NEW, queue, wanted._replace(max_bytes=10), policy)
    assert large.lease is not None
    assert (large.lease.main, large.truncated) == ((1,), True)
    last = lease_rules.lease_pending(NEW, queue[:2], wanted, policy)
    assert (last.truncated, last.wants_more) == (False, True)

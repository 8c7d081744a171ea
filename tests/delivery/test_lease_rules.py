"""The rules of leases, one by one: who gets what, when it comes again, and what the book keeps of it."""

import json

import pytest

from purveyor.delivery import lease_rules
from purveyor.delivery.done import Done, Seen
from purveyor.delivery.failure_history import KEPT, MOST_KEPT, log
from purveyor.delivery.lease_rules import Acked, Again, Ask, Book, Kind, Pending, Rules
from purveyor.delivery.state import End, Ended
from purveyor.delivery.state_codec import decode, encode
from purveyor.model.delivery_policy import OrderBy
from purveyor.model.errors import LeaseLost, UnreadableRecord

LENGTH = 30_000


def message(sequence: int, kind: Kind = Kind.MAIN, key: str | None = None) -> Pending:
    return Pending(sequence, kind, key)


def ask(instance: str = "a", most: int = 1, now: int = 0) -> Ask:
    return Ask(instance=instance, now=now, length=LENGTH, most=most)


NEW = Book(incarnation="i")
ORDERED, ANY, KEYED = Rules(), Rules(order_by=None), Rules(order_by=OrderBy.KEY)


def test_the_oldest_comes_again_to_its_instance_at_once_and_to_another_when_the_lease_is_over() -> None:
    queue = [message(1), message(2)]
    first = lease_rules.take(NEW, queue, ask("a"), ORDERED)
    again = lease_rules.take(first.book, queue, ask("a", now=1), ORDERED)
    assert again.lease is not None
    assert (again.lease.main, again.deliveries) == ((1,), (2,))
    standby = lease_rules.take(again.book, queue, ask("b", now=2), ORDERED)
    assert (standby.lease, standby.again_at) == (None, 1 + LENGTH)
    over = lease_rules.take(again.book, queue, ask("b", now=1 + LENGTH), ORDERED)
    assert over.lease is not None
    assert (over.lease.instance, over.lease.main, over.deliveries) == ("b", (1,), (3,))


def test_a_message_put_off_holds_back_all_behind_it_in_order_and_only_its_key_by_key() -> None:
    queue = [message(1, key="x"), message(2, key="x"), message(3, key="y")]
    for rules, given in ((ORDERED, None), (KEYED, (3,)), (ANY, (2, 3))):
        taken = lease_rules.take(NEW, queue, ask(), rules)
        put_off = lease_rules.retry(taken.book, 1, Again(instance="a", now=0, delay=5000), rules)
        rest = lease_rules.take(put_off, queue, ask("b", most=9, now=1), rules)
        assert (rest.lease and rest.lease.main) == given
        due = lease_rules.take(put_off, queue, ask("b", now=5000), rules)
        assert due.lease is not None
        assert (due.lease.main, due.deliveries) == ((1,), (2,))


def test_of_one_object_one_message_is_out_and_messages_without_a_key_wait_for_nobody() -> None:
    queue = [message(1, key="x"), message(2), message(3, key="x"), message(4), message(5, key="y")]
    first = lease_rules.take(NEW, queue, ask(most=9), KEYED)
    assert first.lease is not None
    assert first.lease.main == (1, 2, 4, 5)
    assert lease_rules.take(first.book, queue, ask("b", most=9), KEYED).lease is None
    freed = lease_rules.acknowledge(first.book, [Acked(1, Kind.MAIN, 7)])
    second = lease_rules.take(freed, queue[1:], ask("b", most=9), KEYED)
    assert second.lease is not None
    assert second.lease.main == (3,)


def test_prefill_comes_first_and_up_to_means_the_order_of_delivery() -> None:
    queue = [message(8, Kind.PREFILL), message(9, Kind.PREFILL), message(1), message(2), message(3)]
    taken = lease_rules.take(NEW, queue, ask(most=4), ORDERED)
    assert taken.lease is not None
    assert taken.lease.sequences == (8, 9, 1, 2)
    up_to = lease_rules.handed_out(taken.book, queue, 1, "a", ORDERED)
    assert [each.sequence for each in up_to] == [8, 9, 1]
    with pytest.raises(LeaseLost):
        lease_rules.handed_out(taken.book, queue, 3, "a", ORDERED)
    with pytest.raises(LeaseLost, match="instance 'a'"):
        lease_rules.handed_out(taken.book, queue, 1, "b", ORDERED)


def test_up_to_touches_nothing_that_another_has() -> None:
    queue = [message(number) for number in range(1, 7)]
    mine = lease_rules.take(NEW, queue, ask("a", most=2), ANY)
    theirs = lease_rules.take(mine.book, queue, ask("b", most=4), ANY)
    found = lease_rules.handed_out(theirs.book, queue, 5, "b", ANY)
    assert [each.sequence for each in found] == [3, 4, 5]


def test_after_the_last_attempt_a_message_is_to_be_given_up() -> None:
    rules = Rules(order_by=None, max_attempts=2)
    queue = [message(1), message(2)]
    book = NEW
    for now in (0, LENGTH):
        book = lease_rules.take(book, queue, ask(now=now), rules).book
    last = lease_rules.take(book, queue, ask(most=9, now=2 * LENGTH), rules)
    assert last.lease is not None
    assert ([each.sequence for each in last.exhausted], last.lease.main) == ([1], (2,))
    ordered = lease_rules.take(book, queue, ask(most=9, now=2 * LENGTH), Rules(max_attempts=2))
    assert ([each.sequence for each in ordered.exhausted], ordered.lease) == ([1], None)


def test_a_message_that_is_acknowledged_when_it_first_comes_leaves_nothing_in_the_book() -> None:
    queue = [message(1), message(2)]
    taken = lease_rules.take(NEW, queue, ask(most=2), ORDERED)
    after = lease_rules.acknowledge(taken.book, [Acked(1, Kind.MAIN), Acked(2, Kind.MAIN)])
    assert (after.ends, after.tries) == ({}, {})
    assert b"ends" not in encode(taken.book) + encode(after)


def test_how_deliveries_ended_is_told_until_the_message_is_acknowledged() -> None:
    queue = [message(1), message(2)]
    first = lease_rules.take(NEW, queue, ask("a", most=2), ORDERED)
    again = lease_rules.take(first.book, queue, ask("a", most=2, now=7), ORDERED)
    over = lease_rules.take(again.book, queue, ask("b", now=99_999), ORDERED)
    back = lease_rules.retry(over.book, 1, Again(instance="b", now=100_000), ORDERED)
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
    assert lease_rules.acknowledge(book, [Acked(1, Kind.MAIN)]).ends == {2: shared}
    given_up = lease_rules.take(book, queue, ask(now=100_001), Rules(max_attempts=3))
    assert ([each.sequence for each in given_up.exhausted], given_up.ends) == ([1], book.ends)


def test_notes_of_how_deliveries_ended_are_bounded_and_those_of_a_lease_are_one() -> None:
    queue = [message(number) for number in range(1, lease_rules.MOST_IN_FLIGHT + 1)]
    book = NEW
    for number in range(KEPT + 5):
        book = lease_rules.take(book, queue[:1], ask("i" * 200, now=number), ORDERED).book
    assert [end.at for end in book.ends[1]] == [*range(5, KEPT + 5)][-len(book.ends[1]) :]
    assert len(book.ends[1]) == KEPT
    assert len(encode(book)) < 3000
    for number in range(3):
        book = lease_rules.take(book, queue, ask("a", len(queue), now=LENGTH * (number + 2)), ANY).book
    assert len(book.ends) == MOST_KEPT
    assert sum(map(len, book.ends.values())) <= MOST_KEPT
    assert len(encode(book._replace(tries={}))) < 1000


def test_an_end_of_which_only_a_newer_version_knows_is_left_out_and_rubbish_is_refused() -> None:
    known, other = [5, "retry", "a", [[1, 2]]], [6, "abducted", "a", [[1, 1]]]
    ends = json.dumps([known, other]).encode()
    end = End(5, Ended.RETRY, "a")
    assert decode(b'{"incarnation": "i", "position": 7, "ends": %s}' % ends).ends == {1: (end,), 2: (end,)}
    for rubbish in (b"[[1]]", b"[7]", b'[["x", "retry", "a", [[1, 1]]]]', b"7"):
        with pytest.raises(UnreadableRecord):
            decode(b'{"incarnation": "i", "position": 7, "ends": %s}' % rubbish)


def test_what_is_out_and_put_off_is_bounded() -> None:
    queue = [message(number) for number in range(1, lease_rules.MOST_IN_FLIGHT + 3)]
    taken = lease_rules.take(NEW, queue, ask(most=lease_rules.MOST_IN_FLIGHT + 2), ANY)
    assert taken.lease is not None
    assert len(taken.lease.main) == lease_rules.MOST_IN_FLIGHT
    assert lease_rules.take(taken.book, queue, ask("b"), ANY).lease is None
    assert len(encode(taken.book)) < 1000
    put_off = lease_rules.retry(taken.book, 7, Again(instance="a", now=0, delay=1), ANY)
    assert lease_rules.take(put_off, queue, ask("b"), ANY).lease is None


def test_only_the_holder_extends_retries_and_rejects() -> None:
    taken = lease_rules.take(NEW, [message(1), message(2)], ask("a"), ANY)
    for sequence, who in ((1, "b"), (2, "a")):
        with pytest.raises(LeaseLost):
            lease_rules.extend(taken.book, sequence, who, 1, LENGTH)
        with pytest.raises(LeaseLost):
            lease_rules.retry(taken.book, sequence, Again(instance=who, now=1), ANY)
        with pytest.raises(LeaseLost):
            lease_rules.may_give_up(taken.book, sequence, who)
    book, longer = lease_rules.extend(taken.book, 1, "a", 1000, LENGTH)
    assert longer.until == 1000 + LENGTH
    assert lease_rules.expire(book, LENGTH + 1).leases == (longer,)


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


@pytest.mark.parametrize("rules", [ORDERED, ANY, KEYED])
def test_a_lease_holds_so_many_bytes_and_says_that_there_are_more(rules: Rules) -> None:
    queue = [Pending(number, Kind.MAIN, f"k{number}", size=40) for number in range(1, 6)]
    wanted = ask(most=9)._replace(most_bytes=100)
    taken = lease_rules.take(NEW, queue, wanted, rules)
    assert taken.lease is not None
    assert (taken.lease.main, taken.cut, taken.wants_more) == ((1, 2), True, False)
    large = lease_rules.take(NEW, queue, wanted._replace(most_bytes=10), rules)
    assert large.lease is not None
    assert (large.lease.main, large.cut) == ((1,), True)
    last = lease_rules.take(NEW, queue[:2], wanted, rules)
    assert (last.cut, last.wants_more) == (False, True)

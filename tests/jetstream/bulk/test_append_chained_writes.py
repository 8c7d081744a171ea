"""Chained writes: a broken chain leaves no gap, and batches are used where a chain is not suitable."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from purveyor.jetstream.address import Address
from purveyor.jetstream.api import ErrorReply, Receipt
from purveyor.jetstream.bulk import (
    AppendOptions,
    Outcome,
    RefusalKind,
    Target,
    append_once,
    outgoing,
    publish_many,
)
from purveyor.jetstream.bulk.append.chained_writes import (
    PROBE_ROWS,
    WriteSpeed,
    WriteSpeeds,
)
from purveyor.jetstream.bulk.append.target_state import ChainProgress, RowChain, SentRows
from purveyor.jetstream.bulk.net.connection import ServerInfo
from purveyor.jetstream.bulk.net.pool import close_idle
from purveyor.jetstream.bulk.replies import KNOWN_ROW
from tests.support.append import BATCHED, CHAINED, choose_write_mode, limit_batch_rows, make, one, stored, table
from tests.support.bulk_messages import rows
from tests.support.bulk_servers import Server, make_stream, request_api, serving, state
from tests.support.forgetting import forget_ids_now

CONFLICT = ErrorReply(400, 10070, "wrong last msg ID: 7")
TOO_LARGE = ErrorReply(400, 10054, "message size exceeds maximum allowed")


@pytest.fixture(autouse=True)
def _chained(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_write_mode(CHAINED, monkeypatch)


def ways(address: Address, stream: str) -> Counter[str]:
    """Count how the messages of a stream were written, by the expectations in their headers."""
    names = [{name for name, _ in row["headers"]} for row in rows(address, stream)]
    return Counter(
        CHAINED if "Nats-Expected-Last-Msg-Id" in each else BATCHED if "Nats-Batch-Id" in each else "alone"
        for each in names
    )


def once(action: Callable[[], object]) -> Callable[[int], None]:
    """Return an `on_progress` that acts once, when some hundred rows are stored."""
    acted: list[int] = []

    def act(done: int) -> None:
        if done >= 300 and not acted:
            acted.append(done)
            action()

    return act


# What breaks a chain


@pytest.mark.parametrize("subject", ["main", "prefill"])
@pytest.mark.parametrize("messages", [1, 2, 7])
def test_messages_of_another_writer_leave_no_gap(address: Address, name: str, subject: str, messages: int) -> None:
    """With thousands of rows in flight, no row after the first refused one may meet its expectation."""
    target = make(address, name)
    others = [(f"{name}.{subject}", b"0", None, None)] * messages
    foreign = once(lambda: publish_many(address, outgoing(others)))
    given = table(range(1, 20_001))
    assert one(append_once(address, [(target, given)], AppendOptions(on_progress=foreign))) == Outcome(
        target, 20_000, 0, 20_000
    )
    found = [int(row["data"]) for row in rows(address, name)]
    assert [position for position in found if position] == list(range(1, 20_001))
    assert found.count(0) == messages
    used = ways(address, name)
    assert used["alone"] + used[BATCHED] > messages + 1, "the chain was broken"


def test_a_chain_broken_between_two_sends_continues(
    address: Address, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_batch_rows(monkeypatch, 100)
    target = make(address, name)
    foreign = once(lambda: publish_many(address, outgoing([(f"{name}.prefill", b"0", None, None)])))
    append_once(address, [(target, table(range(1, 1001)))], AppendOptions(on_progress=foreign))
    assert [int(row["data"]) for row in rows(address, name)] == [*range(1, 302), 0, *range(302, 1001)]
    assert ways(address, name) == {CHAINED: 998, "alone": 3}


def test_rows_with_known_ids_are_skipped(address: Address, name: str) -> None:
    target = make(address, name)
    append_once(address, [(target, table([300, 301, 302, 1700]))])
    request_api(address, f"STREAM.PURGE.{name}", {})
    assert one(append_once(address, [(target, table(range(1, 3001)))])) == Outcome(target, 2996, 4, 3000)
    assert stored(address, name) == [n for n in range(1, 3001) if n not in (300, 301, 302, 1700)]


def test_a_full_stream_ends_at_the_first_row_it_did_not_take(address: Address, name: str) -> None:
    """Even if the stream has room again while later rows are in flight."""
    target = make(address, name, max_msgs=2500, discard="new")
    over = threading.Event()

    def make_room() -> None:
        while not over.is_set():
            seen = state(address, name)
            if seen["messages"] == 2500:
                request_api(address, f"STREAM.MSG.DELETE.{name}", {"seq": seen["first_seq"], "no_erase": True})

    consumer = threading.Thread(target=make_room)
    consumer.start()
    try:
        outcome = one(append_once(address, [(target, table(range(1, 8001)))]))
    finally:
        over.set()
        consumer.join()
    found = stored(address, name)
    assert found == list(range(found[0], outcome.last_position + 1)), "no gap"
    if outcome.refused is not None:
        assert (outcome.refused.kind, outcome.refused.position) == (RefusalKind.FULL, outcome.last_position + 1)


def test_a_row_too_large_for_one_target_does_not_affect_the_others(address: Address, name: str) -> None:
    small, large = make(address, f"{name}-small", max_msg_size=2000), make(address, f"{name}-large")
    bodies = [b"%d" % n + bytes(3000 if n == 4321 else 0) for n in range(1, 6001)]
    given = table(range(1, 6001)).set_column(1, "data", pa.array(bodies, pa.binary()))
    outcomes = append_once(address, [(small, given), (large, given)])
    assert outcomes[1] == Outcome(large, 6000, 0, 6000)
    assert (outcomes[0].stored, outcomes[0].last_position) == (4320, 4320)
    assert outcomes[0].refused is not None
    assert (outcomes[0].refused.position, outcomes[0].refused.kind) == (4321, RefusalKind.TOO_LARGE)
    assert stored(address, small.stream) == list(range(1, 4321))


@pytest.mark.parametrize("window", [100_000_000, 120_000_000_000])
def test_two_writers_of_the_same_rows_store_each_once(address: Address, name: str, window: int) -> None:
    """Whether or not the stream remembers their ids."""
    targets = [make(address, f"{name}-{number}", duplicate_window=window) for number in range(3)]
    given = table(range(1, 8001))
    begin = threading.Barrier(2)

    def write(_: int) -> list[Outcome]:
        begin.wait()
        return append_once(address, [(target, given) for target in targets])

    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(write, range(2)))
    for target, mine, theirs in zip(targets, *results, strict=True):
        assert (mine.refused, theirs.refused) == (None, None)
        assert (mine.last_position, theirs.last_position) == (8000, 8000)
        assert stored(address, target.stream) == list(range(1, 8001))


def test_another_stream_takes_nothing_even_if_it_knows_the_ids(address: Address, name: str) -> None:
    good = make(address, name)
    make_stream(address, f"{name}-else", allow_atomic=True)
    wrong = Target(subject=f"{name}.other", stream=f"{name}-else")
    given = table(range(1, 3001))
    for _ in range(2):
        written, refused = append_once(address, [(good, given), (wrong, given)])
        assert (written.last_position, written.refused) == (3000, None)
        assert (refused.stored, refused.skipped) == (0, 0)
        assert refused.refused is not None
        assert (refused.refused.position, refused.refused.kind) == (1, RefusalKind.OTHER)
    assert stored(address, name) == list(range(1, 3001))


@contextmanager
def writing(address: Address, subject: str) -> Iterator[None]:
    """Write to a subject all the time."""
    over = threading.Event()

    def write() -> None:
        while not over.is_set():
            publish_many(address, outgoing([(subject, b"0", None, None)]))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_concurrent_prefill_makes_the_writer_use_batches(address: Address, name: str) -> None:
    target = make(address, name)
    with writing(address, f"{name}.prefill"):
        assert one(append_once(address, [(target, table(range(1, 8001)))])).stored == 8000
    found = [int(row["data"]) for row in rows(address, name) if row["subject"] == target.subject]
    assert found == list(range(1, 8001))


def test_a_writer_suspended_during_a_chain_does_no_harm(
    address: Address, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others wrote the rows meanwhile, readers deleted them, and the stream forgot their ids."""
    limit_batch_rows(monkeypatch, 100)
    make_stream(address, f"KV_{name}", [f"$KV.{name}.>"])
    make(address, name, duplicate_window=100_000_000)
    target = Target(subject=f"{name}.main", stream=name, floor_subject=f"$KV.{name}.ox", floor_stream=f"KV_{name}")

    def suspend() -> None:
        append_once(address, [(target, table(range(1, 701)))])
        publish_many(address, outgoing([(f"$KV.{name}.ox", b'{"position": 700}', None, None)]))
        request_api(address, f"STREAM.PURGE.{name}", {})
        forget_ids_now(address, name, f"{name}.probe")

    outcome = one(append_once(address, [(target, table(range(1, 1001)))], AppendOptions(on_progress=once(suspend))))
    assert (outcome.last_position, outcome.refused) == (1000, None)
    assert stored(address, name) == list(range(701, 1001))


# Where rows go in a chain, and where in batches


def test_targets_that_share_a_table_each_get_what_they_miss(address: Address, name: str) -> None:
    targets = [make(address, f"{name}-{number}") for number in range(12)]
    given = table(range(1, 5001), body=bytes(50))
    floors = [0, 1, 1999, 2000, 2001, 4995, 4996, 5000, 17, 0, 3000, 0]
    work = [(replace(target, floor=floor), given) for target, floor in zip(targets, floors, strict=True)]
    outcomes = append_once(address, work)
    assert [(outcome.stored, outcome.skipped) for outcome in outcomes] == [(5000 - floor, floor) for floor in floors]
    for target, floor in zip(targets, floors, strict=True):
        assert stored(address, target.stream) == list(range(floor + 1, 5001))
    assert ways(address, targets[0].stream) == {CHAINED: 4999, "alone": 1}
    assert ways(address, targets[6].stream) == {"alone": 4}, "a few rows go one by one"


def test_rows_without_ids_and_targets_that_share_a_stream_go_in_batches(
    address: Address, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make(address, name)
    given = table(range(1, 101))
    ids = [*map(str, range(1, 100)), None]
    append_once(address, [(target, given.set_column(2, "msg_id", pa.array(ids, pa.string())))])
    append_once(address, [(target, table(range(101, 201), ids=False))])
    others = [Target(subject=f"{name}.{number}", stream=name) for number in range(2)]
    work = [(other, table(range(first, first + 100))) for other, first in zip(others, (1000, 2000), strict=True)]
    assert all(outcome.stored == 100 for outcome in append_once(address, work))
    assert ways(address, name) == {BATCHED: 400}
    parse = ServerInfo.parse
    monkeypatch.setattr(ServerInfo, "parse", lambda info: replace(parse(info), clustered=True))
    close_idle()
    append_once(address, [(target, table(range(201, 301)))])
    assert ways(address, name) == {BATCHED: 500}, "a cluster may answer out of order"


def use(speeds: WriteSpeeds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("purveyor.jetstream.bulk.append.chained_writes.WRITE_SPEEDS", speeds)


def test_slow_single_writes_make_the_writer_use_batches_and_remember_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a server that syncs each write; the test sets the threshold so that any speed is slow."""
    monkeypatch.setattr("purveyor.jetstream.bulk.append.chained_writes._MIN_FAST_ROWS_PER_SECOND", 1e9)
    use(WriteSpeeds(), monkeypatch)
    with serving(tmp_path) as server:
        for number, expected in enumerate(({"alone": 1, CHAINED: 2 * PROBE_ROWS}, {})):
            targets = [make(server.address, f"S{number}-{each}") for each in range(2)]
            assert all(
                outcome.stored == 3000
                for outcome in append_once(server.address, [(target, table(range(1, 3001))) for target in targets])
            )
            found = sum((ways(server.address, target.stream) for target in targets), Counter[str]())
            assert found[CHAINED] == expected.get(CHAINED, 0)


def test_the_write_speed_is_measured_once_and_remembered(
    server: Server, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("purveyor.jetstream.bulk.append.chained_writes._MIN_FAST_ROWS_PER_SECOND", 0.001)
    speeds = WriteSpeeds()
    use(speeds, monkeypatch)
    target = make(server.address, name)
    assert one(append_once(server.address, [(target, table(range(1, 3001)))])).stored == 3000
    assert speeds.of(server.address.urls) is WriteSpeed.FAST
    assert ways(server.address, name) == {"alone": 1, CHAINED: 2999}


def test_a_speed_is_slow_after_two_slow_probes_and_forgotten_after_ten_minutes() -> None:
    now = [0.0]
    speeds = WriteSpeeds(lambda: now[0])
    one, other = ("nats://one",), ("nats://other",)
    speeds.record(one, 200, 0.2)
    assert speeds.of(one) is WriteSpeed.UNKNOWN, "it may have been a busy moment"
    speeds.record(one, 10, 9.0)
    assert speeds.of(one) is WriteSpeed.UNKNOWN, "a few rows tell nothing"
    speeds.record(one, 200, 0.2)
    speeds.record(other, 200, 0.01)
    assert (speeds.of(one), speeds.of(other)) == (WriteSpeed.SLOW, WriteSpeed.FAST)
    now[0] = 599.0
    assert (speeds.of(one), speeds.of(other)) == (WriteSpeed.SLOW, WriteSpeed.FAST)
    now[0] = 601.0
    assert (speeds.of(one), speeds.of(other)) == (WriteSpeed.UNKNOWN, WriteSpeed.UNKNOWN)
    speeds.record(one, 200, 0.2)
    assert speeds.of(one) is WriteSpeed.UNKNOWN, "what was slow long ago does not count"
    speeds.record(one, 200, 0.01)
    speeds.record(one, 200, 0.2)
    assert speeds.of(one) is WriteSpeed.UNKNOWN, "neither does what was slow before it was fast"


# The meaning of replies


def chain(*answers: Receipt | ErrorReply | None) -> RowChain:
    """A chain with these replies to its groups of three rows; the first row is a group by itself."""
    result = RowChain()
    result.begin(10)
    for number, answer in enumerate(answers):
        first, rows = (10, 1) if not number else (8 + number * 3, 3)
        sent = SentRows(number, first, rows, 100, float(number))
        if answer is not None:
            sent.record_reply(answer)
        result.sent_rows.append(sent)
    return result


def ok(sequence: int) -> Receipt:
    return Receipt("S", sequence, duplicate=False)


SEEN = Receipt("S", 3, duplicate=True)


@pytest.mark.parametrize(
    ("answers", "expected", "begun"),
    [
        ([None], None, False),
        ([ok(5)], ChainProgress(11, 1, 0.0), True),
        ([SEEN], ChainProgress(11, 0, 0.0), True),
        ([ok(5), ok(8), None], ChainProgress(14, 4, 1.0), True),
        ([ok(5), None, ok(11)], ChainProgress(11, 1, 0.0), True),
        ([CONFLICT], ChainProgress(10, 0, 0.0, CONFLICT), False),
        ([ok(5), ok(8), CONFLICT, CONFLICT], ChainProgress(14, 4, 1.0, CONFLICT), True),
        ([ok(5), ok(8), TOO_LARGE, CONFLICT], ChainProgress(14, 4, 1.0, TOO_LARGE), True),
        ([ok(5), CONFLICT, None], ChainProgress(11, 1, 0.0), True),
        ([ok(5), SEEN], ChainProgress(11, 1, 0.0, KNOWN_ROW), True),
        ([ok(5), CONFLICT, ok(12)], ChainProgress(11, 1, 0.0, CONFLICT), True),
    ],
)
def test_a_chain_counts_stored_rows_and_ends_when_all_replies_are_in(
    answers: list[Receipt | ErrorReply | None], expected: ChainProgress | None, begun: bool
) -> None:
    given = chain(*answers)
    assert given.advance() == expected
    assert given.begun is begun
    if expected is not None and expected.cause is not None:
        assert not given.sent_rows


def test_a_chain_is_fruitless_if_it_lost_more_rows_than_it_stored() -> None:
    for between, fruitless in ((), 1), ((ok(8),), 0):
        given = chain(ok(5), *between, CONFLICT)
        assert given.advance() is not None
        assert given.fruitless == fruitless

"""Rows in a chain: what breaks it leaves no gap, and where a chain does not suit, rows go in batches."""

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
from purveyor.jetstream.bulk import (
    AppendOptions,
    Outcome,
    RefusalKind,
    Target,
    append_once,
    outgoing,
    publish_many,
)
from purveyor.jetstream.bulk.append.chain import Advance, Chain, Flight
from purveyor.jetstream.bulk.append.replies import KNOWN
from purveyor.jetstream.bulk.append.write_speed import PROBE_ROWS, Pace, Paces
from purveyor.jetstream.bulk.net.connection import ServerInfo
from purveyor.jetstream.bulk.net.pool import close_idle
from purveyor.jetstream.bulk.publish.acks import Ack, Refusal
from tests.jetstream.bulk.servers import Server, api, forget_ids, make_stream, serving, state
from tests.jetstream.bulk.test_append import (
    BATCHED,
    CHAINED,
    make,
    one,
    portion_by_portion,
    stored,
    table,
    write_in,
)
from tests.jetstream.bulk.test_publish import rows

CONFLICT = Refusal(400, 10070, "wrong last msg ID: 7")
TOO_LARGE = Refusal(400, 10054, "message size exceeds maximum allowed")


@pytest.fixture(autouse=True)
def _chained(monkeypatch: pytest.MonkeyPatch) -> None:
    write_in(CHAINED, monkeypatch)


def ways(address: Address, stream: str) -> Counter[str]:
    """In which way the messages of a stream were written: what is expected of them is still in their headers."""
    names = [{name for name, _ in row["headers"]} for row in rows(address, stream)]
    return Counter(
        CHAINED if "Nats-Expected-Last-Msg-Id" in each else BATCHED if "Nats-Batch-Id" in each else "alone"
        for each in names
    )


def once(action: Callable[[], object]) -> Callable[[int], None]:
    """For `on_progress`: act when some hundred rows are stored, and never again."""
    acted: list[int] = []

    def act(done: int) -> None:
        if done >= 300 and not acted:
            acted.append(done)
            action()

    return act


# What breaks a chain


@pytest.mark.parametrize("subject", ["main", "prefill"])
@pytest.mark.parametrize("messages", [1, 2, 7])
def test_messages_of_somebody_else_in_the_middle_leave_no_gap(
    address: Address, name: str, subject: str, messages: int
) -> None:
    """While thousands of rows are under way: none behind the first refused one may find what it expects."""
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


def test_a_chain_that_is_broken_between_two_portions_is_taken_up_again(
    address: Address, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    portion_by_portion(monkeypatch, 100)
    target = make(address, name)
    foreign = once(lambda: publish_many(address, outgoing([(f"{name}.prefill", b"0", None, None)])))
    append_once(address, [(target, table(range(1, 1001)))], AppendOptions(on_progress=foreign))
    assert [int(row["data"]) for row in rows(address, name)] == [*range(1, 302), 0, *range(302, 1001)]
    assert ways(address, name) == {CHAINED: 998, "alone": 3}


def test_rows_known_by_their_ids_are_passed(address: Address, name: str) -> None:
    target = make(address, name)
    append_once(address, [(target, table([300, 301, 302, 1700]))])
    api(address, f"STREAM.PURGE.{name}", {})
    assert one(append_once(address, [(target, table(range(1, 3001)))])) == Outcome(target, 2996, 4, 3000)
    assert stored(address, name) == [n for n in range(1, 3001) if n not in (300, 301, 302, 1700)]


def test_a_full_stream_ends_at_the_first_row_it_did_not_take(address: Address, name: str) -> None:
    """Even if room is made again while the rows behind it are on their way."""
    target = make(address, name, max_msgs=2500, discard="new")
    over = threading.Event()

    def make_room() -> None:
        while not over.is_set():
            seen = state(address, name)
            if seen["messages"] == 2500:
                api(address, f"STREAM.MSG.DELETE.{name}", {"seq": seen["first_seq"], "no_erase": True})

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


def test_a_row_too_large_in_one_target_is_no_matter_of_the_others(address: Address, name: str) -> None:
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
    """Whether the stream remembers their ids or not."""
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


def test_a_stream_that_is_not_meant_takes_nothing_even_if_it_knows_the_ids(address: Address, name: str) -> None:
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
    """Somebody who writes to a subject all the time."""
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


def test_a_prefill_at_the_same_time_makes_the_writer_turn_to_batches(address: Address, name: str) -> None:
    target = make(address, name)
    with writing(address, f"{name}.prefill"):
        assert one(append_once(address, [(target, table(range(1, 8001)))])).stored == 8000
    found = [int(row["data"]) for row in rows(address, name) if row["subject"] == target.subject]
    assert found == list(range(1, 8001))


def test_a_writer_held_up_in_the_middle_of_a_chain_does_no_harm(
    address: Address, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others wrote the rows meanwhile, readers removed them, and their ids are forgotten."""
    portion_by_portion(monkeypatch, 100)
    make_stream(address, f"KV_{name}", [f"$KV.{name}.>"])
    make(address, name, duplicate_window=100_000_000)
    target = Target(subject=f"{name}.main", stream=name, floor_subject=f"$KV.{name}.ox", floor_stream=f"KV_{name}")

    def hold_up() -> None:
        append_once(address, [(target, table(range(1, 701)))])
        publish_many(address, outgoing([(f"$KV.{name}.ox", b'{"position": 700}', None, None)]))
        api(address, f"STREAM.PURGE.{name}", {})
        forget_ids(address, name, f"{name}.probe")

    outcome = one(append_once(address, [(target, table(range(1, 1001)))], AppendOptions(on_progress=once(hold_up))))
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


def use(paces: Paces, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("purveyor.jetstream.bulk.append.chains.PACES", paces)


def test_where_singles_are_slow_batches_are_used_and_at_once_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a server that syncs each write; nothing is slow enough for sure but what the test says is."""
    monkeypatch.setattr("purveyor.jetstream.bulk.append.write_speed._FAST_ROWS_PER_SECOND", 1e9)
    use(Paces(), monkeypatch)
    with serving(tmp_path) as server:
        for number, expected in enumerate(({"alone": 1, CHAINED: 2 * PROBE_ROWS}, {})):
            targets = [make(server.address, f"S{number}-{each}") for each in range(2)]
            assert all(
                outcome.stored == 3000
                for outcome in append_once(server.address, [(target, table(range(1, 3001))) for target in targets])
            )
            found = sum((ways(server.address, target.stream) for target in targets), Counter[str]())
            assert found[CHAINED] == expected.get(CHAINED, 0)


def test_the_pace_is_measured_once_and_remembered(server: Server, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("purveyor.jetstream.bulk.append.write_speed._FAST_ROWS_PER_SECOND", 0.001)
    paces = Paces()
    use(paces, monkeypatch)
    target = make(server.address, name)
    assert one(append_once(server.address, [(target, table(range(1, 3001)))])).stored == 3000
    assert paces.of(server.address.urls) is Pace.FAST
    assert ways(server.address, name) == {"alone": 1, CHAINED: 2999}


def test_a_pace_is_slow_after_two_slow_probes_and_forgotten_after_ten_minutes() -> None:
    now = [0.0]
    paces = Paces(lambda: now[0])
    one, other = ("nats://one",), ("nats://other",)
    paces.note(one, 200, 0.2)
    assert paces.of(one) is Pace.UNKNOWN, "it may have been a busy moment"
    paces.note(one, 10, 9.0)
    assert paces.of(one) is Pace.UNKNOWN, "a few rows tell nothing"
    paces.note(one, 200, 0.2)
    paces.note(other, 200, 0.01)
    assert (paces.of(one), paces.of(other)) == (Pace.SLOW, Pace.FAST)
    now[0] = 599.0
    assert (paces.of(one), paces.of(other)) == (Pace.SLOW, Pace.FAST)
    now[0] = 601.0
    assert (paces.of(one), paces.of(other)) == (Pace.UNKNOWN, Pace.UNKNOWN)
    paces.note(one, 200, 0.2)
    assert paces.of(one) is Pace.UNKNOWN, "what was slow long ago does not count"
    paces.note(one, 200, 0.01)
    paces.note(one, 200, 0.2)
    assert paces.of(one) is Pace.UNKNOWN, "neither does what was slow before it was fast"


# What answers mean


def chain(*answers: Ack | Refusal | None) -> Chain:
    """A chain whose flights, of three rows each, are answered so, or not yet; the first row is one by itself."""
    result = Chain()
    result.begin(10)
    for number, answer in enumerate(answers):
        first, rows = (10, 1) if not number else (8 + number * 3, 3)
        flight = Flight(number, first, rows, 100, float(number))
        if answer is not None:
            flight.hear(answer)
        result.flights.append(flight)
    return result


def ok(sequence: int) -> Ack:
    return Ack("S", sequence, duplicate=False)


SEEN = Ack("S", 3, duplicate=True)


@pytest.mark.parametrize(
    ("answers", "expected", "begun"),
    [
        ([None], None, False),
        ([ok(5)], Advance(11, 1, 0.0), True),
        ([SEEN], Advance(11, 0, 0.0), True),
        ([ok(5), ok(8), None], Advance(14, 4, 1.0), True),
        ([ok(5), None, ok(11)], Advance(11, 1, 0.0), True),
        ([CONFLICT], Advance(10, 0, 0.0, CONFLICT), False),
        ([ok(5), ok(8), CONFLICT, CONFLICT], Advance(14, 4, 1.0, CONFLICT), True),
        ([ok(5), ok(8), TOO_LARGE, CONFLICT], Advance(14, 4, 1.0, TOO_LARGE), True),
        ([ok(5), CONFLICT, None], Advance(11, 1, 0.0), True),
        ([ok(5), SEEN], Advance(11, 1, 0.0, KNOWN), True),
        ([ok(5), CONFLICT, ok(12)], Advance(11, 1, 0.0, CONFLICT), True),
    ],
)
def test_a_chain_counts_what_is_stored_and_ends_when_all_is_answered(
    answers: list[Ack | Refusal | None], expected: Advance | None, begun: bool
) -> None:
    given = chain(*answers)
    assert given.advance() == expected
    assert given.begun is begun
    if expected is not None and expected.cause is not None:
        assert not given.flights


def test_a_chain_is_fruitless_if_more_was_sent_in_vain_than_stored() -> None:
    for between, fruitless in ((), 1), ((ok(8),), 0):
        given = chain(ok(5), *between, CONFLICT)
        assert given.advance() is not None
        assert given.fruitless == fruitless

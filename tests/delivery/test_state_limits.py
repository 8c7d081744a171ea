"""The delivery state fits into a value of the server, whatever keys, instances and retries it has to hold."""

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from purveyor.delivery import lease_rules
from purveyor.delivery.done import Done
from purveyor.delivery.lease_rules import (
    MOST_IN_FLIGHT,
    Acked,
    Ask,
    Book,
    Full,
    Kind,
    Lease,
    Pending,
    Rules,
    Wait,
)
from purveyor.delivery.message_keys import LONGEST_MARK, mark
from purveyor.delivery.pull import Pull
from purveyor.delivery.push.settlement import Answers, settle
from purveyor.delivery.state_codec import decode, encode
from purveyor.delivery.state_size import state_bytes
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream import bulk
from purveyor.jetstream.server import ServerOptions
from purveyor.model.delivery_policy import OrderBy
from purveyor.model.errors import WindowFull
from purveyor.queues.client import Queues, connect
from purveyor.queues.registry import ACKNOWLEDGED
from tests.conftest import OwnServer
from tests.delivery.conftest import empty, parallel
from tests.waiting import until

NEW = Book(incarnation="i" * 36)
KEYED, ANY = Rules(order_by=OrderBy.KEY), Rules(order_by=None)


def put(queues: Queues, keys: list[str]) -> None:
    messages: list[bulk.Outgoing] = [
        ("ox.main", json.dumps({"key": key, "body": {"new": {"n": number}}}).encode(), {}, f"m-{number}")
        for number, key in enumerate(keys)
    ]
    bulk.publish_many(queues.address, bulk.outgoing(messages))


async def stored_bytes(queues: Queues) -> int:
    return len((await (await queues.bucket(ACKNOWLEDGED)).get("ox")).value)


async def test_the_largest_window_of_long_keys_fits_and_more_is_refused_with_the_reason(
    own_server: OwnServer, caplog: pytest.LogCaptureFixture
) -> None:
    """5,000 leases by key, with keys of 1.5 KB, on a server that takes 1 MB, as every NATS server does by default."""
    server = own_server(ServerOptions(max_payload=1 << 20, sync="2m"))
    async with connect(server.address, patience_seconds=20) as queues, Pull(queues) as pull:
        await Subscriptions(queues).add(parallel(OrderBy.KEY))
        keys = [f"{number}-" + "k" * 1500 for number in range(MOST_IN_FLIGHT + 20)]
        put(queues, [*keys, *keys[:50]])
        out = [await pull.lease("ox", f"instance-{number}", max=1000) for number in range(5)]
        assert sum(map(len, out)) == MOST_IN_FLIGHT
        assert await stored_bytes(queues) < 1 << 20
        with pytest.raises(WindowFull, match="5,000 messages are leased or wait for a retry"):
            await pull.lease("ox", "one more")
        with pytest.raises(WindowFull):
            await pull.next("ox", "one more")
        assert await stored_bytes(queues) < 1 << 20
        assert ["hands out nothing more" in each.getMessage() for each in caplog.records] == [True]  # told once
        await pull.retry("ox", out[0][0].sequence, delay=0, instance="instance-0")
        (again,) = await pull.lease("ox", "one more")
        assert again.sequence == out[0][0].sequence
        for number, messages in enumerate(out):
            await pull.acknowledge_up_to("ox", messages[-1].sequence, instance=f"instance-{number}")
        rest = await pull.lease("ox", "last", max=1000)
        assert len(rest) == 20 + 49  # of the one key that is out, none
        await pull.acknowledge_up_to("ox", rest[-1].sequence, instance="last")
        await pull.acknowledge("ox", again.sequence)
        (last,) = await pull.lease("ox", "last")
        await pull.acknowledge("ox", last.sequence)
        await until(lambda: empty(queues))


@pytest.mark.parametrize("order_by", [None, OrderBy.KEY])
async def test_a_state_near_the_limit_of_the_server_refuses_leases_and_takes_answers(
    own_server: OwnServer, order_by: OrderBy | None
) -> None:
    """Instances with long names, each with one message: the state is full long before the window."""
    server = own_server(ServerOptions(max_payload=16 << 10, sync="2m"))
    async with connect(server.address, patience_seconds=20) as queues, Pull(queues) as pull:
        await Subscriptions(queues).add(parallel(order_by))
        put(queues, [f"k{number}" for number in range(200)])
        out: list[tuple[int, str]] = []
        refusal = ""
        while not refusal:
            instance = f"{len(out)}-" + "ö" * 150
            try:
                (message,) = await pull.lease("ox", instance, max=1)
                out.append((message.sequence, instance))
            except WindowFull as error:
                refusal = error.message
        assert "delivery state" in refusal
        assert 10 < len(out) < 60
        for sequence, instance in out[::2]:
            await pull.retry("ox", sequence, delay=600, instance=instance)
        assert await stored_bytes(queues) < 16 << 10
        left = 200 - len(out[::2])
        for sequence, _ in out[1::2]:
            await pull.acknowledge("ox", sequence)
            left -= 1
        while left:
            found = await pull.lease("ox", "short", max=1000)
            assert found
            await pull.acknowledge_up_to("ox", found[-1].sequence, instance="short")
            left -= len(found)
        for sequence, _ in out[::2]:
            await pull.acknowledge("ox", sequence)
        await until(lambda: empty(queues))


async def test_many_gaps_between_what_is_acknowledged_never_stop_the_delivery(own_server: OwnServer) -> None:
    """By key, every second message is about an object that is busy: each leaves a gap, until the state is full."""
    server = own_server(ServerOptions(max_payload=4 << 10, sync="2m"))
    async with connect(server.address, patience_seconds=20) as queues, Pull(queues) as pull:
        await Subscriptions(queues).add(parallel(OrderBy.KEY))
        put(queues, ["busy", *(key for number in range(400) for key in (f"k{number}", "busy"))])
        (busy,) = await pull.lease("ox", "a", max=1)
        done = 0
        with contextlib.suppress(WindowFull):
            while True:
                (message,) = await pull.lease("ox", "b", max=1)
                await pull.acknowledge("ox", message.sequence)
                done += 1
        assert 50 < done < 400
        await pull.acknowledge("ox", busy.sequence)
        while found := await pull.lease("ox", "b", max=100):
            await pull.acknowledge_up_to("ox", found[-1].sequence, instance="b")
            done += len(found)
        assert done == 800
        await until(lambda: empty(queues))


def test_a_state_with_whole_keys_of_an_older_version_holds_the_same_keys_back() -> None:
    long = "k" * 3000
    old = {
        "incarnation": "i",
        "position": 7,
        "leases": [
            {
                "id": "1",
                "instance": "old",
                "until": 1000,
                "length": 1000,
                "main": [[1, 2]],
                "keys": {"1": long, "2": "short"},
            }
        ],
    }
    book = decode(json.dumps(old).encode())
    assert decode(encode(book)) == book
    assert len(encode(book)) < 300
    queue = [Pending(3, Kind.MAIN, mark(long)), Pending(4, Kind.MAIN, mark("short")), Pending(5, Kind.MAIN, mark("x"))]
    taken = lease_rules.take(book, queue, Ask(instance="new", now=1, length=1000, most=9), KEYED)
    assert taken.lease is not None
    assert taken.lease.main == (5,)


def test_an_older_version_finds_short_keys_as_it_wrote_them() -> None:
    """Beside a newer one during an upgrade, it holds the same messages back."""
    for key in ("u-1", "7", "uid=anna,cn=users,dc=example,dc=org", "Köln", "x" * 64):
        assert mark(key) == key


@given(st.one_of(st.text(max_size=200), st.text(st.characters(categories=["Cs", "Cc", "L"]), max_size=200)))
def test_a_mark_is_short_tells_keys_apart_and_is_the_mark_of_itself(key: str) -> None:
    found = mark(key)
    assert len(json.dumps(found, ensure_ascii=False).encode()) <= LONGEST_MARK
    assert mark(found) == found
    assert mark(key + "x") != found


_SEQUENCES = st.integers(1, 10**7)
_LEASES = st.builds(
    lambda id_, instance, main, retry, key, long: Lease(
        id=str(id_),
        instance=instance,
        until=1_900_000_000_000,
        length=43_200_000,
        retry=tuple(retry),
        main=tuple(main),
        keys={sequence: mark(f"{key}{sequence}" * (9 if long else 1)) for sequence in (*main, *retry)},
        ahead=long,
    ),
    st.integers(1, 10**9),
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=200),
    st.lists(_SEQUENCES, unique=True, max_size=30),
    st.lists(_SEQUENCES, unique=True, max_size=10),
    st.text(max_size=10),
    st.booleans(),
)
_WAITS = st.builds(lambda length: Wait(1_900_000_000_000, length), st.integers(1, 7 * 24 * 3600 * 1000))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(_LEASES, max_size=8),
    st.dictionaries(_SEQUENCES, st.integers(1, 10**5), max_size=40),
    st.dictionaries(_SEQUENCES, _WAITS, max_size=40),
    st.lists(_SEQUENCES, unique=True, max_size=40),
    st.dictionaries(_SEQUENCES, st.booleans(), max_size=10),
)
def test_what_a_state_takes_is_never_more_than_was_counted(
    found: list[Lease], tries: dict[int, int], waits: dict[int, Wait], acked: list[int], putting: dict[int, bool]
) -> None:
    done = Done(0, tuple((sequence, sequence) for sequence in sorted(acked)))
    book = NEW._replace(leases=tuple(found), tries=tries, waits=waits, main=done, retry=done, putting=putting)
    assert len(encode(book)) <= state_bytes(book)


def test_thousands_of_retries_of_what_was_leased_fit_into_what_was_counted() -> None:
    """What is leased may be put off, all of it: that takes more than the lease did."""
    limit = 300_000
    rules = KEYED._replace(state_bytes=limit)
    queue = [Pending(10**6 + 2 * number, Kind.MAIN, mark(f"{number}" * 400)) for number in range(6000)]
    book, count = NEW, 0
    while True:
        taken = lease_rules.take(book, queue[count:], Ask(instance="a", now=0, length=30_000, most=1000), rules)
        if taken.lease is None:
            break
        book, count = taken.book, count + len(taken.lease.sequences)
    assert taken.full is Full.BYTES
    assert 1000 < count < 5000
    again = {sequence: 7 * 24 * 3600 * 1000 for lease in book.leases for sequence in lease.sequences}
    after = settle(book, Answers(instance="a", again=again), 10**12, rules).book
    assert len(after.waits) == count
    assert len(encode(after)) <= limit
    acked = [Acked(sequence, Kind.MAIN) for sequence in list(again)[::2]]
    assert len(encode(lease_rules.acknowledge(after, acked))) <= limit

"""The delivery state fits into a value of the server, with any keys, instances and retries."""

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from purveyor.delivery import lease_rules
from purveyor.delivery.lease_rules import MAX_IN_FLIGHT_MESSAGES
from purveyor.delivery.lease_types import AckTarget, LeaseLimit, LeasePolicy, LeaseRequest, Pending
from purveyor.delivery.pull import open_pull
from purveyor.delivery.push.push_leases import Settlement, settle
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream import bulk
from purveyor.jetstream.server import ServerOptions
from purveyor.model.ack_ranges import AckRanges
from purveyor.model.delivery_policy import OrderBy
from purveyor.model.delivery_state import (
    MAX_COMPACT_KEY_BYTES,
    Delay,
    DeliveryState,
    Lease,
    SubjectKind,
    compact_key,
    decode,
    encode,
    max_encoded_bytes,
)
from purveyor.model.errors import WindowFull
from purveyor.queues.client import Queues, connect
from purveyor.queues.registry import ACKNOWLEDGED
from tests.support.delivery import is_empty, parallel
from tests.support.nats_servers import OwnServer
from tests.support.waiting import until

NEW = DeliveryState(incarnation="i" * 36)
KEYED, ANY = LeasePolicy(order_by=OrderBy.KEY), LeasePolicy(order_by=None)


def put(queues: Queues, keys: list[str]) -> None:
    messages: list[bulk.Outgoing] = [
        ("ox.main", json.dumps({"key": key, "body": {"new": {"n": number}}}).encode(), {}, f"m-{number}")
        for number, key in enumerate(keys)
    ]
    bulk.publish_many(queues.address, bulk.outgoing(messages))


async def stored_bytes(queues: Queues) -> int:
    return len((await (await queues.bucket(ACKNOWLEDGED)).get("ox")).value)


async def test_the_maximum_of_leases_with_long_keys_fits_and_more_is_refused_with_the_reason(
    own_server: OwnServer, caplog: pytest.LogCaptureFixture
) -> None:
    """5,000 leases by key, with keys of 1.5 KB, on a server with the default limit of 1 MB."""
    server = own_server(ServerOptions(max_payload=1 << 20, sync="2m"))
    async with connect(server.address, patience_seconds=20) as queues, open_pull(queues) as pull:
        await Subscriptions(queues).add(parallel(OrderBy.KEY))
        keys = [f"{number}-" + "k" * 1500 for number in range(MAX_IN_FLIGHT_MESSAGES + 20)]
        put(queues, [*keys, *keys[:50]])
        out = [await pull.lease("ox", f"instance-{number}", max=1000) for number in range(5)]
        assert sum(map(len, out)) == MAX_IN_FLIGHT_MESSAGES
        assert await stored_bytes(queues) < 1 << 20
        with pytest.raises(WindowFull, match="5,000 messages are leased or delayed"):
            await pull.lease("ox", "one more")
        with pytest.raises(WindowFull):
            await pull.next("ox", "one more")
        assert await stored_bytes(queues) < 1 << 20
        assert ["delivers no more messages" in each.getMessage() for each in caplog.records] == [True]  # logged once
        await pull.retry("ox", out[0][0].sequence, delay=0, instance="instance-0")
        (again,) = await pull.lease("ox", "one more")
        assert again.sequence == out[0][0].sequence
        for number, messages in enumerate(out):
            await pull.acknowledge_up_to("ox", messages[-1].sequence, instance=f"instance-{number}")
        rest = await pull.lease("ox", "last", max=1000)
        assert len(rest) == 20 + 49  # none of the leased key
        await pull.acknowledge_up_to("ox", rest[-1].sequence, instance="last")
        await pull.acknowledge("ox", again.sequence)
        (last,) = await pull.lease("ox", "last")
        await pull.acknowledge("ox", last.sequence)
        await until(lambda: is_empty(queues))


@pytest.mark.parametrize("order_by", [None, OrderBy.KEY])
async def test_a_state_near_the_limit_of_the_server_refuses_leases_and_accepts_answers(
    own_server: OwnServer, order_by: OrderBy | None
) -> None:
    """Instances with long names, each with one message: the state is full long before the maximum of messages."""
    server = own_server(ServerOptions(max_payload=16 << 10, sync="2m"))
    async with connect(server.address, patience_seconds=20) as queues, open_pull(queues) as pull:
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
        await until(lambda: is_empty(queues))


async def test_many_gaps_between_acknowledged_ranges_never_stop_the_delivery(own_server: OwnServer) -> None:
    """By key, every second message has a busy key: each leaves a gap, until the state is full."""
    server = own_server(ServerOptions(max_payload=4 << 10, sync="2m"))
    async with connect(server.address, patience_seconds=20) as queues, open_pull(queues) as pull:
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
        await until(lambda: is_empty(queues))


def test_a_state_with_whole_keys_of_an_older_version_blocks_the_same_keys() -> None:
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
    state = decode(json.dumps(old).encode())
    assert decode(encode(state)) == state
    assert len(encode(state)) < 300
    queue = [
        Pending(3, SubjectKind.MAIN, compact_key(long)),
        Pending(4, SubjectKind.MAIN, compact_key("short")),
        Pending(5, SubjectKind.MAIN, compact_key("x")),
    ]
    decision = lease_rules.lease_pending(
        state, queue, LeaseRequest(instance="new", now=1, duration=1000, max_messages=9), KEYED
    )
    assert decision.lease is not None
    assert decision.lease.main == (5,)


def test_an_older_version_finds_short_keys_as_it_wrote_them() -> None:
    """During an upgrade an older process blocks the same keys as a newer one."""
    for key in ("u-1", "7", "uid=anna,cn=users,dc=example,dc=org", "Köln", "x" * 64):
        assert compact_key(key) == key


@given(st.one_of(st.text(max_size=200), st.text(st.characters(categories=["Cs", "Cc", "L"]), max_size=200)))
def test_a_compact_key_is_short_distinct_and_its_own_compact_key(key: str) -> None:
    found = compact_key(key)
    assert len(json.dumps(found, ensure_ascii=False).encode()) <= MAX_COMPACT_KEY_BYTES
    assert compact_key(found) == found
    assert compact_key(key + "x") != found


_SEQUENCES = st.integers(1, 10**7)
_LEASES = st.builds(
    lambda id_, instance, main, retry, key, long: Lease(
        id=str(id_),
        instance=instance,
        until=1_900_000_000_000,
        duration=43_200_000,
        retry=tuple(retry),
        main=tuple(main),
        keys={sequence: compact_key(f"{key}{sequence}" * (9 if long else 1)) for sequence in (*main, *retry)},
        prefetched=long,
    ),
    st.integers(1, 10**9),
    st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=200),
    st.lists(_SEQUENCES, unique=True, max_size=30),
    st.lists(_SEQUENCES, unique=True, max_size=10),
    st.text(max_size=10),
    st.booleans(),
)
_WAITS = st.builds(lambda length: Delay(1_900_000_000_000, length), st.integers(1, 7 * 24 * 3600 * 1000))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(_LEASES, max_size=8),
    st.dictionaries(_SEQUENCES, st.integers(1, 10**5), max_size=40),
    st.dictionaries(_SEQUENCES, _WAITS, max_size=40),
    st.lists(_SEQUENCES, unique=True, max_size=40),
    st.dictionaries(_SEQUENCES, st.booleans(), max_size=10),
)
def test_an_encoded_state_is_never_larger_than_its_upper_bound(
    found: list[Lease], tries: dict[int, int], waits: dict[int, Delay], acked: list[int], putting: dict[int, bool]
) -> None:
    done = AckRanges(0, tuple((sequence, sequence) for sequence in sorted(acked)))
    state = NEW._replace(
        leases=tuple(found), delivery_counts=tries, delayed=waits, main=done, retry=done, redriving=putting
    )
    assert len(encode(state)) <= max_encoded_bytes(state)


def test_thousands_of_retries_of_leased_messages_fit_into_the_upper_bound() -> None:
    """All leased messages may be delayed, which takes more space than the leases."""
    limit = 300_000
    policy = KEYED._replace(max_state_bytes=limit)
    queue = [Pending(10**6 + 2 * number, SubjectKind.MAIN, compact_key(f"{number}" * 400)) for number in range(6000)]
    state, count = NEW, 0
    while True:
        decision = lease_rules.lease_pending(
            state, queue[count:], LeaseRequest(instance="a", now=0, duration=30_000, max_messages=1000), policy
        )
        if decision.lease is None:
            break
        state, count = decision.state, count + len(decision.lease.sequences)
    assert decision.limit is LeaseLimit.BYTES
    assert 1000 < count < 5000
    again = {sequence: 7 * 24 * 3600 * 1000 for lease in state.leases for sequence in lease.sequences}
    after = settle(state, Settlement(instance="a", retry_delays=again), 10**12, policy).state
    assert len(after.delayed) == count
    assert len(encode(after)) <= limit
    acked = [AckTarget(sequence, SubjectKind.MAIN) for sequence in list(again)[::2]]
    assert len(encode(lease_rules.ack(after, acked))) <= limit

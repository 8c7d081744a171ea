"""read_range: each message of the range once, in order; the end is found at once despite missing messages."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import (
    SCHEMA,
    Outgoing,
    ReadOptions,
    Route,
    outgoing,
    publish_many,
    read_range,
)
from purveyor.jetstream.bulk.arrow_columns import read_blocks
from purveyor.jetstream.bulk.read.read_range import choose_route
from purveyor.model.errors import InvalidConfig, InvalidInput, InvalidName, InvalidSubject, PurveyorError, UnknownStream
from tests.support.bulk_messages import numbered
from tests.support.bulk_servers import connected, make_stream, request_api, serving
from tests.support.waiting import wait_until

ROUTES = pytest.mark.parametrize("route", [Route.DIRECT, Route.CONSUMER])


def sequences(address: Address, stream: str, first: int, last: int, **options: Any) -> list[int]:
    batches = list(read_range(address, stream, first, last, ReadOptions(**options)))
    assert all(batch.num_rows for batch in batches)
    return [number for batch in batches for number in batch.column("sequence").to_pylist()]


def consumers(address: Address, stream: str) -> int:
    return int(request_api(address, f"STREAM.INFO.{stream}")["state"]["consumer_count"])


@ROUTES
def test_rows_have_all_columns(address: Address, name: str, route: Route) -> None:
    make_stream(address, name)
    before = datetime.now(UTC) - timedelta(seconds=1)
    given: list[Outgoing] = [
        (f"{name}.ünï", b"\r\nMSG a 1 2\r\nhi\r\nHMSG", {"A": ["1", "2"], "B": "grüße"}, "one"),
        (f"{name}.x", b"", None, "two"),
    ]
    publish_many(address, outgoing(given))
    with connected(address) as connection:
        connection.publish(f"{name}.bare", b"no headers at all")
        connection.flush()
    wait_until(lambda: request_api(address, f"STREAM.INFO.{name}")["state"]["messages"] == 3)
    rows = []
    for batch in read_range(address, name, 1, 3, ReadOptions(route=route)):  # in one piece, as a rule
        assert batch.schema == SCHEMA
        batch.validate(full=True)
        rows += batch.to_pylist()
    assert [row["sequence"] for row in rows] == [1, 2, 3]
    assert [row["subject"] for row in rows] == [f"{name}.ünï", f"{name}.x", f"{name}.bare"]
    assert [row["headers"] for row in rows] == [
        [("Nats-Msg-Id", ["one"]), ("A", ["1", "2"]), ("B", ["grüße"])],
        [("Nats-Msg-Id", ["two"])],
        [],
    ]
    assert [row["data"] for row in rows] == [given[0][1], b"", b"no headers at all"]
    raw = list(read_range(address, name, 1, 3, ReadOptions(route=route, raw_headers=True)))
    assert all(pa.types.is_binary(batch.schema.field("headers").type) for batch in raw)
    blocks = pa.concat_arrays([batch.column("headers") for batch in raw])
    assert read_blocks(blocks).to_pylist() == [row["headers"] for row in rows]
    assert blocks[2].as_py() == b""
    times = [row["timestamp"] for row in rows]
    assert times == sorted(times)
    assert before < times[0] <= times[-1] < datetime.now(UTC) + timedelta(seconds=1)


def test_both_routes_read_the_same(address: Address, name: str) -> None:
    make_stream(address, name)
    publish_many(
        address, outgoing([(f"{name}.{n % 7}", b"\r\n" * n, {"N": [str(n)] * (n % 4)}, None) for n in range(3000)])
    )
    tables = [
        pa.Table.from_batches(list(read_range(address, name, 1, 3000, ReadOptions(route=route)))).combine_chunks()
        for route in (Route.DIRECT, Route.CONSUMER)
    ]
    assert tables[0].num_rows == 3000
    assert tables[0].equals(tables[1])


@ROUTES
@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (1, 10, range(1, 11)),
        (0, 3, range(1, 4)),
        (4, 6, range(4, 7)),
        (10, 10, range(10, 11)),
        (8, 10**12, range(8, 11)),
        (11, 20, ()),
        (6, 5, ()),
        (0, 0, ()),
    ],
)
def test_both_ends_of_a_range_are_included(
    address: Address, route: Route, first: int, last: int, expected: Any
) -> None:
    name = "ends"
    if name not in (request_api(address, "STREAM.NAMES").get("streams") or []):
        make_stream(address, name)
        publish_many(address, outgoing(numbered(f"{name}.a", 10)))
    assert sequences(address, name, first, last, route=route) == list(expected)


@ROUTES
def test_gaps_and_a_deleted_end_are_not_waited_for(address: Address, name: str, route: Route) -> None:
    make_stream(address, name)
    publish_many(address, outgoing(numbered(f"{name}.a", 20)))
    for deleted in (1, 2, 5, 6, 7, 12, 15, 19, 20):
        request_api(address, f"STREAM.MSG.DELETE.{name}", {"seq": deleted})
    left = [n for n in range(1, 21) if n not in (1, 2, 5, 6, 7, 12, 15, 19, 20)]
    assert sequences(address, name, 1, 20, route=route) == left
    assert sequences(address, name, 1, 12, route=route) == [n for n in left if n <= 12]
    assert sequences(address, name, 5, 7, route=route) == []
    assert sequences(address, name, 19, 30, route=route) == []


@ROUTES
def test_an_empty_stream_and_a_purged_one(address: Address, name: str, route: Route) -> None:
    make_stream(address, name)
    assert sequences(address, name, 1, 100, route=route) == []
    publish_many(address, outgoing(numbered(f"{name}.a", 20)))
    request_api(address, f"STREAM.PURGE.{name}")
    assert sequences(address, name, 1, 100, route=route) == []


@ROUTES
def test_subjects_are_filtered(address: Address, name: str, route: Route) -> None:
    make_stream(address, name)
    publish_many(address, outgoing([(f"{name}.{n % 5}.{n % 2}", b"", None, None) for n in range(1000)]))
    expected = [n + 1 for n in range(1000) if n % 5 == 3]
    assert sequences(address, name, 1, 1000, route=route, subjects=(f"{name}.3.*",)) == expected
    several = (f"{name}.3.>", f"{name}.4.1", f"{name}.3.0")
    expected = [n + 1 for n in range(1000) if n % 5 == 3 or (n % 5 == 4 and n % 2 == 1)]
    assert sequences(address, name, 1, 1000, route=route, subjects=several) == expected
    crossing = (f"{name}.3.*", f"{name}.*.1")
    expected = [n + 1 for n in range(1000) if n % 5 == 3 or n % 2 == 1]
    assert sequences(address, name, 1, 1000, route=route, subjects=crossing) == expected
    assert sequences(address, name, 200, 300, route=route, subjects=(f"{name}.3.*",)) == [
        n + 1 for n in range(199, 300) if n % 5 == 3
    ]
    assert sequences(address, name, 1, 1000, route=route, subjects=("other.>", f"{name}.9")) == []
    assert sequences(address, name, 1, 1000, route=route, subjects=(">",)) == list(range(1, 1001))


@ROUTES
def test_only_the_columns_asked_for(address: Address, name: str, route: Route) -> None:
    make_stream(address, name)
    publish_many(address, outgoing([(f"{name}.{n}", b"%d" % n, None, None) for n in range(10)]))
    options = ReadOptions(route=route, columns=("data", "sequence"), subjects=(f"{name}.3", f"{name}.4"))
    batches = list(read_range(address, name, 1, 10, options))
    assert all(batch.schema.names == ["sequence", "data"] for batch in batches)
    found = [row for batch in batches for row in batch.to_pylist()]
    assert found == [{"sequence": 4, "data": b"3"}, {"sequence": 5, "data": b"4"}]
    with pytest.raises(InvalidConfig, match="payload"):
        ReadOptions(columns=("payload",))


@ROUTES
def test_batches_are_bounded(address: Address, name: str, route: Route) -> None:
    make_stream(address, name)
    publish_many(address, outgoing(numbered(f"{name}.a", 30_000)))
    batches = list(read_range(address, name, 1, 30_000, ReadOptions(route=route, batch_rows=1000)))
    assert max(batch.num_rows for batch in batches) <= 1000
    small = list(read_range(address, name, 1, 30_000, ReadOptions(route=route, batch_bytes=50_000)))
    numbers = [number for batch in small for number in batch.column("sequence").to_pylist()]
    assert numbers == list(range(1, 30_001))


@ROUTES
def test_messages_of_8_megabytes_among_small_ones(address: Address, name: str, route: Route) -> None:
    make_stream(address, name)
    bodies = [bytes([n]) * (8 << 20 if n % 4 == 0 else n) for n in range(12)]
    publish_many(address, outgoing((f"{name}.a", body, None, None) for body in bodies))
    found = [row for batch in read_range(address, name, 1, 12, ReadOptions(route=route)) for row in batch.to_pylist()]
    assert [row["data"] for row in found] == bodies


@ROUTES
def test_closing_early_leaves_nothing_behind(address: Address, name: str, route: Route) -> None:
    make_stream(address, name)
    publish_many(address, outgoing(numbered(f"{name}.a", 30_000)))
    reading = read_range(address, name, 1, 30_000, ReadOptions(route=route, batch_rows=100))
    assert 0 < next(reading).num_rows <= 100  # as many as have come
    assert isinstance(reading, Iterator)
    reading.close()
    assert consumers(address, name) == 0
    assert sequences(address, name, 29_990, 30_000, route=route) == list(range(29_990, 30_001))
    assert consumers(address, name) == 0


@ROUTES
def test_a_purge_while_reading_ends_it(address: Address, name: str, route: Route) -> None:
    make_stream(address, name)
    body = bytes(1000)
    publish_many(address, outgoing((f"{name}.a", body, None, None) for _ in range(60_000)))
    reading = read_range(address, name, 1, 60_000, ReadOptions(route=route, batch_rows=100))
    seen = next(reading).column("sequence").to_pylist()
    request_api(address, f"STREAM.PURGE.{name}")
    for batch in reading:
        seen += batch.column("sequence").to_pylist()
    assert seen == list(range(1, len(seen) + 1))
    assert consumers(address, name) == 0


@ROUTES
def test_a_stream_deleted_while_reading_is_unknown(address: Address, name: str, route: Route) -> None:
    make_stream(address, name)
    publish_many(address, outgoing((f"{name}.a", bytes(1000), None, None) for _ in range(60_000)))
    reading = read_range(address, name, 1, 60_000, ReadOptions(route=route, batch_rows=100))
    next(reading)
    request_api(address, f"STREAM.DELETE.{name}")
    with pytest.raises(UnknownStream, match=name):
        for _ in reading:
            pass


@ROUTES
def test_an_unknown_stream_is_reported(address: Address, route: Route) -> None:
    with pytest.raises(UnknownStream, match="nothing-here"):
        list(read_range(address, "nothing-here", 1, 10, ReadOptions(route=route)))


@pytest.mark.parametrize("retention", ["interest", "workqueue"])
def test_queues_are_read_without_a_consumer(address: Address, name: str, retention: str) -> None:
    make_stream(address, name, retention=retention)
    config = {"durable_name": "d", "ack_policy": "explicit", "max_ack_pending": 1}
    request_api(address, f"CONSUMER.DURABLE.CREATE.{name}.d", {"stream_name": name, "config": config})
    publish_many(address, outgoing(numbered(f"{name}.a", 5000)))
    assert sequences(address, name, 1, 5000) == list(range(1, 5001))
    assert request_api(address, f"STREAM.INFO.{name}")["state"]["messages"] == 5000
    assert consumers(address, name) == 1
    with pytest.raises(InvalidConfig, match=retention):
        list(read_range(address, name, 1, 10, ReadOptions(route=Route.CONSUMER)))


def test_a_stream_without_direct_gets(address: Address, name: str) -> None:
    make_stream(address, name, allow_direct=False)
    publish_many(address, outgoing(numbered(f"{name}.a", 10)))
    assert sequences(address, name, 1, 10) == list(range(1, 11))
    with pytest.raises(InvalidConfig, match="allow_direct"):
        list(read_range(address, name, 1, 10, ReadOptions(route=Route.DIRECT)))
    make_stream(address, f"{name}-q", allow_direct=False, retention="workqueue")
    with pytest.raises(InvalidConfig, match="allow_direct"):
        list(read_range(address, f"{name}-q", 1, 10))


def test_the_route_is_chosen_by_stream_and_length() -> None:
    limits = {"name": "S", "retention": "limits", "allow_direct": True, "num_replicas": 1}
    interest, any_, kept = {**limits, "retention": "interest"}, ReadOptions(), ReadOptions(retained_by_durable=True)
    assert choose_route(limits, any_, 10) is Route.DIRECT
    assert choose_route(limits, any_, 10**6) is Route.CONSUMER
    assert choose_route({**limits, "allow_direct": False}, any_, 10) is Route.CONSUMER
    assert choose_route(interest, any_, 10**6) is Route.DIRECT
    assert choose_route(interest, kept, 10) is Route.DIRECT
    assert choose_route(interest, kept, 10**6) is Route.CONSUMER
    assert choose_route({**interest, "num_replicas": 3}, kept, 10**6) is Route.DIRECT
    assert choose_route({**limits, "retention": "workqueue"}, kept, 10**6) is Route.DIRECT


def keeping(address: Address, name: str, messages: int, **config: Any) -> None:
    """Create an interest stream with messages that its durable `d` keeps."""
    make_stream(address, name, retention="interest", **config)
    durable = {"durable_name": "d", "ack_policy": "explicit"}
    request_api(address, f"CONSUMER.DURABLE.CREATE.{name}.d", {"stream_name": name, "config": durable})
    publish_many(address, outgoing(numbered(f"{name}.a", messages)))


def test_a_range_kept_by_a_durable_is_read_by_a_temporary_consumer(address: Address, name: str) -> None:
    keeping(address, name, 5000)
    reading = read_range(address, name, 1, 5000, ReadOptions(retained_by_durable=True, batch_rows=1000))
    seen = next(reading).column("sequence").to_pylist()
    assert consumers(address, name) == 2
    for batch in reading:
        seen += batch.column("sequence").to_pylist()
    assert seen == list(range(1, 5001))
    assert consumers(address, name) == 1
    assert request_api(address, f"STREAM.INFO.{name}")["state"]["messages"] == 5000


def test_messages_that_the_durable_passes_during_a_read_are_deleted_when_it_ends(address: Address, name: str) -> None:
    keeping(address, name, 5000)
    reading = read_range(
        address, name, 1, 5000, ReadOptions(retained_by_durable=True, batch_rows=1000, batch_bytes=20_000)
    )
    next(reading)
    request_api(address, f"CONSUMER.RESET.{name}.d", {"seq": 5001})
    reading.close()
    wait_until(lambda: request_api(address, f"STREAM.INFO.{name}")["state"]["messages"] == 0)
    assert consumers(address, name) == 1


def test_direct_gets_are_used_if_no_consumer_can_be_created(address: Address, name: str) -> None:
    keeping(address, name, 5000, max_consumers=1)
    assert sequences(address, name, 1, 5000, retained_by_durable=True) == list(range(1, 5001))
    with pytest.raises(PurveyorError, match="consumer"):
        sequences(address, name, 1, 5000, retained_by_durable=True, route=Route.CONSUMER)


def test_bad_input_is_refused_at_once(address: Address) -> None:
    with pytest.raises(InvalidName):
        read_range(address, "a.b", 1, 2)
    with pytest.raises(InvalidInput):
        read_range(address, "a", -1, 2)
    with pytest.raises(InvalidSubject):
        ReadOptions(subjects=("a..b",))
    with pytest.raises(InvalidConfig):
        ReadOptions(batch_rows=0)


@ROUTES
def test_messages_with_a_status_of_their_own_are_messages(address: Address, name: str, route: Route) -> None:
    """A stream over inboxes may hold replies such as 'no responders'."""
    make_stream(address, name)
    with connected(address) as connection:
        for block in (b"NATS/1.0 404 Nope\r\n\r\n", b"NATS/1.0 204 EOB\r\nA: b\r\n\r\n", b"NATS/1.0 503\r\n\r\n"):
            connection.queue(b"HPUB %s.a %d %d\r\n%s\r\n" % (name.encode(), len(block), len(block), block))
        connection.flush()
    wait_until(lambda: request_api(address, f"STREAM.INFO.{name}")["state"]["messages"] == 3)
    rows = [row for batch in read_range(address, name, 1, 3, ReadOptions(route=route)) for row in batch.to_pylist()]
    assert [(row["sequence"], row["headers"]) for row in rows] == [(1, []), (2, [("A", ["b"])]), (3, [])]


def test_whole_seconds_and_short_fractions_are_times(address: Address, name: str) -> None:
    """The server drops trailing zeros of a time; both routes must return the same."""
    make_stream(address, name)
    publish_many(address, outgoing(numbered(f"{name}.a", 2000)))
    by_route = [
        [
            t
            for b in read_range(address, name, 1, 2000, ReadOptions(route=r, columns=("timestamp",)))
            for t in b.column(0).to_pylist()
        ]
        for r in (Route.DIRECT, Route.CONSUMER)
    ]
    assert by_route[0] == by_route[1]


def test_a_server_restart_while_reading(tmp_path: Path) -> None:
    """The consumer is in memory and lost: another one continues after the last row."""
    with serving(tmp_path) as server:
        make_stream(server.address, "S")
        publish_many(server.address, outgoing(("S.a", bytes(500), None, None) for _ in range(40_000)))
        reading = read_range(server.address, "S", 1, 40_000, ReadOptions(route=Route.CONSUMER, batch_rows=500))
        seen = next(reading).column("sequence").to_pylist()
        server.stop(kill=True)
        server.start()
        for batch in reading:
            seen += batch.column("sequence").to_pylist()
        assert seen == list(range(1, 40_001))

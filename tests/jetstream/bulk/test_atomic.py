"""Atomic publishing: a batch is stored as a whole or not at all, and never before the batch before it."""

import pytest

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import (
    PublishMode,
    PublishOptions,
    PublishReport,
    outgoing,
    publish_many,
)
from purveyor.model.errors import PublishRefused
from tests.support.bulk_messages import numbered, rows
from tests.support.bulk_servers import make_stream, state

ATOMIC = PublishOptions(mode=PublishMode.ATOMIC)


@pytest.mark.parametrize("count", [1, 2, 1000, 1001, 4500])
def test_batches_are_stored_in_order(address: Address, name: str, count: int) -> None:
    make_stream(address, name, allow_atomic=True)
    report = publish_many(address, outgoing(numbered(f"{name}.a", count, "i")), ATOMIC)
    assert report == PublishReport(count, 0, {name: count})
    assert [row["data"] for row in rows(address, name)] == [b"%d" % n for n in range(count)]


def test_a_batch_with_known_ids_goes_one_by_one_and_the_next_follow(address: Address, name: str) -> None:
    make_stream(address, name, allow_atomic=True)
    publish_many(address, outgoing([(f"{name}.a", b"known", None, f"i-{n}") for n in (1500, 2700)]))
    report = publish_many(address, outgoing(numbered(f"{name}.a", 5000, "i")), ATOMIC)
    assert report == PublishReport(4998, 2, {name: 5000})
    expected = [b"known"] * 2 + [b"%d" % n for n in range(5000) if n not in (1500, 2700)]
    assert [row["data"] for row in rows(address, name)] == expected


def test_an_id_twice_in_a_batch_is_stored_once(address: Address, name: str) -> None:
    make_stream(address, name, allow_atomic=True)
    given = [*numbered(f"{name}.a", 10, "i"), *numbered(f"{name}.a", 10, "i")]
    assert publish_many(address, outgoing(given), ATOMIC) == PublishReport(10, 10, {name: 10})


def test_a_repeated_publish_is_all_duplicates(address: Address, name: str) -> None:
    make_stream(address, name, allow_atomic=True)
    for expected in (PublishReport(2500, 0, {name: 2500}), PublishReport(0, 2500, {name: 2500})):
        assert publish_many(address, outgoing(numbered(f"{name}.a", 2500, "i")), ATOMIC) == expected


def test_a_stream_that_does_not_allow_it_refuses_with_the_fix(address: Address, name: str) -> None:
    make_stream(address, name)
    with pytest.raises(PublishRefused, match="allow_atomic") as refused:
        publish_many(address, outgoing(numbered(f"{name}.a", 3000)), ATOMIC)
    assert (refused.value.index, refused.value.err_code, refused.value.stored) == (0, 10174, 0)
    assert state(address, name)["messages"] == 0


def test_a_failed_publish_stores_a_prefix_of_whole_batches(address: Address, name: str) -> None:
    make_stream(address, name, allow_atomic=True, max_msg_size=400)
    given = numbered(f"{name}.a", 5000, "i")
    given[2500] = (f"{name}.a", bytes(500), None, "large")
    with pytest.raises(PublishRefused, match="messages 2000 to 2999") as refused:
        publish_many(address, outgoing(given), ATOMIC)
    assert (refused.value.index, refused.value.stored) == (2000, 2000)
    assert [row["data"] for row in rows(address, name)] == [b"%d" % n for n in range(2000)]


def test_a_batch_for_two_streams_is_refused_whole(address: Address, name: str) -> None:
    for stream in (f"{name}-a", f"{name}-b"):
        make_stream(address, stream, allow_atomic=True)
    given = [*numbered(f"{name}-a.x", 3), *numbered(f"{name}-b.x", 3), *numbered(f"{name}-a.x", 3)]
    with pytest.raises(PublishRefused, match="one stream"):
        publish_many(address, outgoing(given), ATOMIC)
    assert state(address, f"{name}-a")["messages"] == state(address, f"{name}-b")["messages"] == 0


def test_rows_read_from_one_stream_can_be_published_to_another(address: Address, name: str) -> None:
    """They carry the headers of their first batch, which must not count for the new one."""
    make_stream(address, name, [f"{name}.>"], allow_atomic=True)
    publish_many(address, outgoing([(f"{name}.a", b"%d" % n, {"K": "v"}, f"i{n}") for n in range(10)]), ATOMIC)
    make_stream(address, f"{name}-copy", [f"copy.{name}"], allow_atomic=True)
    found = rows(address, name)
    copies = [(f"copy.{name}", row["data"], dict(row["headers"]), None) for row in found]
    for mode in PublishMode:
        report = publish_many(address, outgoing(copies), PublishOptions(mode=mode))
        assert report.stored + report.duplicates == 10
    again = rows(address, f"{name}-copy")
    assert [(row["data"], dict(row["headers"])["Nats-Msg-Id"]) for row in again] == [
        (b"%d" % n, [f"i{n}"]) for n in range(10)
    ]

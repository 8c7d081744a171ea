"""The stored delivery state is read and written by one codec, and its summary agrees with the whole state."""

import json

import pytest

from purveyor.model.ack_ranges import AckRanges, Expired
from purveyor.model.delivery_state import (
    AckSummary,
    Delay,
    DeliveryState,
    FailedDelivery,
    FailureCause,
    Lease,
    acked_position,
    decode,
    decode_summary,
    encode,
    incarnation_of,
)
from purveyor.model.errors import UnreadableRecord

STATE = DeliveryState(
    incarnation="i",
    position=40,
    retry=AckRanges(70),
    prefill=AckRanges(3),
    main=AckRanges(10, ((12, 13),)),
    leases=(
        Lease("5", "a", 1_000, 500, main=(14, 15, 17), keys={14: "x"}),
        Lease("6", "b", 2_000, 500, retry=(71,), prefetched=True),
    ),
    delivery_counts={14: 2},
    delayed={90: Delay(3_000, 100)},
    lease_counter=6,
    redriven_up_to=71,
    redriving={8: True, 9: False},
    expired=Expired(3, 20, 900),
    failures={14: (FailedDelivery(1, FailureCause.NACKED, "a"), FailedDelivery(2, FailureCause.LEASE_EXPIRED, "a"))},
)


def test_a_state_is_read_as_it_was_written() -> None:
    assert decode(encode(STATE)) == STATE


def test_the_stored_field_names_stay_readable_by_older_versions() -> None:
    stored = json.loads(encode(STATE))
    assert {name: stored[name] for name in ("granted", "retry_to", "putting", "tries", "waits")} == {
        "granted": 6,
        "retry_to": 71,
        "putting": {"8": True, "9": False},
        "tries": {"14": 2},
        "waits": {"90": [3_000, 100]},
    }
    assert stored["ends"] == [[1, "retry", "a", [[14, 14]]], [2, "ran out", "a", [[14, 14]]]]
    assert stored["leases"][0]["main"] == [[14, 15], [17, 17]]
    assert stored["leases"][1]["ahead"] is True


def test_the_summary_agrees_with_the_state_and_names_the_highest_sequence() -> None:
    expected = AckSummary("i", 40, STATE.main, STATE.retry, redriven_up_to=71, expired=STATE.expired, last_sequence=90)
    assert decode_summary(encode(STATE)) == expected
    assert decode_summary(b'{"incarnation": "i", "position": 7}') == AckSummary("i", 7)


def test_readers_of_some_fields_accept_new_fields_and_refuse_new_versions() -> None:
    newer_field = b'{"version": 1, "incarnation": "i", "position": 7, "later": 1}'
    assert decode_summary(newer_field).position == 7
    assert acked_position(json.loads(newer_field), "i") == 7
    assert acked_position(json.loads(newer_field), "another") == 0
    with pytest.raises(UnreadableRecord, match="later"):
        decode(newer_field)
    newer_version = b'{"version": 2, "incarnation": "i", "position": 7}'
    assert incarnation_of(newer_version) == "i"
    assert incarnation_of(b"damaged") is None
    with pytest.raises(UnreadableRecord):
        decode_summary(newer_version)
    with pytest.raises(UnreadableRecord):
        acked_position(json.loads(newer_version), "i")

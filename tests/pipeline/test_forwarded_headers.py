"""A copy of an event carries the id that its publisher gave it."""

import pyarrow as pa

from purveyor.jetstream.bulk.header_columns import TYPE
from purveyor.pipeline.forwarded_headers import carried

ROWS = [
    [("Nats-Msg-Id", ["event:1a"]), ("Purveyor-Id", ["mine"]), ("Purveyor-Login", ["hr"]), ("Trace", ["a", "b"])],
    [("Nats-Msg-Id", ["ldif.x:7:0"])],
    [],
    [("Purveyor-Id", ["late"]), ("Tenant", ["n"]), ("Nats-Msg-Id", ["event:2b"])],
    [("Purveyor-Position", ["7"]), ("Nats-Expected-Stream", ["s"])],
]
COPIES = [
    [("Purveyor-Id", ["mine"]), ("Trace", ["a", "b"])],
    [("Purveyor-Id", ["ldif.x:7:0"])],
    [],
    [("Purveyor-Id", ["late"]), ("Tenant", ["n"])],
    [],
]


def test_the_id_of_the_event_goes_along_and_a_message_id_stands_in_for_it() -> None:
    assert carried(pa.array(ROWS, TYPE)).to_pylist() == COPIES
    for begin in range(len(ROWS)):
        assert carried(pa.array(ROWS, TYPE).slice(begin)).to_pylist() == COPIES[begin:]

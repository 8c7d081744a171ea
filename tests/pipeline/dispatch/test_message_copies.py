"""A copy of an event carries the id that its publisher gave it."""

import pyarrow as pa

from purveyor.jetstream.bulk.arrow_columns import HEADERS_TYPE
from purveyor.pipeline.dispatch.subscriber_messages import copy_headers

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


def test_a_copy_carries_the_id_of_the_event_or_else_its_message_id() -> None:
    assert copy_headers(pa.array(ROWS, HEADERS_TYPE)).to_pylist() == COPIES
    for begin in range(len(ROWS)):
        assert copy_headers(pa.array(ROWS, HEADERS_TYPE).slice(begin)).to_pylist() == COPIES[begin:]

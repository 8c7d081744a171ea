"""kill -9 of a process that reads a range kept by a durable: the server deletes its temporary consumer."""

import multiprocessing
import time
from multiprocessing.connection import Connection

import pytest

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import ReadOptions, outgoing, publish_many, read_range
from tests.support.bulk_messages import numbered
from tests.support.bulk_servers import make_stream, request_api, state
from tests.support.waiting import wait_until

COUNT = 80_000
OURS = ReadOptions(retained_by_durable=True, batch_rows=500, batch_bytes=20_000)


def begin_to_read(address: Address, stream: str, began: Connection) -> None:
    reading = read_range(address, stream, 1, COUNT, OURS)
    began.send(next(reading).num_rows)
    time.sleep(600)


def killed_while_reading(address: Address, stream: str) -> None:
    """Create an interest stream whose reader was killed and whose durable is at the end."""
    make_stream(address, stream, retention="interest")
    durable = {"durable_name": "d", "ack_policy": "explicit"}
    request_api(address, f"CONSUMER.DURABLE.CREATE.{stream}.d", {"stream_name": stream, "config": durable})
    publish_many(address, outgoing(numbered(f"{stream}.a", COUNT)))
    process = multiprocessing.get_context("spawn")
    ours, theirs = process.Pipe()
    reader = process.Process(target=begin_to_read, args=(address, stream, theirs), daemon=True)
    reader.start()
    assert ours.recv() > 0
    reader.kill()
    reader.join()
    request_api(address, f"CONSUMER.RESET.{stream}.d", {"seq": COUNT + 1})


def test_the_consumer_of_a_killed_reader_has_an_inactive_threshold(address: Address, name: str) -> None:
    killed_while_reading(address, name)
    left = [each for each in request_api(address, f"CONSUMER.LIST.{name}")["consumers"] if each["name"] != "d"]
    assert [each["config"]["inactive_threshold"] for each in left] == [30 * 10**9]
    assert request_api(address, f"STREAM.INFO.{name}")["state"]["messages"] > 0  # what the reader was not sent


@pytest.mark.long
@pytest.mark.chaos
def test_messages_kept_by_a_killed_reader_are_deleted_with_its_consumer(address: Address, name: str) -> None:
    """Its last requests expire after half a minute, and the consumer half a minute later."""
    killed_while_reading(address, name)
    wait_until(lambda: state(address, name)["messages"] == 0)
    left = state(address, name)
    assert (left["consumer_count"], left["last_seq"]) == (1, COUNT)

"""The peers that ours is measured against: nats-py as its users write it, and the bytes off the socket, unparsed."""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from uuid import uuid4

import nats
import numpy as np
import pyarrow as pa
from nats.js.api import AckPolicy, ConsumerConfig

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import publish_many
from purveyor.jetstream.bulk.net.pool import RetryDeadline, connect, request_api

SIZE = 200
_MARK = b"the-last-message-of-the-benchmark"
_ROWS = 10_000


def bodies(rows: int) -> pa.BinaryArray:
    """Noise, so that nothing can be compressed or compared away."""
    offsets = np.arange(0, (rows + 1) * SIZE, SIZE, dtype=np.int32)
    noise = np.frombuffer(os.urandom(rows * SIZE), np.uint8)
    return pa.BinaryArray.from_buffers(pa.binary(), rows, [None, pa.py_buffer(offsets), pa.py_buffer(noise)])


def batches(subject: str, messages: int) -> Iterator[pa.RecordBatch]:
    """Messages of SIZE bytes with ids."""
    data = bodies(min(_ROWS, messages))
    for start in range(0, messages, _ROWS):
        rows = min(_ROWS, messages - start)
        columns = {
            "subject": pa.array([subject] * rows, pa.string()),
            "data": data.slice(0, rows),
            "msg_id": pa.array([f"{subject}-{start + row}" for row in range(rows)], pa.string()),
        }
        yield pa.record_batch(columns)


def publish_plain(address: Address, stream: str, messages: int) -> None:
    """Messages of SIZE bytes without any header, as `nats pub` sends them: `publish_many` would give each an id."""
    connection = connect(address, RetryDeadline(10))
    for start in range(0, messages, _ROWS):
        rows = min(_ROWS, messages - start)
        noise = os.urandom(rows * SIZE)
        line = f"PUB {stream} {SIZE}\r\n".encode()
        connection.queue(b"".join(line + noise[at : at + SIZE] + b"\r\n" for at in range(0, rows * SIZE, SIZE)))
        connection.flush(60)
        while int(connection.request_api(f"STREAM.INFO.{stream}")["state"]["messages"]) < start + rows:
            time.sleep(0.01)
    connection.close()


def publish_mark(address: Address, subject: str) -> None:
    """The message by which `socket_unparsed` knows the end."""
    batch = pa.record_batch({"subject": pa.array([subject]), "data": pa.array([_MARK], pa.binary())})
    publish_many(address, [batch])


def nats_options(address: Address) -> dict[str, Any]:
    """For `nats.connect`."""
    options: dict[str, Any] = {"servers": list(address.urls)}
    if address.user is not None:
        options |= {"user": address.user, "password": address.password}
    if address.token is not None:
        options["token"] = address.token
    return options


async def nats_publish(address: Address, stream: str, count: int) -> float:
    """nats-py's `publish_async`, with ids; messages per second."""
    client = await nats.connect(**nats_options(address))
    jetstream = client.jetstream(publish_async_max_pending=4000)
    body = os.urandom(SIZE)
    began = time.perf_counter()
    for number in range(count):
        await jetstream.publish_async(stream, body, headers={"Nats-Msg-Id": f"{stream}-{number}"})
    await jetstream.publish_async_completed()
    seconds = time.perf_counter() - began
    await client.close()
    return count / seconds


async def nats_fetch(address: Address, stream: str, count: int) -> float:
    """nats-py's `fetch(500)` on a consumer without acknowledgements; messages per second."""
    client = await nats.connect(**nats_options(address))
    jetstream = client.jetstream()
    config = ConsumerConfig(ack_policy=AckPolicy.NONE, mem_storage=True, inactive_threshold=30)
    info = await jetstream.add_consumer(stream, config)
    subscription = await jetstream.pull_subscribe_bind(info.name, stream)
    rows = 0
    began = time.perf_counter()
    while rows < count:
        rows += len(await subscription.fetch(500, timeout=5))
    seconds = time.perf_counter() - began
    await jetstream.delete_consumer(stream, info.name)
    await client.close()
    return rows / seconds


def socket_unparsed(address: Address, stream: str, messages: int) -> float:
    """The same pulls, bytes counted, nothing parsed. All are asked for at once, which only helps this side."""
    reader = connect(address, RetryDeadline(10))
    consumer = f"bench-{uuid4().hex[:8]}"
    config = {
        "name": consumer,
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": 1,
        "ack_policy": "none",
        "mem_storage": True,
        "num_replicas": 1,
        "inactive_threshold": 30_000_000_000,
    }
    request_api(address, f"CONSUMER.CREATE.{stream}.{consumer}", {"stream_name": stream, "config": config})
    inbox = f"_INBOX.{uuid4().hex}"
    reader.subscribe(inbox)
    body = json.dumps({"batch": 10_000, "max_bytes": 8 << 20, "expires": 30_000_000_000}).encode()
    began = time.perf_counter()
    for _ in range(messages // 10_000 + 1):
        reader.publish(f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}", body, inbox)
    reader.flush()
    raw: socket.socket = reader._socket  # noqa: SLF001 - the bare socket is what is measured
    raw.setblocking(True)
    view = memoryview(bytearray(4 << 20))
    count = 0
    while True:
        got = raw.recv_into(view)
        count += got
        if not got or _MARK in bytes(view[max(0, got - 400) : got]):
            break
    seconds = time.perf_counter() - began
    assert count > messages * SIZE
    reader.close()
    with suppress(Exception):
        request_api(address, f"CONSUMER.DELETE.{stream}.{consumer}")
    return (messages + 1) / seconds

"""The way of the older system, to measure ours against: a small REST service, one message at a time.

Each request makes two connections to NATS and closes them: one looks the subscription up in a bucket, one does the
work. A GET pulls one message from a durable that gives one at a time; a PATCH deletes that message. What is left out
is left out in its favour: it hashes no password, and checks nothing else.

`python -m benchmarks.peer_api PORT` with the server's address in NATS_URL.
"""

import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import nats
import uvicorn
from fastapi import FastAPI, HTTPException
from nats.aio.client import Client
from nats.errors import TimeoutError as NothingThere
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.errors import KeyNotFoundError, NotFoundError
from pydantic import BaseModel

BUCKET = "peer-subscriptions"
DURABLE = "peer"
app = FastAPI()


class Body(BaseModel):
    """The object as it was and as it is."""

    old: dict[str, Any]
    new: dict[str, Any]


class Message(BaseModel):
    """A message as it goes out."""

    publisher_name: str
    ts: str
    realm: str
    topic: str
    body: Body
    sequence_number: int
    num_delivered: int


class Report(BaseModel):
    """What became of a message."""

    status: Literal["ok"]


def stream_of(name: str) -> str:
    return f"peer-{name}"


async def prepare(url: str, names: list[str]) -> None:
    """The subscriptions with their queues, empty; their subject is the name of the stream."""
    client = await nats.connect(url)
    jetstream = client.jetstream()
    bucket = await jetstream.create_key_value(bucket=BUCKET)
    for name in names:
        await bucket.put(name, b"{}")
        await jetstream.add_stream(name=stream_of(name), subjects=[stream_of(name)])
        config = ConsumerConfig(durable_name=DURABLE, ack_policy=AckPolicy.EXPLICIT, max_ack_pending=1)
        await jetstream.add_consumer(stream_of(name), config)
    await client.close()


@asynccontextmanager
async def connected() -> AsyncIterator[Client]:
    client = await nats.connect(os.environ["NATS_URL"])
    try:
        yield client
    finally:
        await client.close()


async def check(client: Client, name: str) -> None:
    try:
        await (await client.jetstream().key_value(BUCKET)).get(name)
    except KeyNotFoundError:
        raise HTTPException(404) from None


@app.get("/v1/subscriptions/{name}/messages/next")
async def next_message(name: str, timeout: float = 5.0) -> Message | None:  # noqa: ASYNC109 - the word of its API
    async with connected() as registry, connected() as queues:
        await check(registry, name)
        pulling = await queues.jetstream().pull_subscribe_bind(DURABLE, stream_of(name))
        try:
            (found,) = await pulling.fetch(1, timeout=timeout)
        except NothingThere:
            return None
        about = found.metadata
        reported = {"sequence_number": about.sequence.stream, "num_delivered": about.num_delivered}
        return Message.model_validate(json.loads(found.data) | reported)


@app.patch("/v1/subscriptions/{name}/messages/{sequence}/status")
async def tell_status(name: str, sequence: int, report: Report) -> None:
    async with connected() as registry, connected() as queues:
        await check(registry, name)
        try:
            await queues.jetstream().delete_msg(stream_of(name), sequence)
        except NotFoundError:
            raise HTTPException(404) from None


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning", access_log=False)

"""Measure bulk POSTs beside `publish_many`, and a pool of consumers beside one and two API processes.

All take turns on one server in one run. The client keeps its connections and encodes nothing while it is measured.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import uvloop

from benchmarks.api import (
    CONSUMER_COUNT,
    MESSAGE_BYTES,
    PASSWORD,
    POST_SIZE,
    ROUND_COUNT,
    ROUND_SECONDS,
    PullResult,
    fill,
    free_port,
    login,
    make_event,
    nats_url,
    open_session,
    pull_round,
    queue_subject,
    start_process,
    subscribe,
    wait_until_ready,
)
from benchmarks.http_client import HttpConnection
from benchmarks.report import Row, Section
from benchmarks.streams import Streams
from purveyor.jetstream import publish_many
from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import outgoing

_PUBLISHED: Final = 150_000
"""So many that a round takes about as long as a round of POSTs: a short burst gets more of a busy machine."""


def run(address: Address) -> list[Section]:
    """Measure one API process and two, and return the reports."""
    with (
        tempfile.TemporaryDirectory() as directory,
        _api(address, directory, 1) as one,
        _api(address, directory, 2) as two,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_measure(address, one, two))


@contextmanager
def _api(address: Address, directory: str, workers: int) -> Iterator[str]:
    """Run the API with a number of processes; the block gets its URL."""
    port = free_port()
    settings = {
        "PURVEYOR_NATS_URL": nats_url(address),
        "PURVEYOR_DATA_DIR": directory,
        **{f"PURVEYOR_{who}_PASSWORD": PASSWORD for who in ("ADMIN", "EVENTS", "PREFILL")},
    }
    more = ("--workers", str(workers)) if workers > 1 else ()
    program = ("-c", "from purveyor.app.cli import main; main()", "serve", "api", "--port", str(port), *more)
    with start_process(program, settings):
        yield f"http://127.0.0.1:{port}"


@dataclass(slots=True)
class _Best:
    """The best rounds so far."""

    published: float = 0.0
    posted: float = 0.0
    alone: PullResult | None = None
    beside: PullResult | None = None
    by_one: PullResult | None = None
    by_two: PullResult | None = None


async def _measure(address: Address, one: str, two: str) -> list[Section]:
    names = [f"bulk-{number}" for number in range(CONSUMER_COUNT)]
    async with open_session() as client:
        for url in (one, two):
            await wait_until_ready(client, f"{url}/readyz")
        for name in names:
            await subscribe(client, one, name)
    best = _Best()
    streams = Streams(address)
    try:
        for turn in range(ROUND_COUNT):
            best.published = max(best.published, await asyncio.to_thread(_publish, address, streams))
            best.posted = max(best.posted, await _post(one, ROUND_SECONDS))
            best.alone = _better(best.alone, await _pull(address, one, names[:1], 6000))
            best.beside = _quicker(best.beside, await _pull_beside_posts(address, one, names[:1]))
            best.by_one = _better(best.by_one, await _pull(address, one, names, 1000))
            best.by_two = _better(best.by_two, await _pull(address, two, names, 1000))
            print(
                f"api-bulk: round {turn + 1} of {ROUND_COUNT}: publish_many {best.published:,.0f}/s, "
                f"POST {best.posted:,.0f}/s, {CONSUMER_COUNT} consumers: one process {best.by_one.rate:,.0f}/s, "
                f"two {best.by_two.rate:,.0f}/s",
                flush=True,
            )
    finally:
        streams.clear()
    assert best.alone is not None
    assert best.beside is not None
    assert best.by_one is not None
    assert best.by_two is not None
    return [
        Section(
            "HTTP API: bulk POST",
            f"{POST_SIZE:,} events of {MESSAGE_BYTES} bytes in each request, one request after the other; publish_many "
            "writes the same bodies with ids. A request is a chain in which one part works at a time: the API reads "
            "and encodes, then the server stages and stores an atomic batch; publish_many keeps both busy. "
            f"Best of {ROUND_COUNT} rounds in which all take turns.",
            [
                Row(
                    f"POST of {POST_SIZE:,} at once / publish_many with ids",
                    best.posted,
                    best.published,
                    "events/s",
                    at_least=0.2,
                ),
                *(
                    Row(
                        f"next + ok, 1 consumer: p{round(100 * share)} of a request beside bulk POSTs / without",
                        best.beside.times.at(share),
                        best.alone.times.at(share),
                        "ms",
                        note=f"{best.beside.times.errors} errors",
                    )
                    for share in (0.5, 0.99)
                ),
            ],
        ),
        Section(
            "HTTP API: processes",
            f"next + ok is one GET and one PATCH; {CONSUMER_COUNT} consumers, each with its subscription. "
            f"Best of {ROUND_COUNT} rounds in which both take turns. The client, the NATS server and the API share the "
            "cores of the machine.",
            [
                Row(
                    f"next + ok, {CONSUMER_COUNT} consumers: two API processes / one",
                    best.by_two.rate,
                    best.by_one.rate,
                ),
                Row(
                    f"{CONSUMER_COUNT} consumers: p99 of a request, two API processes / one",
                    best.by_two.times.at(0.99),
                    best.by_one.times.at(0.99),
                    "ms",
                    note=f"{best.by_two.times.errors} errors",
                ),
            ],
        ),
    ]


def _better(best: PullResult | None, found: PullResult) -> PullResult:
    return found if best is None or found.rate > best.rate else best


def _quicker(best: PullResult | None, found: PullResult) -> PullResult:
    return found if best is None or found.times.at(0.99) < best.times.at(0.99) else best


def _publish(address: Address, streams: Streams) -> float:
    name = streams.fresh()
    bodies = [json.dumps(make_event(number), separators=(",", ":")).encode() for number in range(POST_SIZE)]
    numbered = ((name, bodies[number % POST_SIZE], None, f"{name}-{number}") for number in range(_PUBLISHED))
    batches = [*outgoing(numbered)]
    began = time.perf_counter()
    assert publish_many(address, batches).stored == _PUBLISHED
    rate = _PUBLISHED / (time.perf_counter() - began)
    streams.remove(name)
    return rate


async def _post(base: str, seconds: float) -> float:
    """Post arrays of events on one connection, and return the rate."""
    body = json.dumps([make_event(number) for number in range(POST_SIZE)]).encode()
    connection = await HttpConnection.open(base)
    try:
        done, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            status, answer = await connection.request("POST", "/v1/messages", login("events"), body)
            assert status == 202, answer
            done += POST_SIZE
        return done / (time.perf_counter() - began)
    finally:
        connection.close()


async def _pull(address: Address, base: str, names: Sequence[str], count: int) -> PullResult:
    await asyncio.to_thread(fill, address, names, count, queue_subject)
    return await pull_round(base, names)


async def _pull_beside_posts(address: Address, base: str, names: Sequence[str]) -> PullResult:
    await asyncio.to_thread(fill, address, names, 6000, queue_subject)

    async def post_until_cancelled() -> None:
        while True:
            await _post(base, ROUND_SECONDS)

    posting = asyncio.create_task(post_until_cancelled())
    try:
        return await pull_round(base, names)
    finally:
        posting.cancel()
        await asyncio.gather(posting, return_exceptions=True)

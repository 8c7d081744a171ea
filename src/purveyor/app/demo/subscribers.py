"""Subscribers of the demo that are not in Purveyor's hands: consumers of the API, and an endpoint for pushes.

Each notes what it gets in its ledger, and works until it is cancelled.
"""

import contextlib
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Final

from aiohttp import web

from purveyor.app.demo.delivery_check import Ledger
from purveyor.client import Consumer, ConsumerOptions
from purveyor.client.consumer_messages import Message

_FAILS_EACH: Final = 10
"""The endpoint refuses every tenth request."""


async def consume(url: str, password: str, ledger: Ledger, *, instance: str = "one", handlers: int = 1) -> None:
    """Take what the API has for a subscription: one after the other, or several at once where order is by key."""
    options = ConsumerOptions(instance=instance, wait_seconds=5.0)
    async with Consumer(url, ledger.name, password=password, options=options) as consumer:
        if handlers == 1:
            async for batch in consumer.batches():
                for message in batch:
                    _note(ledger, message)
                await batch.ack()
            return

        async def handle(message: Message) -> None:
            _note(ledger, message)

        await consumer.run(handle, concurrency=handlers)


def _note(ledger: Ledger, message: Message) -> None:
    ledger.again += message.num_delivered > 1
    ledger.take(message.data, message.position or 0, datetime.now(UTC))


@contextlib.asynccontextmanager
async def endpoint(ledger: Ledger) -> AsyncIterator[str]:
    """Somebody's web server that takes pushes and fails now and then; yields its URL."""
    asked = 0

    async def post(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        event = json.loads(await request.read())
        if asked % _FAILS_EACH == 0:
            ledger.again += 1
            return web.Response(status=503, text="busy, come again")
        ledger.take(event, int(request.headers["x-purveyor-position"]), datetime.now(UTC))
        return web.Response(status=204)

    app = web.Application()
    app.router.add_post("/in", post)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        yield f"http://127.0.0.1:{port}/in"
    finally:
        await runner.cleanup()

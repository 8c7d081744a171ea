"""The route that Prometheus reads.

It needs no login, as the routes about health: no figure holds a secret, a key or a body. Names of subscriptions and
queues are in it; where those are nobody's business, keep the path at the proxy.
"""

import asyncio

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from purveyor.app.http import context
from purveyor.app.telemetry.prometheus import CONTENT_TYPE, render
from purveyor.app.telemetry.queue_metrics import server_up
from purveyor.model.errors import Unavailable

router = APIRouter(tags=["health"])


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Figures for Prometheus. It answers also while the NATS server is away, and tells that."""
    try:
        found = await context.services(request).figures.read()
    except Unavailable:  # it was not reached yet
        found = [server_up(there=False)]
    page = await asyncio.to_thread(render, found)  # thousands of lines, while others want to be served
    return Response(page, headers={"Content-Type": CONTENT_TYPE})

"""Routes that monitoring reads: liveness, readiness and Prometheus metrics.

They need no login. No metric holds a secret, a key or a body, but metrics name subscriptions and queues: block
`/metrics` at the proxy if those names are confidential.
"""

import asyncio

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel

from purveyor.app.http import context
from purveyor.app.http.problems import document_errors
from purveyor.app.telemetry.prometheus import CONTENT_TYPE, render
from purveyor.app.telemetry.queue_metrics import server_up
from purveyor.model.errors import Unavailable
from purveyor.model.event import SUBJECT

router = APIRouter(tags=["health"])


class Health(BaseModel):
    """The state of this process."""

    status: str = "ok"


@router.get("/healthz")
async def healthz() -> Health:
    """The process is alive. Restarting it would not solve any other problem."""
    return Health()


@router.get("/readyz", responses=document_errors())
async def readyz(request: Request) -> Health:
    """The NATS server answers, so the API can serve requests. 503 otherwise."""
    services = context.services(request)
    await services.queues.connection.wait_until_connected(0.1)
    await services.queues.streams.names(subject=SUBJECT)
    return Health(status="ready")


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Metrics for Prometheus. While the NATS server does not answer, `purveyor_nats_up` is 0."""
    try:
        found = await context.services(request).queue_metrics.read()
    except Unavailable:  # the API has not reached the server yet
        found = [server_up(there=False)]
    page = await asyncio.to_thread(render, found)  # thousands of lines: keep the event loop free
    return Response(page, headers={"Content-Type": CONTENT_TYPE})

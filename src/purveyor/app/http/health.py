"""Routes for those who watch over the process: does it live, can it work. They need no login and tell no names."""

from fastapi import APIRouter, Request
from pydantic import BaseModel

from purveyor.app.http import context
from purveyor.app.http.problems import documented
from purveyor.model.event import SUBJECT

router = APIRouter(tags=["health"])


class Health(BaseModel):
    """All is well."""

    status: str = "ok"


@router.get("/healthz")
async def healthz() -> Health:
    """The process lives. Whatever else is wrong, starting it again would not help."""
    return Health()


@router.get("/readyz", responses=documented())
async def readyz(request: Request) -> Health:
    """The server is reached and answers: requests can be served. 503 otherwise."""
    services = context.services(request)
    await services.queues.connection.wait_connected(0.1)
    await services.queues.streams.names(subject=SUBJECT)
    return Health(status="ready")

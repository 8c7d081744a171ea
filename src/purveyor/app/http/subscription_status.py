"""The route of the status of a subscription: what waits, how far it is, its leases and its last error."""

from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from purveyor.app.http import context
from purveyor.app.http.models import (
    ExpiredBody,
    FilterBody,
    PushProblemBody,
    PushView,
    ReplayBody,
    RetryBody,
    TopicBody,
)
from purveyor.app.http.problems import document_errors
from purveyor.app.json_views import status_json
from purveyor.delivery.subscription_status import read_status

router = APIRouter(prefix="/v1/subscriptions", tags=["subscriptions"])


class BacklogBody(BaseModel):
    """The messages in its queue, by kind."""

    main: int = Field(description="live events")
    prefill: int = Field(description="the initial state")
    retry: int = Field(description="dead letters that were put back")


class LeaseHolderBody(BaseModel):
    """An instance that has leased messages."""

    instance: str
    messages: int
    until: datetime = Field(description="when the last of its leases ends")


class LastErrorBody(BaseModel):
    """The last thing that went wrong and still matters."""

    part: str = Field(description="dispatch, prefill, replay, push or delivery")
    reason: str
    at: datetime | None
    sequence: int | None = Field(description="delivery: the message that was not acknowledged")


class StatusBody(BaseModel):
    """The status of a subscription."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "name": "ox",
                    "state": "active",
                    "position": 1204,
                    "acknowledged": 1201,
                    "lag": 0,
                    "backlog": 3,
                    "oldest_age_seconds": 12.5,
                    "leased": 1,
                    "leases": [{"instance": "worker-1", "messages": 1, "until": "2026-01-01T12:00:30+00:00"}],
                    "last_error": None,
                }
            ]
        }
    )

    name: str
    state: str = Field(description="registering or active")
    paused: bool
    pause_reason: str | None
    begin: int | None = Field(description="events after this position are delivered")
    position: int | None = Field(description="the newest position that is in its queue or was acknowledged")
    acknowledged: int | None = Field(description="the newest position that was acknowledged")
    dispatched_up_to: int | None = Field(description="the dispatcher has done its work up to this position")
    lag: int | None = Field(description="how many positions the dispatcher is behind the newest event")
    backlog: int | None = Field(description="the number of messages in its queue; null: it has no queue")
    backlog_by_kind: BacklogBody | None
    oldest_stored: datetime | None = Field(description="when the oldest message of its queue was stored")
    oldest_age_seconds: float | None = Field(description="the age of the oldest message of its queue")
    leased: int = Field(description="the number of leased messages")
    leases: list[LeaseHolderBody] = Field(description="the instances with leases, at most 100")
    delayed: int = Field(description="how many messages wait for their next attempt")
    next_attempt: datetime | None = Field(description="when the first of them is delivered again")
    dead_letters: int
    last_error: LastErrorBody | None
    suspended: dict[str, Any] | None = Field(
        description="the dispatcher writes nothing to its queue: from which position on, and why"
    )
    prefill: dict[str, Any] | None = Field(description="how far its prefill is")
    replay: ReplayBody | None = Field(description="the replay that runs, or ran last")
    push_trouble: PushProblemBody | None = Field(description="why the push worker does not send")
    expired: ExpiredBody | None = Field(description="messages that expired")
    unreadable: str | None = Field(description="why this API cannot read its delivery state, and delivers nothing")


class SubscriptionDetails(BaseModel):
    """A subscription with its options and its status, in a list without the fields that need its queue.

    Options equal to their defaults are omitted. If this API cannot read its record, the state is `unreadable`.
    """

    name: str
    realms_topics: list[TopicBody] | None = None
    request_prefill: bool | None = None
    filter: FilterBody | None = None
    hidden_fields: list[str] | None = None
    delivery: Literal["ordered", "parallel", "push"] | None = None
    order_by: Literal["position", "key"] | None = None
    lease_seconds: float | None = None
    retry: RetryBody | None = None
    push: PushView | None = None
    retention_seconds: float | None = None
    incarnation: str | None
    created: datetime | None = None
    state: str = Field(description="registering, active, deleting or unreadable")
    paused: bool | None = None
    pause_reason: str | None = None
    begin: int | None = Field(description="events after this position are delivered")
    suspended: dict[str, Any] | None = None
    prefill: dict[str, Any] | None = Field(default=None, description="how far its prefill is")
    replay: ReplayBody | None = None
    push_trouble: PushProblemBody | None = None
    backlog: int | None = Field(default=None, description="the number of messages in its queue")
    backlog_by_kind: BacklogBody | None = None
    position: int | None = None
    acknowledged: int | None = None
    dispatched_up_to: int | None = None
    lag: int | None = None
    oldest_stored: datetime | None = None
    oldest_age_seconds: float | None = None
    leased: int | None = None
    leases: list[LeaseHolderBody] | None = None
    delayed: int | None = None
    next_attempt: datetime | None = None
    dead_letters: int | None = None
    last_error: LastErrorBody | None = None
    expired: ExpiredBody | None = None
    unreadable: str | None = None
    fix: str | None = Field(default=None, description="unreadable: what to do")


@router.get("/{name}/status", response_model=StatusBody, responses=document_errors(HTTPStatus.NOT_FOUND))
async def get_status(request: Request, name: str) -> Response:
    """Get the backlog, the age of the oldest message, the position, the lag, the leases and the last error.

    For: the subscription, admin. The API deletes an acknowledged message a moment later; until then it counts.
    """
    context.require_owner_or_admin(request, name)
    services = context.services(request)
    found = await services.subscriptions.get(name)
    status = await read_status(services.queues, await services.subscriptions.registry(), found)
    return context.json_response(status_json(status, datetime.now(UTC)))

"""Routes by which a consumer gets messages and acknowledges, retries or rejects them.

They are the busiest routes and avoid work: the API sends a message as the bytes stored in the queue, and only adds the
sequence and the number of deliveries.

`FastPath` serves the two requests of a consumer's loop, `next` and `ok`, without the framework, which would cost more
than the work. It calls the same handlers, and only for requests in their plain form. Every other form, and so every
invalid request, goes through FastAPI, which validates it.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable
from datetime import datetime
from http import HTTPStatus
from typing import Annotated, Any, Final, Literal, TypeVar, assert_never

from fastapi import APIRouter, FastAPI, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.types import Message, Receive, Scope, Send

from purveyor.app.http import context
from purveyor.app.http.context import count_response
from purveyor.app.http.events import EventBody
from purveyor.app.http.models import LeaseSeconds, RequestBody, Seconds, Sequence, Wait
from purveyor.app.http.problems import answer_to, document_errors
from purveyor.app.json_views import lease_fields, message_json
from purveyor.delivery.pull import DEFAULT_INSTANCE, MAX_LEASE_MESSAGES, DeliveredMessage, PullService
from purveyor.jetstream.headers import first
from purveyor.model import tracing
from purveyor.model.errors import WindowFull, describe
from purveyor.model.message_headers import EVENT_ID
from purveyor.model.metrics import HTTP_REQUESTS

router = APIRouter(prefix="/v1/subscriptions/{name}/messages", tags=["messages"])
INSTANCE: Final = "X-Consumer-Instance"
_INSTANCE: Final = INSTANCE.lower().encode()
_log = logging.getLogger(__name__)
_QUICK_ANSWER_SECONDS: Final = 0.05
_SEQUENCE: Final = Path(ge=0, lt=1 << 63)
_ERRORS: Final = (
    HTTPStatus.NOT_FOUND,
    HTTPStatus.CONFLICT,
    HTTPStatus.UNPROCESSABLE_ENTITY,
)
T = TypeVar("T")


class StatusReport(RequestBody):
    """The result of a message, or a request to extend its lease."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"status": "ok"},
                {"status": "retry", "delay": 30},
                {"status": "reject", "reason": "no such mailbox"},
                {"status": "extend", "lease_seconds": 60},
            ]
        }
    )

    status: Literal["ok", "retry", "reject", "extend"]
    delay: Seconds | None = Field(default=None, description="retry: wait these seconds; default: by the retry policy")
    reason: str | None = Field(default=None, max_length=2000, description="reject: stored with the dead letter")
    lease_seconds: LeaseSeconds | None = Field(default=None, description="extend: the lease ends after these seconds")


class BulkStatusReport(RequestBody):
    """All messages that an instance has leased, up to this one, are handled."""

    status: Literal["ok"]
    up_to: Sequence


class LeaseRequest(RequestBody):
    """A request to lease several messages."""

    max: Annotated[int, Field(ge=1, le=MAX_LEASE_MESSAGES)] = 100
    lease_seconds: LeaseSeconds | None = Field(default=None, description="default: the subscription's")
    instance: str | None = Field(default=None, min_length=1, max_length=200, description="or X-Consumer-Instance")
    timeout: Wait = Field(default=0, description="seconds to wait for the first message")


class MessageBody(EventBody):
    """A message for a consumer."""

    sequence_number: int
    num_delivered: int


class LeasedMessage(MessageBody):
    """A message with its lease."""

    position: int | None = Field(description="the position of its event in the queue `incoming`")
    event_id: str | None = Field(description="the id of its event, if it has one")
    lease_id: str
    lease_until: datetime
    traceparent: str | None = Field(default=None, description="the trace of its event, if it has one")
    tracestate: str | None = None


class LeasedMessages(BaseModel):
    """The messages of one lease, in order."""

    messages: list[LeasedMessage]


class LeaseExtension(BaseModel):
    """The new end of a lease."""

    lease_until: datetime


class Acknowledged(BaseModel):
    """The number of messages that this request acknowledged."""

    acknowledged: int


@router.get("/next", response_model=MessageBody | None, responses=document_errors(*_ERRORS))
async def next_message(
    request: Request,
    name: str,
    timeout: Annotated[Wait, Query()] = 5.0,  # noqa: ASYNC109 - how long to wait, not when to fail
    pop: bool = False,
) -> Response:
    """Get the next message; wait up to `timeout` seconds for it; null if there is none. For: the subscription.

    The answer is the oldest message that is not acknowledged: the same one again until it is. With `pop` the API
    acknowledges it when it sends it. 409: the prefill failed; the subscription gets no message until an administrator
    requests the prefill again. 429: the limit of messages that are leased or wait for a retry is reached.
    """
    context.require_owner(request, name, challenge=True)
    pull = context.services(request).pull
    instance = _instance(request)
    while True:
        try:  # most requests find a message: only those that wait pay for the set-up of waiting
            found = await pull.next(name, instance, pop=pop)
        except WindowFull:
            if timeout <= 0:
                raise
            found = None
        if found is None and timeout > 0:
            asking = pull.next(name, instance, timeout=timeout, pop=pop, checked=True)
            found = await _wait(request, asking, None, timeout)
        if found is None:
            return context.RawJson(b"null")
        try:
            return _message_response(name, found)
        except Exception as error:  # noqa: BLE001 - one broken message must not block those after it
            await _park(pull, name, found, error)


def _message_response(name: str, found: DeliveredMessage) -> Response:
    headers = [] if found.until is None else [(b"purveyor-lease-until", found.until.isoformat().encode())]
    if found.position is not None:
        headers.append((b"purveyor-position", b"%d" % found.position))
    identity = first(found.headers, EVENT_ID)
    if identity and identity.isascii() and identity.isprintable():
        headers.append((b"purveyor-id", identity.encode()))
    headers += [(key.encode(), value.encode("latin-1")) for key, value in _trace_headers(name, found).items()]
    return context.RawJson(message_json(found, {}), *headers)


@router.post("/lease", response_model=LeasedMessages, responses=document_errors(*_ERRORS))
async def lease(request: Request, name: str, given: LeaseRequest) -> Response:
    """Lease up to `max` messages. For: the subscription.

    No other instance gets a leased message until the consumer acknowledges or returns it, or its lease expires. With
    large messages the answer has fewer than `max`: at most 32 MB, or one message. 429: the limit of messages that are
    leased or wait for a retry is reached.
    """
    context.require_owner(request, name)
    pull, instance = context.services(request).pull, given.instance or _instance(request)
    parts: list[bytes] = []
    while not parts:
        asking = pull.lease(name, instance, given.max, given.lease_seconds, given.timeout)
        found = await _wait(request, asking, [], given.timeout)
        if not found:
            break
        if tracing.is_enabled():
            traces = [trace for each in found if (trace := tracing.carrier_from_headers(each.headers))]
            with tracing.span("deliver", links=traces[: tracing.MOST_LINKS], subscription=name):
                pass
        for each in found:
            try:
                parts.append(message_json(each, {**lease_fields(each), **tracing.carrier_from_headers(each.headers)}))
            except Exception as error:  # noqa: BLE001 - one broken message must not block the others
                await _park(pull, name, each, error)
    return Response(b'{"messages":[' + b",".join(parts) + b"]}", media_type="application/json")


async def _park(pull: PullService, name: str, message: DeliveredMessage, error: Exception) -> None:
    """Park a message that the API cannot encode."""
    _log.error("message %d of subscription %s becomes a dead letter", message.sequence, name, exc_info=error)
    await pull.park_delivered(name, message, f"the API cannot encode it: {describe(error)}")


@router.patch("/{sequence}/status", response_model=LeaseExtension | None, responses=document_errors(*_ERRORS))
async def settle_message(
    request: Request, name: str, sequence: Annotated[int, _SEQUENCE], given: StatusReport
) -> Response:
    """Acknowledge, retry or reject a message, or extend its lease. For: the subscription; `retry` also for admin.

    `ok`: the message is handled and never delivered again. `retry`: deliver it again after `delay` seconds, also if it
    waits for a longer delay now. `reject`: it becomes a dead letter. `extend`: keep it for another lease. 404: there is
    no such message, or it is already acknowledged. 409: another instance has leased it.
    """
    if given.status == "retry":
        context.require_owner_or_admin(request, name, challenge=True)
    else:
        context.require_owner(request, name, challenge=True)
    if not tracing.is_enabled():
        return await _settle(request, name, sequence, given)
    trace = tracing.read_carrier(request.headers.get)
    with tracing.span("acknowledge", trace, subscription=name, sequence=sequence, status=given.status):
        return await _settle(request, name, sequence, given)


async def _settle(request: Request, name: str, sequence: int, given: StatusReport) -> Response:
    pull = context.services(request).pull
    match given.status:
        case "ok":
            await pull.acknowledge(name, sequence, instance=_instance(request))
        case "retry":
            await pull.retry(name, sequence, delay=given.delay, instance=_instance(request))
        case "reject":
            await pull.reject(name, sequence, given.reason or "", instance=_instance(request))
        case "extend":
            until = await pull.extend(name, sequence, lease_seconds=given.lease_seconds, instance=_instance(request))
            return context.json_response({"lease_until": until.isoformat()})
        case _:
            assert_never(given.status)
    return context.RawJson(b"null")


@router.patch("/status", response_model=Acknowledged, responses=document_errors(*_ERRORS))
async def settle_many(request: Request, name: str, given: BulkStatusReport) -> Response:
    """Acknowledge all messages that this instance has leased, up to one in order of delivery. For: the subscription.

    409: the instance does not have that message any more.
    """
    context.require_owner(request, name)
    pull = context.services(request).pull
    count = await pull.acknowledge_up_to(name, given.up_to, instance=_instance(request))
    return context.json_response({"acknowledged": count})


def _trace_headers(name: str, message: DeliveredMessage) -> tracing.Carrier:
    """Return the trace headers of a message. Without tracing and debug logs this does almost no work."""
    trace = tracing.carrier_from_headers(message.headers)
    if _log.isEnabledFor(logging.DEBUG):
        fields = {"subscription": name, "sequence": message.sequence, "position": message.position}
        _log.debug("delivered", extra=fields)
    if not tracing.is_enabled():
        return trace
    place = message.sequence if message.position is None else message.position
    with tracing.span("deliver", trace, subscription=name, sequence=message.sequence, position=place) as onward:
        return onward


def _instance(request: Request) -> str:
    return context.header(request, _INSTANCE) or DEFAULT_INSTANCE


async def _wait(request: Request, asking: Awaitable[T], nothing: T, wait_seconds: float) -> T:
    """Wait for messages until the client disconnects (it could not receive them) or the API stops."""
    if wait_seconds <= 0:
        return await asking
    work = asyncio.ensure_future(asking)
    others: list[asyncio.Future[Any]] = []
    try:
        await asyncio.wait((work,), timeout=_QUICK_ANSWER_SECONDS)  # most requests are answered here
        if not work.done():
            others += map(asyncio.ensure_future, (context.stopping(request).wait(), _wait_for_disconnect(request)))
            await asyncio.wait((work, *others), return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else nothing
    finally:
        for task in (work, *others):
            task.cancel()
        await asyncio.gather(work, *others, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


_PATH: Final = re.compile(r"/v1/subscriptions/([A-Za-z0-9_-]{1,64})/messages/(?:next|(\d{1,18})/status)")
_QUERY: Final = re.compile(rb"(?:timeout=(\d{1,3}(?:\.\d{1,3})?))?(?:&?pop=(true|false))?")
_NEXT_ROUTE: Final = "/v1/subscriptions/{name}/messages/next"
_STATUS_ROUTE: Final = "/v1/subscriptions/{name}/messages/{sequence}/status"
_DEFAULT_WAIT_SECONDS: Final = 5.0
_OK: Final = StatusReport(status="ok")
_OK_BODIES: Final = frozenset({b'{"status": "ok"}', b'{"status":"ok"}'})
_JSON_HEADER: Final = (b"content-type", b"application/json")


class FastPath:
    """ASGI middleware between `AuthMiddleware` and the FastAPI application."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or pass it on unchanged."""
        found = _PATH.fullmatch(scope["path"]) if scope["type"] == "http" else None
        if found is None:
            await self._app(scope, receive, count_response(scope, send))
            return
        name, sequence = found.groups()
        if sequence is None and scope["method"] == "GET":
            query = _QUERY.fullmatch(scope["query_string"])
            if query is not None:
                seconds, pop = query.groups()
                request = Request(scope, receive)
                wait = _DEFAULT_WAIT_SECONDS if seconds is None else float(seconds)
                answer = await _answer(next_message(request, name, wait, pop == b"true"))
                HTTP_REQUESTS.add(_NEXT_ROUTE, "GET", str(answer.status_code))
                await answer(scope, receive, send)
                return
        elif sequence is not None and scope["method"] == "PATCH" and not scope["query_string"]:
            first = await receive()
            if not first.get("more_body") and first.get("body") in _OK_BODIES and _JSON_HEADER in scope["headers"]:
                request = Request(scope, receive)
                answer = await _answer(settle_message(request, name, int(sequence), _OK))
                HTTP_REQUESTS.add(_STATUS_ROUTE, "PATCH", str(answer.status_code))
                await answer(scope, receive, send)
                return
            receive = _replay(first, receive)
        await self._app(scope, receive, count_response(scope, send))


async def _answer(work: Awaitable[Response]) -> Response:
    try:
        return await work
    except Exception as error:  # noqa: BLE001 - `answer_to` has an answer for every error
        return answer_to(error)


def _replay(first: Message, receive: Receive) -> Receive:
    """Replay the consumed first message to the next application."""
    consumed: Message | None = first

    async def read() -> Message:
        nonlocal consumed
        message, consumed = consumed, None
        return await receive() if message is None else message

    return read

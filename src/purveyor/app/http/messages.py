"""Routes by which a consumer gets messages and says what became of them.

They are the busiest of all and do no more than needed: a message goes out as the bytes that lie in the queue, with the
sequence and the count of deliveries set in.
"""

import asyncio
import base64
import logging
import re
from collections.abc import Awaitable
from http import HTTPStatus
from typing import Annotated, Any, Final, TypeVar, assert_never

import msgspec
from fastapi import APIRouter, Path, Query, Request, Response

from purveyor.app.http import context
from purveyor.app.http.models import (
    Acknowledged,
    BulkReport,
    Extended,
    LeasedMessages,
    LeaseRequest,
    MessageBody,
    StatusReport,
    Wait,
)
from purveyor.app.http.problems import documented
from purveyor.delivery.pull import DEFAULT_INSTANCE, Delivered, Pull
from purveyor.jetstream.headers import EVENT_ID, first
from purveyor.model import json_fields, tracing
from purveyor.model.errors import WindowFull, describe
from purveyor.model.json_fields import Json

router = APIRouter(prefix="/v1/subscriptions/{name}/messages", tags=["messages"])
INSTANCE: Final = "X-Consumer-Instance"
_INSTANCE: Final = INSTANCE.lower().encode()
_log = logging.getLogger(__name__)
_SOON_SECONDS: Final = 0.05
_SEQUENCE: Final = Path(ge=0, lt=1 << 63)
_LONGEST_NUMBER: Final = 4300
_HUGE_NUMBER: Final = re.compile(rb"[0-9]{%d}" % (_LONGEST_NUMBER + 1))
"""What clients in Python refuse to read."""
_ERRORS: Final = (
    HTTPStatus.NOT_FOUND,
    HTTPStatus.CONFLICT,
    HTTPStatus.UNPROCESSABLE_ENTITY,
)
T = TypeVar("T")


class _Object(msgspec.Struct):
    """Any JSON object: its fields are checked, and not kept."""


_check_object: Final = msgspec.json.Decoder(_Object).decode


@router.get("/next", response_model=MessageBody | None, responses=documented(*_ERRORS))
async def next_message(
    request: Request,
    name: str,
    timeout: Annotated[Wait, Query()] = 5.0,  # noqa: ASYNC109 - how long to wait, not when to fail
    pop: bool = False,
) -> Response:
    """The next message, waited for up to `timeout` seconds; null if there is none. For: the subscription.

    It is the oldest one that is not acknowledged, the same again until it is. With `pop` it counts as acknowledged
    when it is sent. 409: the prefill failed, and nothing comes until somebody acts. 429: as many messages are leased or
    wait for a retry as may be.
    """
    context.require_owner(request, name)
    pull = context.services(request).pull
    instance = _instance(request)
    while True:
        try:  # most find something: who waits pays for what waiting takes
            found = await pull.next(name, instance, pop=pop)
        except WindowFull:
            if timeout <= 0:
                raise
            found = None
        if found is None and timeout > 0:
            asking = pull.next(name, instance, timeout=timeout, pop=pop, looked=True)
            found = await _wait(request, asking, None, timeout)
        if found is None:
            return context.Raw(b"null")
        try:
            return _one(name, found)
        except Exception as error:  # noqa: BLE001 - whatever it is, the messages behind it are not concerned
            await _set_aside(pull, name, found, error)


def _one(name: str, found: Delivered) -> Response:
    headers = [] if found.until is None else [(b"purveyor-lease-until", found.until.isoformat().encode())]
    if found.position is not None:
        headers.append((b"purveyor-position", b"%d" % found.position))
    identity = first(found.headers, EVENT_ID)
    if identity and identity.isascii() and identity.isprintable():
        headers.append((b"purveyor-id", identity.encode()))
    headers += [(key.encode(), value.encode("latin-1")) for key, value in _traced(name, found).items()]
    return context.Raw(message_json(found, {}), *headers)


@router.post("/lease", response_model=LeasedMessages, responses=documented(*_ERRORS))
async def lease(request: Request, name: str, given: LeaseRequest) -> Response:
    """Up to `max` messages at once, for the time of a lease. For: the subscription.

    Each is given to nobody else until it is acknowledged, given back, or its lease has run out. Large messages: fewer
    than `max`, at most 32 MB or one message. 429: as many messages are leased or wait for a retry as may be.
    """
    context.require_owner(request, name)
    pull, instance = context.services(request).pull, given.instance or _instance(request)
    parts: list[bytes] = []
    while not parts:
        asking = pull.lease(name, instance, given.max, given.lease_seconds, given.timeout)
        found = await _wait(request, asking, [], given.timeout)
        if not found:
            break
        if tracing.enabled():
            traces = [trace for each in found if (trace := tracing.of_headers(each.headers))]
            with tracing.span("deliver", links=traces[: tracing.MOST_LINKS], subscription=name):
                pass
        for each in found:
            try:
                parts.append(message_json(each, {**_about_lease(each), **tracing.of_headers(each.headers)}))
            except Exception as error:  # noqa: BLE001 - whatever it is, the other messages are not concerned
                await _set_aside(pull, name, each, error)
    return Response(b'{"messages":[' + b",".join(parts) + b"]}", media_type="application/json")


async def _set_aside(pull: Pull, name: str, message: Delivered, error: Exception) -> None:
    """Park a message of which no answer can be made."""
    _log.error("message %d of subscription %s becomes a dead letter", message.sequence, name, exc_info=error)
    await pull.set_aside(name, message, f"it cannot be handed out: {describe(error)}")


@router.patch("/{sequence}/status", response_model=Extended | None, responses=documented(*_ERRORS))
async def tell_status(
    request: Request, name: str, sequence: Annotated[int, _SEQUENCE], given: StatusReport
) -> Response:
    """Say what became of a message. For: the subscription.

    `ok`: handled, never delivered again. `retry`: deliver it again, after `delay` seconds. `reject`: it will never be
    handled, it becomes a dead letter. `extend`: keep it for another lease. 404: it is not there, or was acknowledged
    before. 409: another instance has it.
    """
    context.require_owner(request, name)
    if not tracing.enabled():
        return await _settle(request, name, sequence, given)
    trace = tracing.carrier(request.headers.get)
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
            return context.as_json({"lease_until": until.isoformat()})
        case _:
            assert_never(given.status)
    return context.Raw(b"null")


@router.patch("/status", response_model=Acknowledged, responses=documented(*_ERRORS))
async def tell_status_of_many(request: Request, name: str, given: BulkReport) -> Response:
    """All that this instance has at hand, up to a message in the order of delivery, is handled. For: the subscription.

    409: the instance has that message no more.
    """
    context.require_owner(request, name)
    pull = context.services(request).pull
    count = await pull.acknowledge_up_to(name, given.up_to, instance=_instance(request))
    return context.as_json({"acknowledged": count})


def message_json(message: Delivered, more: Json) -> bytes:
    """A message with what the delivery adds. What is no JSON object, written by hand say, is given in base64."""
    added = b'"sequence_number":%d,"num_delivered":%d}' % (message.sequence, message.num_delivered)
    if more:
        added = json_fields.dump(more)[1:-1] + b"," + added
    body = message.data.strip()
    if not _is_object(body):
        body = json_fields.dump({"raw": base64.b64encode(message.data).decode()})
    inner = body[1:-1].strip()
    return b"{" + inner + (b"," if inner else b"") + added


def _is_object(body: bytes) -> bool:
    """Whether it is a JSON object that clients can read; one broken body would make an answer of many unreadable."""
    try:
        if not body.isascii():
            body.decode()
        _check_object(body)
    except (ValueError, RecursionError):
        try:  # this parser knows half surrogates, which other ones refuse
            return isinstance(json_fields.load(body.decode()), dict)
        except (ValueError, RecursionError):
            return False
    return len(body) < _LONGEST_NUMBER or _HUGE_NUMBER.search(body) is None


def _about_lease(message: Delivered) -> Json:
    assert message.until is not None
    return {"position": message.position, "lease_id": message.lease, "lease_until": message.until.isoformat()}


def _traced(name: str, message: Delivered) -> tracing.Carrier:
    """The trace of a message, for the one who gets it. This is done for each: what nobody looks at costs nothing."""
    trace = tracing.of_headers(message.headers)
    if _log.isEnabledFor(logging.DEBUG):
        told = {"subscription": name, "sequence": message.sequence, "position": message.position}
        _log.debug("delivered", extra=told)
    if not tracing.enabled():
        return trace
    place = message.sequence if message.position is None else message.position
    with tracing.span("deliver", trace, subscription=name, sequence=message.sequence, position=place) as onward:
        return onward


def _instance(request: Request) -> str:
    return context.header(request, _INSTANCE) or DEFAULT_INSTANCE


async def _wait(request: Request, asking: Awaitable[T], nothing: T, wait_seconds: float) -> T:
    """Wait for messages, but not for a client that went away (nobody would get them), nor when the API is to stop."""
    if wait_seconds <= 0:
        return await asking
    work = asyncio.ensure_future(asking)
    others: list[asyncio.Future[Any]] = []
    try:
        await asyncio.wait((work,), timeout=_SOON_SECONDS)  # most are answered at once, and need no more than this
        if not work.done():
            others += map(asyncio.ensure_future, (context.stopping(request).wait(), _left(request)))
            await asyncio.wait((work, *others), return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else nothing
    finally:
        for task in (work, *others):
            task.cancel()
        await asyncio.gather(work, *others, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

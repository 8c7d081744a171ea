"""Routes of subscriptions: add, list, look at, change, delete, replay, and the state of a prefill."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from purveyor.app.http import context
from purveyor.app.http.authentication import Role
from purveyor.app.http.models import (
    NewSubscription,
    PrefillReport,
    ReplayRequest,
    ReplayStarted,
    SubscriptionBody,
    SubscriptionChange,
    subscription_json,
    unreadable_json,
)
from purveyor.app.http.problems import documented
from purveyor.delivery import prefill_status
from purveyor.delivery.push.push_problems import Trouble, troubles_of
from purveyor.model import tracing
from purveyor.model.errors import InvalidName, UnreadableRecord
from purveyor.model.json_fields import Json
from purveyor.model.registration import PrefillStatus, RecordState
from purveyor.model.tracing import Carrier
from purveyor.queues.registry import Registered

router = APIRouter(prefix="/v1/subscriptions", tags=["subscriptions"])
Force = Annotated[bool, Query(description="also one that this API does not understand")]
_CHANGED: dict[str, Any] = {"response_model": SubscriptionBody, "response_model_exclude_unset": True}


@router.get("", responses=documented(), response_model=list[SubscriptionBody])
async def list_subscriptions(request: Request) -> Response:
    """All subscriptions. For: admin.

    One that this API does not understand, because a newer one wrote it, has `unreadable` with the reason, and none of
    what it asked for.
    """
    context.require_role(request, Role.ADMIN)
    snapshot = await context.services(request).subscriptions.list()
    found = [each for each in snapshot.subscriptions.values() if each.record.state is not RecordState.DELETING]
    troubles = await troubles_of(context.services(request).queues, found)
    bodies = [{**subscription_json(each), **_trouble(each, troubles)} for each in found]
    bodies += [unreadable_json(each) for each in snapshot.unreadable.values() if not each.deleting]
    return context.as_json(sorted(bodies, key=lambda body: str(body["name"])))


@router.post(
    "",
    status_code=HTTPStatus.CREATED,
    response_model=SubscriptionBody,
    responses={
        200: {"description": "It was there, with the same parameters and password", "model": SubscriptionBody},
        **documented(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY),
    },
)
async def add_subscription(request: Request, given: NewSubscription) -> Response:
    """Add a subscription. For: admin.

    With the answer 201 every event that is accepted from now on, and fits, will be delivered. 404: somebody deleted it
    meanwhile.

    1. It is registered. 2. It gets its password. A crash between the two leaves one that nobody can log in to; the
    same request again gives it its password then.
    """
    context.require_role(request, Role.ADMIN)
    services = context.services(request)
    existing = await services.subscriptions.find(given.name) if given.push is not None else None
    definition = given.definition(context.push(request), existing)
    if context.security(request).is_reserved(definition.name):
        raise InvalidName(f"the name {definition.name!r} is that of a login", fix="choose another name")
    with _traced(request, definition.name):
        record, created = await services.subscriptions.add(definition)
    new = await services.credentials.set_first(definition.name, record.incarnation, given.password.get_secret_value())
    services.pull.forget(definition.name)
    body = await _body(request, definition.name)
    return context.as_json(body, HTTPStatus.CREATED if created or new else HTTPStatus.OK)


@router.get("/{name}", responses=documented(HTTPStatus.NOT_FOUND), **_CHANGED)
async def get_subscription(request: Request, name: str) -> Response:
    """A subscription and the state of its prefill. For: the subscription, admin."""
    context.require_owner_or_admin(request, name)
    return context.as_json(await _body(request, name))


@router.patch(
    "/{name}",
    responses=documented(
        HTTPStatus.NOT_FOUND,
        HTTPStatus.CONFLICT,
        HTTPStatus.UNPROCESSABLE_ENTITY,
    ),
    **_CHANGED,
)
async def change_subscription(request: Request, name: str, given: SubscriptionChange) -> Response:
    """Change options, pause or resume, set another password. For: admin; the last two also for the subscription.

    A new password ends the tokens of the subscription, with the last password if that stays valid for a while; unless
    `keep_tokens` is true. A subscription sets it with its current password: what ends by itself must not become
    permanent.
    """
    who = context.require_owner_or_admin(request, name)
    if given.options and not who.is_admin:
        raise context.forbidden(who, f"an administrator, to change {', '.join(given.options)}")
    if given.password is not None and not who.is_admin and not who.proof.is_current_password:
        raise context.forbidden(who, "the current password, and no token or former password, to set another one")
    services = context.services(request)
    found = await services.subscriptions.get(name)
    if given.options:
        edge = context.push(request)
        await services.subscriptions.redefine(name, lambda now: given.applied(now, edge))
    if given.paused is not None:
        with _traced(request, name):
            await (services.subscriptions.pause if given.paused else services.subscriptions.resume)(name)
    if given.password is not None:
        await services.credentials.set_password(
            name,
            found.incarnation,
            given.password.get_secret_value(),
            keep_seconds=given.password_grace_seconds,
            keep_tokens=given.keep_tokens,
        )
        # Told at once to this process too: the answer 200 means that the old one is not accepted here any more.
        context.security(request).forget_password(name)
    services.pull.forget(name)
    return context.as_json(await _body(request, name))


@router.delete("/{name}", responses=documented(HTTPStatus.NOT_FOUND))
async def delete_subscription(request: Request, name: str, force: Force = False) -> None:
    """End a subscription, with all that waits in its queue. For: the subscription, admin."""
    context.require_owner_or_admin(request, name)
    services = context.services(request)
    incarnation = await services.subscriptions.delete(name, force=force)
    services.pull.forget(name)
    services.gate.forget(name)
    await services.credentials.remove(name, incarnation)


@router.patch(
    "/{name}/prefill",
    responses=documented(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY),
)
async def tell_prefill(request: Request, name: str, given: PrefillReport) -> None:
    """Say how far the prefill of a subscription is. For: the prefill user, admin."""
    who = context.principal(request)
    if not who.is_admin:
        context.require_role(request, Role.PREFILL)
    services = context.services(request)
    await prefill_status.tell(services.subscriptions, name, PrefillStatus(given.status), reason=given.reason)
    services.pull.forget(name)


@router.post(
    "/{name}/replay",
    status_code=HTTPStatus.ACCEPTED,
    response_model=ReplayStarted,
    responses=documented(
        HTTPStatus.NOT_FOUND,
        HTTPStatus.CONFLICT,
        HTTPStatus.UNPROCESSABLE_ENTITY,
    ),
)
async def replay(request: Request, name: str, given: ReplayRequest) -> Json:
    """Write events of the past to its queue again, those that fit. For: the subscription, admin.

    409: a replay of this subscription waits already; `detail` names its job. Ask again when it has begun.
    """
    context.require_owner_or_admin(request, name)
    begin, end = given.places()
    with _traced(request, name):
        job = await context.services(request).subscriptions.replay(name, begin, end, given.topics())
    return {"job": job.job}


def _traced(request: Request, name: str) -> AbstractContextManager[Carrier]:
    """A job that comes of the request belongs to its trace."""
    return tracing.span("ask", tracing.carrier(request.headers.get), subscription=name)


async def _body(request: Request, name: str) -> Json:
    services = context.services(request)
    found = await services.subscriptions.get(name)
    trouble = _trouble(found, await troubles_of(services.queues, [found]))
    if found.record.definition.retention_seconds is None:
        return {**subscription_json(found), **trouble}
    try:
        book = await (await services.subscriptions.registry()).book(found)
    except UnreadableRecord as error:
        return {**subscription_json(found), **trouble, "unreadable": error.message}
    return {**subscription_json(found, None if book is None else book.expired), **trouble}


def _trouble(found: Registered, troubles: Mapping[str, Trouble]) -> Json:
    told = troubles.get(found.name)
    return {} if told is None else {"push_trouble": told.to_json()}

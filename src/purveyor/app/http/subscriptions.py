"""Routes of subscriptions: add, list, show, change, delete, replay, and the status of a prefill."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from purveyor.app.http import context
from purveyor.app.http.authentication import Role
from purveyor.app.http.context import ApiObjects
from purveyor.app.http.models import (
    NewSubscription,
    PrefillBody,
    PrefillReport,
    ReplayRequest,
    ReplayStarted,
    SubscriptionBody,
    SubscriptionChange,
    subscription_json,
    unreadable_json,
)
from purveyor.app.http.problems import document_errors
from purveyor.app.http.subscription_status import SubscriptionDetails
from purveyor.app.subscription_details import read_all_details, read_details
from purveyor.delivery.push.push_reports import PushProblem, read_problems
from purveyor.model import tracing
from purveyor.model.errors import InvalidName, UnreadableRecord
from purveyor.model.json_fields import Json
from purveyor.model.registration import PrefillStatus, RecordState
from purveyor.model.tracing import Carrier
from purveyor.queues.registry import Registered

router = APIRouter(prefix="/v1/subscriptions", tags=["subscriptions"])
Details = Annotated[
    bool, Query(description="with its state, positions and backlog, also if its registration or deletion was cut off")
]
Force = Annotated[bool, Query(description="also delete a subscription whose record this API cannot read")]
_CHANGED: dict[str, Any] = {"response_model": SubscriptionBody, "response_model_exclude_unset": True}


@router.get("", responses=document_errors(), response_model=list[SubscriptionBody] | list[SubscriptionDetails])
async def list_subscriptions(request: Request, details: Details = False) -> Response:
    """List all subscriptions. For: admin.

    A subscription whose record this API cannot read, because a newer version wrote it, has `unreadable` with the reason
    and no options.
    """
    context.require_role(request, Role.ADMIN)
    services = context.services(request)
    if details:
        return context.json_response(await read_all_details(services.subscriptions, services.queues))
    snapshot = await services.subscriptions.list()
    found = [each for each in snapshot.subscriptions.values() if each.record.state is not RecordState.DELETING]
    problems = await read_problems(services.queues, found)
    bodies = [{**subscription_json(each), **_push_problem(each, problems)} for each in found]
    bodies += [unreadable_json(each) for each in snapshot.unreadable.values() if not each.deleting]
    return context.json_response(sorted(bodies, key=lambda body: str(body["name"])))


@router.post(
    "",
    status_code=HTTPStatus.CREATED,
    response_model=SubscriptionBody,
    responses={
        200: {"description": "It exists with the same options and password", "model": SubscriptionBody},
        **document_errors(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY),
    },
)
async def add_subscription(request: Request, given: NewSubscription) -> Response:
    """Add a subscription. For: admin.

    After the answer 201, every matching event that the API accepts will be delivered. 404: another request deleted the
    subscription meanwhile.

    The API 1. registers the subscription and 2. sets its password. A crash between the two leaves a subscription
    without a password: no client can log in to it until the same request is sent again, which sets the password.
    """
    context.require_role(request, Role.ADMIN)
    is_new = await add(context.api(request), given, tracing.read_carrier(request.headers.get))
    body = await _body(request, given.name)
    return context.json_response(body, HTTPStatus.CREATED if is_new else HTTPStatus.OK)


async def add(api: ApiObjects, given: NewSubscription, trace: Carrier = tracing.NO_TRACE) -> bool:
    """Add a subscription with its password; return False if it exists with both. The console adds it here as well."""
    services = api.services
    existing = await services.subscriptions.find(given.name) if given.push is not None else None
    definition = given.definition(api.push, existing)
    if api.authenticator.is_reserved(definition.name):
        raise InvalidName(f"a login of the settings has the name {definition.name!r}", fix="choose another name")
    with _traced(trace, definition.name):
        record, created = await services.subscriptions.add(definition)
    if given.password is not None:
        password = given.password.get_secret_value()
        created |= await services.credentials.set_first_password(definition.name, record.incarnation, password)
    services.registrations.invalidate(definition.name)
    return created


@router.get(
    "/{name}",
    responses=document_errors(HTTPStatus.NOT_FOUND),
    response_model=SubscriptionBody | SubscriptionDetails,
    response_model_exclude_unset=True,
)
async def get_subscription(request: Request, name: str, details: Details = False) -> Response:
    """Get a subscription with the status of its prefill. For: the subscription, admin."""
    context.require_owner_or_admin(request, name, challenge=True)
    if details:
        services = context.services(request)
        return context.json_response(await read_details(services.subscriptions, services.queues, name))
    return context.json_response(await _body(request, name))


@router.patch(
    "/{name}",
    responses=document_errors(
        HTTPStatus.NOT_FOUND,
        HTTPStatus.CONFLICT,
        HTTPStatus.UNPROCESSABLE_ENTITY,
    ),
    **_CHANGED,
)
async def change_subscription(request: Request, name: str, given: SubscriptionChange) -> Response:
    """Change topics or options, pause or resume, set a password. For: admin; the last two also for the subscription.

    New topics, a new filter and new hidden fields are in force for events behind the position `in_force_after` of the
    answer; what is in the queue stays. With `prefill_new_topics` the current state of the objects of topics that are
    new is delivered before their events. 409: too many changes are not dispatched and delivered yet, or a topic that
    was removed and is added again may have messages that a prefill would overtake.

    A new password ends the tokens of the subscription, together with the previous password if that stays valid for a
    while, unless `keep_tokens` is true. A subscription needs its current password to set a new one: a credential that
    expires must not become permanent.
    """
    who = context.require_owner_or_admin(request, name)
    if (given.options or given.prefill_new_topics) and not who.is_admin:
        raise context.forbidden(who, f"an administrator, to change {', '.join(given.options) or 'topics'}")
    if given.password is not None and not who.is_admin and not who.proof.is_current_password:
        raise context.forbidden(who, "the current password (not a token or a previous password) to set a new one")
    await change(context.api(request), name, given, tracing.read_carrier(request.headers.get))
    return context.json_response(await _body(request, name))


async def change(api: ApiObjects, name: str, given: SubscriptionChange, trace: Carrier = tracing.NO_TRACE) -> None:
    """Change topics or options, pause or resume, set a password. The console changes a subscription here as well."""
    services = api.services
    found = await services.subscriptions.get(name)
    if given.options or given.prefill_new_topics:
        push_input = api.push
        await services.subscriptions.redefine(
            name, lambda now: given.apply_to(now, push_input), prefill_new_topics=given.prefill_new_topics
        )
    if given.paused is not None:
        with _traced(trace, name):
            await (services.subscriptions.pause if given.paused else services.subscriptions.resume)(name)
    if given.password is not None:
        await services.credentials.set_password(
            name,
            found.incarnation,
            given.password.get_secret_value(),
            keep_seconds=given.password_grace_seconds,
            keep_tokens=given.keep_tokens,
        )
        # At once in this process: after the answer 200 it does not accept the old password any more.
        api.authenticator.invalidate_password(name)
    services.registrations.invalidate(name)


@router.delete("/{name}", responses=document_errors(HTTPStatus.NOT_FOUND))
async def delete_subscription(request: Request, name: str, force: Force = False) -> None:
    """Delete a subscription with all messages in its queue. For: the subscription, admin."""
    context.require_owner_or_admin(request, name, challenge=True)
    services = context.services(request)
    incarnation = await services.subscriptions.delete(name, force=force)
    services.registrations.invalidate(name)
    await services.credentials.remove(name, incarnation)


@router.patch(
    "/{name}/prefill",
    responses=document_errors(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY),
)
async def set_prefill(request: Request, name: str, given: PrefillReport) -> None:
    """Set the status of the prefill of a subscription. For: the prefill user, admin."""
    who = context.principal(request)
    if not who.is_admin:
        context.require_role(request, Role.PREFILL)
    services = context.services(request)
    await services.subscriptions.set_prefill_status(name, PrefillStatus(given.status), reason=given.reason)
    services.registrations.invalidate(name)


@router.post(
    "/{name}/prefill",
    status_code=HTTPStatus.ACCEPTED,
    response_model=PrefillBody,
    responses=document_errors(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY),
)
async def repeat_prefill(request: Request, name: str) -> Response:
    """Request a failed prefill again. For: the prefill user, admin.

    A pending prefill gets its job again; one that runs or is done stays as it is. 409: it was added without a prefill.
    """
    context.require_one_of(request, (Role.ADMIN, Role.PREFILL))
    services = context.services(request)
    with _traced(tracing.read_carrier(request.headers.get), name):
        state = await services.subscriptions.request_prefill(name)
    services.registrations.invalidate(name)
    return context.json_response(state.to_json(), HTTPStatus.ACCEPTED)


@router.post(
    "/{name}/replay",
    status_code=HTTPStatus.ACCEPTED,
    response_model=ReplayStarted,
    responses=document_errors(
        HTTPStatus.NOT_FOUND,
        HTTPStatus.CONFLICT,
        HTTPStatus.UNPROCESSABLE_ENTITY,
    ),
)
async def replay(request: Request, name: str, given: ReplayRequest) -> Json:
    """Write matching past events to its queue again. For: the subscription, admin.

    409: a replay of this subscription already waits; `detail` names its job. Try again when that job has begun.
    """
    context.require_owner_or_admin(request, name)
    begin, end = given.bounds()
    with _traced(tracing.read_carrier(request.headers.get), name):
        job = await context.services(request).subscriptions.replay(name, begin, end, given.topics())
    return {"job": job.job}


def _traced(trace: Carrier, name: str) -> AbstractContextManager[Carrier]:
    """Open a span, so that a job which the request creates belongs to the trace of the request."""
    return tracing.span("ask", trace, subscription=name)


async def _body(request: Request, name: str) -> Json:
    services = context.services(request)
    found = await services.subscriptions.get(name)
    push_problem = _push_problem(found, await read_problems(services.queues, [found]))
    if found.record.definition.retention_seconds is None:
        return {**subscription_json(found), **push_problem}
    try:
        state = await (await services.subscriptions.registry()).read_acknowledged(found)
    except UnreadableRecord as error:
        return {**subscription_json(found), **push_problem, "unreadable": error.message}
    return {**subscription_json(found, None if state is None else state.expired), **push_problem}


def _push_problem(found: Registered, problems: Mapping[str, PushProblem]) -> Json:
    problem = problems.get(found.name)
    return {} if problem is None else {"push_trouble": problem.to_json()}

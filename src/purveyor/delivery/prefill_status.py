"""The state of a prefill as somebody outside tells it: a program that fills queues by itself, say."""

import dataclasses

from purveyor.delivery.subscriptions import Subscriptions
from purveyor.model.errors import Refused, Unavailable, WrongRevision
from purveyor.model.registration import PrefillState, PrefillStatus

_ATTEMPTS = 20


async def tell(
    subscriptions: Subscriptions, name: str, status: PrefillStatus, *, reason: str | None = None
) -> PrefillState:
    """Note how far a prefill is. A failed one that is *pending* again gets a job, as when it was asked for first."""
    registry = await subscriptions.registry()
    for _ in range(_ATTEMPTS):
        found = await subscriptions.get(name)
        state = found.prefill
        if found.record.begin is None:
            raise Refused(f"subscription {name!r} is not registered to the end", fix="add it again, as it was")
        if state is not None and status is PrefillStatus.PENDING and state.status is PrefillStatus.FAILED:
            return await subscriptions.request_prefill(name)
        if state is None:
            state = PrefillState(incarnation=found.incarnation, status=status, position=found.record.begin)
        told = reason or "the prefill user gave no reason"
        state = dataclasses.replace(state, status=status, reason=told if status is PrefillStatus.FAILED else None)
        try:
            await registry.put_prefill(name, state, found.prefill_revision)
        except WrongRevision:
            continue
        return state
    raise Unavailable(f"the prefill of subscription {name!r} is changed by others as well", fix="try again")

"""Who fills `<name>.prefill` now: the job named in the prefill state, at the run that it took by compare-and-set.

Delivery gives out nothing while the state is not `done`, so the messages of a job that is still running are nobody's
yet. A replay takes the state as well: what it writes is given out when it is complete, and after an earlier one.
"""

from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import Any

from purveyor.model.control_events import Job, PrefillJob, ReplayJob
from purveyor.model.errors import InvalidInput, PurveyorError, UnknownSubscription, WrongRevision
from purveyor.model.registration import PrefillState, PrefillStatus, RecordState
from purveyor.queues.registry import Registered, Registry


class Superseded(PurveyorError):
    """A newer run fills the queue: this one has no say any more."""


class Verdict(Enum):
    """Why a job does not begin."""

    NOTHING = "nothing to do"
    LATER = "another job fills this queue"


Decision = PrefillState | Verdict


def is_gone(found: Registered, job: Job) -> bool:
    """Whether the subscription that a job was for is no more."""
    return found.incarnation != job.incarnation or found.record.state is RecordState.DELETING


def begin_prefill(found: Registered, job: PrefillJob) -> Decision:
    """A prefill begins anew at each run, with a number above all before. Pure."""
    state = found.prefill
    if state is not None and state.status is PrefillStatus.DONE:
        return Verdict.NOTHING  # it was delivered again although it was done
    if state is not None and state.status is PrefillStatus.RUNNING and state.job not in (None, job.job):
        return Verdict.NOTHING  # it is an old one: another was asked for since
    fresh = state is None or state.status is PrefillStatus.PENDING
    before = state.attempt if state is not None else 1
    return PrefillState(
        incarnation=job.incarnation,
        status=PrefillStatus.RUNNING,
        position=job.position,
        attempt=before if fresh else before + 1,
        job=job.job,
    )


def begin_replay(found: Registered, job: ReplayJob) -> Decision:
    """A replay goes on where its last attempt stopped (its rows are the same each time), so it keeps its run. Pure."""
    state = found.prefill
    if state is None:
        begin = found.record.begin or 0
        state = PrefillState(incarnation=job.incarnation, status=PrefillStatus.DONE, position=begin, attempt=0)
    match state.status:
        case PrefillStatus.DONE if state.job == job.job:
            return Verdict.NOTHING
        case PrefillStatus.DONE:
            return replace(
                state,
                status=PrefillStatus.RUNNING,
                attempt=state.attempt + 1,
                total=None,
                written=0,
                reason=None,
                job=job.job,
            )
        case PrefillStatus.RUNNING if state.job == job.job:
            return state
        case PrefillStatus.FAILED:
            raise InvalidInput(
                f"the prefill of {job.name!r} failed, and a replay comes after it: {state.reason}",
                fix=f"`purveyor subscription prefill {job.name}` tries again; then ask for the replay again",
            )
        case _:
            return Verdict.LATER


class Claim:
    """The state as this run wrote it last. Whoever else writes it ends the claim."""

    def __init__(self, registry: Registry, name: str, state: PrefillState, revision: int) -> None:
        self._registry = registry
        self._name = name
        self.state = state
        self._revision = revision

    async def update(self, **changes: Any) -> None:
        """Write the state with these changes; Superseded if it is no longer ours."""
        state = replace(self.state, **changes)
        if state == self.state:
            return
        try:
            self._revision = await self._registry.put_prefill(self._name, state, self._revision)
        except WrongRevision as error:
            raise Superseded(f"another run fills the queue of {self._name!r} now") from error
        self.state = state


async def take(
    registry: Registry, found: Registered, job: Job, decide: Callable[[Registered], Decision]
) -> Claim | Verdict:
    """Become the one who fills; also a state that stays the same is written, so that an older run of it is out."""
    while True:
        decision = decide(found)
        if isinstance(decision, Verdict):
            return decision
        try:
            revision = await registry.put_prefill(found.name, decision, found.prefill_revision)
        except WrongRevision:
            found = await registry.get(found.name, ("prefill",))
            if is_gone(found, job):
                raise UnknownSubscription(f"subscription {found.name!r} is gone") from None
            continue
        return Claim(registry, found.name, decision, revision)

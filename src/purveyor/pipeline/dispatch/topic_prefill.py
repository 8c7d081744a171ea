"""The prefill of topics that a change added: when it begins, and which objects belong to it.

A change has its control event at position L. Events of its new topics are delivered from L + 1 on, so the objects as of
L come first. The program that is about to write positions up to L or behind it into the queue (the dispatcher, or a
catch-up) calls `request_prefill` before that; it does so at L already, because on an idle system no event follows.
Until then the consumer gets its backlog; from then on until the objects are written, delivery gives out nothing, as
with the first prefill, and then the objects come first.

1. The prefill state becomes *pending*, by compare-and-set. A running prefill begins again where it is, and does this
   one afterwards. A running replay loses its claim, and begins again after this prefill.
2. The job is put on `prefill`. After a crash before this, the positions up to L are not done yet: the batch that runs
   again repeats both steps. The state shows which changes are noted already, and the id of the job derives from it.

One prefill has one or more pieces, in the order of their positions: all objects as of the begin of the subscription,
then for each change those of its new topics. `PrefillState.position` is that of the piece to write, `through` that of
the last.
"""

from dataclasses import replace

from purveyor.jetstream.address import Address
from purveyor.model.control_events import JobKind, PrefillJob, job_id
from purveyor.model.errors import UnknownSubscription, WrongRevision
from purveyor.model.registration import PrefillState, PrefillStatus, Record, RecordState
from purveyor.queues.client import Queues
from purveyor.queues.registrations import Registered
from purveyor.queues.registry import Registry
from purveyor.queues.sync_client import run_sync


def next_state(record: Record, state: PrefillState | None, last: int) -> PrefillState | None:
    """Return the prefill state that must be stored before events up to `last` are written; None if it is there. Pure.

    >>> next_state(record, state, 1000)  # doctest: +SKIP
    """
    wanted = [each.until for each in record.past if each.prefill and each.until <= last]
    reached = 0 if state is None else max(state.position, state.through or 0)
    wanted = [position for position in wanted if position > reached]
    if not wanted:
        return None
    if state is None or state.status is PrefillStatus.DONE or state.is_replay:
        return PrefillState(
            incarnation=record.incarnation,
            status=PrefillStatus.PENDING,
            position=wanted[0],
            attempt=1 if state is None else state.attempt + 1,
            through=wanted[-1],
        )
    through = replace(state, through=wanted[-1])
    if state.status is not PrefillStatus.RUNNING:
        return through
    return replace(through, status=PrefillStatus.PENDING, job=None, attempt=state.attempt + is_first(record, state))


def is_first(record: Record, state: PrefillState) -> bool:
    """Return whether a prefill writes the first piece: all objects as of the begin. It begins again at each run."""
    return state.position <= (record.begin or 0)


def next_piece(record: Record, state: PrefillState) -> int | None:
    """Return the position of the piece behind the one that was written; None if that was the last. Pure."""
    return next(
        (each.until for each in record.past if each.prefill and state.position < each.until <= (state.through or 0)),
        None,
    )


def needs_prefill(found: Registered, last: int) -> bool:
    """Return whether `request_prefill` must be called before events up to `last` are written."""
    return bool(found.record.past) and next_state(found.record, found.prefill, last) is not None


def request_prefill(address: Address, found: Registered, last: int) -> None:
    """Begin the prefill of new topics, from a thread. UnreadableRecord if its state is not understood."""
    run_sync(address, lambda queues: begin_prefill(queues, found.name, found.incarnation, last))


async def begin_prefill(queues: Queues, name: str, incarnation: str, last: int) -> None:
    """Begin the prefill of the topics that changes up to `last` added; do nothing if the subscription is gone."""
    registry = await Registry.open(queues)
    while True:
        try:
            found = await registry.get(name, ("prefill",))
        except UnknownSubscription:
            return
        if found.incarnation != incarnation or found.record.state is RecordState.DELETING:
            return
        state = next_state(found.record, found.prefill, last)
        if state is not None:
            try:
                await registry.put_prefill(name, state, found.prefill_revision)
            except WrongRevision:
                continue
        else:
            state = found.prefill
        if state is not None and state.status is PrefillStatus.PENDING:
            await registry.stored_jobs.put_once(_job(found, state))
        return


def _job(found: Registered, state: PrefillState) -> PrefillJob:
    identity = job_id(found.incarnation, JobKind.PREFILL, f"{state.attempt}:{state.through}")
    return PrefillJob(name=found.name, incarnation=found.incarnation, job=identity, position=state.position)

"""Leases and settles messages in bulk for push, and keeps the keys that are blocked by a dead letter.

`PushLeases` uses the pull service: its lease rules, its delivery state and its queue. So several push workers, and
consumers that pull, may serve one subscription. `settle` applies many results of one worker in a single transition.

Under the policy `park_key` the later messages of the key of a dead letter become dead letters too: the key is blocked.
`BlockedKeys` stores the blocked keys of a subscription in the bucket of the attempt log, so that all workers know them.
A worker blocks a key before it acknowledges the message that failed; only after that can any worker lease the next
message of the key. A key is unblocked when none of its dead letters is left, because they were redriven or discarded. A
worker finds that out when a message of the key arrives, or when there is no space for another key. The record stores
the compact form of a key (`compact_key`).
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from purveyor.delivery import lease_rules
from purveyor.delivery.dead_letters.park import as_attempt_log
from purveyor.delivery.lease_types import AckTarget, LeasePolicy, NackRequest, Pending
from purveyor.delivery.message_buffer import dead_letter_id, position_of
from purveyor.delivery.pull import PullService
from purveyor.delivery.push.push_reports import AttemptLog, attempts_bucket
from purveyor.delivery.push.push_request import message_key
from purveyor.delivery.state_writer import SharedServices, StateWriter, Transition
from purveyor.delivery.transitions import (
    DeliveredMessage,
    PullRequest,
    PullResult,
    ack,
    lease_policy,
    to_milliseconds,
)
from purveyor.jetstream.key_value import Bucket
from purveyor.jetstream.streams import StoredMessage
from purveyor.model import metrics
from purveyor.model.ack_ranges import SeenMessages
from purveyor.model.delivery_policy import AfterDeadLetter, OrderBy
from purveyor.model.delivery_state import Delay, DeliveryState, FailedDelivery, Lease, SubjectKind, compact_key
from purveyor.model.errors import (
    LeaseLost,
    Refused,
    Unavailable,
    UnknownMessage,
    UnknownStream,
    UnknownSubscription,
    WrongRevision,
)
from purveyor.model.json_fields import Kind
from purveyor.queues.catalogue import DEAD_LETTERS
from purveyor.queues.client import Queues

_MAX_WRITE_ATTEMPTS: Final = 50
_CONCURRENT_READS: Final = 100
_RESERVED_BYTES: Final = 1024
"""Space for one more key with its dead letter, and for headers."""
_DeadLettersByKey = dict[str, list[int]]
_BLOCKED: Final = Kind("list of blocked keys", ("incarnation", "keys"))


class BlockedKeys:
    """The blocked keys of all subscriptions."""

    def __init__(self, queues: Queues, *, replicas: int = 1) -> None:
        self._queues = queues
        self._replicas = replicas
        self._bucket: Bucket | None = None

    async def find_blocked(self, name: str, incarnation: str, messages: Sequence[DeliveredMessage]) -> dict[int, str]:
        """Return the key of each message whose key is blocked, by sequence. A redriven message is never blocked."""
        found: dict[int, str] = {}
        blocked = await self.read(name, incarnation)
        for message in messages if blocked else ():
            key = message_key(message.data)
            if key is None or compact_key(key) not in blocked or message.kind is SubjectKind.RETRY:
                continue
            if not await self.unblock(name, incarnation, key, blocked[compact_key(key)]):
                found[message.sequence] = key
        return found

    async def read(self, name: str, incarnation: str) -> Mapping[str, list[int]]:
        """Return the blocked keys of a subscription in compact form, each with its dead letters."""
        return (await self._read(name, incarnation))[0]

    async def make_space(self, name: str, incarnation: str) -> None:
        """Unblock keys if there is no space for another one; raise `Refused` if there is none afterwards."""
        for _ in range(_MAX_WRITE_ATTEMPTS):
            blocked, revision = await self._read(name, incarnation)
            if self._has_space(incarnation, blocked):
                return
            kept = await self._without_resolved(blocked)
            if not self._has_space(incarnation, kept):
                raise Refused(
                    f"{len(kept):,} keys of subscription {name!r} are blocked, and there is no space for another one",
                    fix="redrive or discard its dead letters",
                )
            if await self._write(name, incarnation, kept, revision):
                return
        raise _contended(name)

    async def block(self, name: str, incarnation: str, key: str, dead_letter: int) -> None:
        """Block a key because of a dead letter."""
        compact = compact_key(key)
        for _ in range(_MAX_WRITE_ATTEMPTS):
            blocked, revision = await self._read(name, incarnation)
            added = {**blocked, compact: sorted({*blocked.get(compact, ()), dead_letter})}
            if await self._write(name, incarnation, added, revision):
                return
        raise _contended(name)

    async def unblock(self, name: str, incarnation: str, key: str, dead_letters: list[int]) -> bool:
        """Unblock a key if none of its dead letters is left; return whether it is unblocked."""
        for dead_letter in dead_letters:
            if await self._exists(dead_letter):
                return False
        compact = compact_key(key)
        for _ in range(_MAX_WRITE_ATTEMPTS):
            blocked, revision = await self._read(name, incarnation)
            if set(blocked.get(compact, ())) - set(dead_letters):
                return False  # another message of the key was parked meanwhile
            kept = {each: blocked[each] for each in blocked if each != compact}
            if await self._write(name, incarnation, kept, revision):
                return True
        return False

    async def _without_resolved(self, blocked: _DeadLettersByKey) -> _DeadLettersByKey:
        sequences = sorted({sequence for found in blocked.values() for sequence in found})
        existing: set[int] = set()
        for begin in range(0, len(sequences), _CONCURRENT_READS):
            chunk = sequences[begin : begin + _CONCURRENT_READS]
            answers = await asyncio.gather(*map(self._exists, chunk))
            existing |= {sequence for sequence, exists in zip(chunk, answers, strict=True) if exists}
        left = {key: [sequence for sequence in found if sequence in existing] for key, found in blocked.items()}
        return {key: found for key, found in left.items() if found}

    async def _exists(self, dead_letter: int) -> bool:
        try:
            await self._queues.streams.get(DEAD_LETTERS.stream, dead_letter)
        except (UnknownMessage, UnknownStream):
            return False
        return True

    def _has_space(self, incarnation: str, blocked: _DeadLettersByKey) -> bool:
        return len(_encode_blocked(incarnation, blocked)) + _RESERVED_BYTES <= self._queues.connection.max_payload

    async def _read(self, name: str, incarnation: str) -> tuple[_DeadLettersByKey, int]:
        entry = await (await self._open()).newest(_blocked_keys_key(name))
        if entry is None or entry.deleted:
            return {}, 0 if entry is None else entry.revision
        found = _BLOCKED.read(entry.value, _BLOCKED.check, f"subscription {name!r}")
        kept: _DeadLettersByKey = (found.get("keys") or {}) if found.get("incarnation") == incarnation else {}
        return {compact_key(key): sequences for key, sequences in kept.items()}, entry.revision  # old: full keys

    async def _write(self, name: str, incarnation: str, blocked: _DeadLettersByKey, revision: int) -> bool:
        try:
            await (await self._open()).update(_blocked_keys_key(name), _encode_blocked(incarnation, blocked), revision)
        except WrongRevision:
            return False
        return True

    async def _open(self) -> Bucket:
        if self._bucket is None:
            self._bucket = await self._queues.bucket(attempts_bucket(self._replicas))
        return self._bucket


def _encode_blocked(incarnation: str, blocked: _DeadLettersByKey) -> bytes:
    return _BLOCKED.dump({"incarnation": incarnation, "keys": blocked})


def _contended(name: str) -> Unavailable:
    return Unavailable(f"other workers change the blocked keys of {name!r} too fast", fix="try again")


def _blocked_keys_key(name: str) -> str:
    return f"{name}.parked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """The results of messages that an instance has leased."""

    instance: str
    acked: Sequence[AckTarget] = ()
    retry_delays: Mapping[int, int] = field(default_factory=dict)
    """Messages to deliver again, each after a delay in milliseconds: an attempt was made."""
    released: Sequence[int] = ()
    """Messages to deliver again, without counting this delivery."""
    renew_milliseconds: int | None = None
    """The new duration of all leases of the instance, from now on."""


@dataclass(frozen=True, slots=True)
class Settled:
    """The next delivery state, and the messages that it newly acknowledges."""

    state: DeliveryState
    acked: tuple[AckTarget, ...] = ()


class PushLeases:
    """The leases of a push worker. `instance` is the name under which this process leases messages."""

    def __init__(self, shared: SharedServices, attempts: AttemptLog, blocked: BlockedKeys, *, instance: str) -> None:
        self.instance = instance
        self._pull = PullService(shared, give_up=self._give_up)
        self._attempts = attempts
        self._blocked = blocked

    async def lease(self, name: str, max_messages: int, lease_seconds: float) -> tuple[PullResult, float | None]:
        """Lease available messages. Return also the seconds until time alone may make more available, if known."""
        request = PullRequest(instance=self.instance, max_messages=max_messages, lease_seconds=lease_seconds)
        result = await self._pull.pull_once(name, request)
        at = result.next_check_at
        return result, None if at is None else max((at - _now()) / 1000, 0.001)

    async def settle(self, name: str, incarnation: str, settlement: Settlement) -> None:
        """Commit a settlement in one write. Raise `UnknownSubscription` if the subscription was replaced."""
        writer = await self._writer(name, incarnation)
        policy = lease_policy(writer)

        def transition(state: DeliveryState) -> Transition[int]:
            settled = settle(state, settlement, _now(), policy, writer.buffer.seen())
            return Transition(
                value=len(settled.acked),
                state=None if settled.state is state else settled.state,
                acked=settled.acked,
                notifies=bool(settlement.retry_delays or settlement.released),
            )

        count = await writer.commit(transition)
        if count:
            metrics.ACKNOWLEDGED.add(name, by=count)
        if settlement.retry_delays:
            metrics.RETURNED.add(name, by=len(settlement.retry_delays))

    async def park(self, name: str, incarnation: str, message: DeliveredMessage, reason: str) -> bool:
        """Store a message that is given up as a dead letter; return False if another instance has leased it by now.

        `settle` acknowledges it afterwards. After a crash between the two, the message is given up again and becomes
        the same dead letter.
        """
        writer = await self._writer(name, incarnation)

        def check(state: DeliveryState) -> Transition[Sequence[FailedDelivery]]:
            state = lease_rules.expire_leases(state, _now())
            lease_rules.require_lease(state, message.sequence, self.instance)
            return Transition(value=state.failures.get(message.sequence, ()), needs_fresh_state=True)

        try:
            failures = await writer.commit(check)
        except LeaseLost:
            return False
        stored = await writer.buffer.read(message.sequence)
        if stored is not None:  # else an operator or a limit removed it
            await self._store_dead_letter(writer, stored, reason, message.num_delivered, failures)
        return True

    def invalidate(self, name: str) -> None:
        """Read the registration of a subscription again before the next lease."""
        self._pull.invalidate(name)

    async def _give_up(self, writer: StateWriter, message: Pending, failures: Sequence[FailedDelivery]) -> None:
        """Park a message that was delivered too often, the last time by a worker that crashed before it settled it."""
        stored = await writer.buffer.read(message.sequence)
        headers = {} if stored is None else stored.headers
        target = AckTarget(message.sequence, message.kind, position_of(headers) or 0, dead_letter_id(headers))
        if stored is not None:
            attempts = writer.definition.retry.max_attempts or 0
            reason = f"not acknowledged after {attempts} deliveries"
            await self._store_dead_letter(writer, stored, reason, attempts, failures)
        await writer.commit(lambda state: ack(writer, state, [target]))
        await self._attempts.delete(writer.name, message.sequence)

    async def _store_dead_letter(
        self,
        writer: StateWriter,
        message: StoredMessage,
        reason: str,
        attempts: int,
        failures: Sequence[FailedDelivery],
    ) -> None:
        """1. Store the dead letter. 2. Block its key, if the policy parks the later messages of the key too.

        The dead letter lists the logged attempts, and the leases of workers that crashed before they logged one.
        Raise `Refused` before step 1 if there is no space for another blocked key.
        """
        name, incarnation, push = writer.name, writer.incarnation, writer.definition.push
        blocks_keys = push is not None and push.after_dead_letter is AfterDeadLetter.PARK_KEY
        if blocks_keys:
            await self._blocked.make_space(name, incarnation)
        logged = await self._attempts.read(name, incarnation, message.sequence)
        log = sorted([*logged, *as_attempt_log(failures)], key=lambda each: str(each.get("time")))
        dead_letter = await self._pull.dead_letter_writer.park(writer, message, reason, attempts, log)
        if blocks_keys and (key := message_key(message.data)) is not None:
            await self._blocked.block(name, incarnation, key, dead_letter)

    async def _writer(self, name: str, incarnation: str) -> StateWriter:
        writer = await self._pull.state_writer(name)
        if writer.incarnation != incarnation:
            raise UnknownSubscription(f"subscription {name!r} was deleted meanwhile", fix="nothing to do")
        return writer


def settle(
    state: DeliveryState,
    settlement: Settlement,
    now: int,
    policy: LeasePolicy,
    seen: Mapping[SubjectKind, SeenMessages] | None = None,
) -> Settled:
    """Apply a settlement. Pure.

    A message that is acknowledged, or that another instance has leased by now, stays as it is. An acknowledgement
    counts even if another instance has the lease, as in the pull API.
    """
    after = lease_rules.expire_leases(state, now)
    acked = tuple(each for each in settlement.acked if each.sequence not in after.acked(each.kind))
    if acked:
        after = lease_rules.ack(after, acked, seen)
    if settlement.retry_delays:
        after = _delay_retries(after, settlement, now, policy)
    if settlement.released:
        released = frozenset(settlement.released)
        leases = (_without(lease, released, settlement.instance) for lease in after.leases)
        after = after._replace(leases=tuple(lease for lease in leases if lease.sequences))
    if (duration := settlement.renew_milliseconds) is not None:
        after = after._replace(
            leases=tuple(
                lease._replace(until=now + duration, duration=duration)
                if lease.instance == settlement.instance
                else lease
                for lease in after.leases
            ),
        )
    return Settled(after, acked)


def _delay_retries(state: DeliveryState, settlement: Settlement, now: int, policy: LeasePolicy) -> DeliveryState:
    if policy.order_by is OrderBy.POSITION:
        for sequence, delay in settlement.retry_delays.items():
            try:
                request = NackRequest(instance=settlement.instance, now=now, delay=delay, record_failure=False)
                state = lease_rules.nack(state, sequence, request, policy)
            except LeaseLost:
                continue
        return state
    leases = {sequence: lease for lease in state.leases for sequence in lease.sequences}
    counts, delayed, ended = dict(state.delivery_counts), dict(state.delayed), set()
    for sequence, delay in settlement.retry_delays.items():
        lease = leases.get(sequence)
        if lease is None and sequence not in counts:
            continue  # acknowledged, or never leased
        if lease is not None:
            if lease.instance != settlement.instance:
                continue
            counts[sequence] = counts.get(sequence, 0) + 1
            ended.add(sequence)
        if delay > 0:
            delayed[sequence] = Delay(now + delay, delay)
    kept = (_without(lease, frozenset(ended), settlement.instance) for lease in state.leases)
    return state._replace(
        delivery_counts=counts, delayed=delayed, leases=tuple(lease for lease in kept if lease.sequences)
    )


def _without(lease: Lease, sequences: frozenset[int], instance: str) -> Lease:
    if lease.instance != instance or sequences.isdisjoint(lease.sequences):
        return lease
    return lease.without(sequences)


def _now() -> int:
    return to_milliseconds(time.time())

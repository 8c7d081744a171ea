"""The attempt log of each push subscription: its last attempts, for operators.

Push sends thousands of messages in a second, so a worker does not store each attempt when it ends. It collects them and
writes once a second. Delivery needs none of it: when the worker is killed, the attempts of the last second are missing
in the log, and when the log cannot be written, push continues.

Attempts that failed and attempts that were acknowledged have a ring of records each, so that many successes do not push
out the failures. A ring has `RECORDS_PER_RING` records of 16 KiB; a new record replaces the oldest. The newest record
is written again until it is full. Workers write by compare-and-set; a worker that loses reads the newest record and
adds its attempts to that. Of many attempts in a short time a worker stores some (`AttemptBudget`) and counts the
others.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from purveyor.delivery.push.attempt_record import (
    MAX_TEXT_CHARACTERS,
    AttemptPage,
    AttemptQuery,
    AttemptRecord,
    OmittedAttempts,
    PushAttempt,
    RecordBuilder,
    search,
)
from purveyor.delivery.push.push_reports import attempts_bucket
from purveyor.delivery.push.push_request import read_envelope
from purveyor.delivery.push.settlement import Action, PushResult
from purveyor.jetstream.key_value import OPERATION, Bucket
from purveyor.jetstream.streams import PageRequest, read_page
from purveyor.model.errors import (
    PurveyorError,
    Unavailable,
    UnknownMessage,
    UnknownStream,
    UnreadableRecord,
    WrongRevision,
    describe,
)
from purveyor.queues.client import Queues
from purveyor.queues.permissions import PUSH_ATTEMPTS
from purveyor.queues.registry import Registered

_log = logging.getLogger(__name__)
RECORDS_PER_RING: Final = 32
"""The number of records of a ring. With 16 KiB each, the log of a subscription has at most about 1 MiB."""
FLUSH_SECONDS: Final = 1.0
_STREAM: Final = f"KV_{PUSH_ATTEMPTS}"
_MAX_WRITE_ATTEMPTS: Final = 10
_CONCURRENT_WRITES: Final = 8
_MAX_SUBSCRIPTIONS_PER_SECOND: Final = 100
"""With more busy subscriptions, a worker writes the log of each less often than once a second."""
_MAX_UNWRITTEN_ATTEMPTS: Final = 200
"""A worker keeps at most this many attempts of a ring in memory; it counts the others."""
_CLOSE_TIMEOUT_SECONDS: Final = 2.0
_FAILED: Final = "failed"
_ACKNOWLEDGED: Final = "acknowledged"


@dataclass(slots=True)
class AttemptBudget:
    """How many attempts a worker stores: `at_once`, and then `per_second`. It counts the others."""

    at_once: float
    per_second: float
    left: float = field(init=False)
    _counted_at: float = float("-inf")

    def __post_init__(self) -> None:
        self.left = self.at_once

    def take(self, now: float) -> bool:
        """Return whether to store an attempt at this time.

        >>> budget = AttemptBudget(2, 1)
        >>> [budget.take(now) for now in (0.0, 0.0, 0.0, 1.0, 1.0)]
        [True, True, False, True, False]
        """
        if now > self._counted_at:
            self.left = min(self.left + (now - self._counted_at) * self.per_second, self.at_once)
            self._counted_at = now
        if self.left < 1:
            return False
        self.left -= 1
        return True


class _Ring:
    """One of the two rings of a subscription, and what this worker has to add to it."""

    def __init__(self, name: str, incarnation: str, outcome: str, budget: AttemptBudget) -> None:
        self._prefix = _ring_prefix(name, outcome)
        self._incarnation = incarnation
        self._budget = budget
        self._attempts: list[PushAttempt] = []
        self._omitted: OmittedAttempts | None = None
        self._head: tuple[RecordBuilder, int] | None = None
        """The newest record and its revision, as far as this worker knows."""

    @property
    def has_changes(self) -> bool:
        """Whether there is something to write."""
        return bool(self._attempts) or self._omitted is not None

    def has_budget(self, now: float) -> bool:
        """Return whether to store an attempt."""
        return len(self._attempts) < _MAX_UNWRITTEN_ATTEMPTS and self._budget.take(now)

    def add(self, attempt: PushAttempt) -> None:
        """Keep an attempt for the next write."""
        self._attempts.append(attempt)

    def count(self, at: int) -> None:
        """Count an attempt that is not stored."""
        omitted = self._omitted
        begin, count = (at, 0) if omitted is None else (omitted.begin, omitted.count)
        self._omitted = OmittedAttempts(begin, at, count + 1)

    def handle_failure(self, *, drop: bool) -> None:
        """Read the newest record again before the next write; with `drop`, forget what is not written."""
        self._head = None
        if drop:
            self._attempts, self._omitted = [], None

    async def write(self, queues: Queues, bucket: Bucket) -> None:
        """Add the attempts to the newest record, and to further records while one is full."""
        conflicts = 0
        while self.has_changes:
            record, revision = self._head or await self._find_head(queues)
            if record.is_full or record.incarnation != self._incarnation:
                following = await self._begin_record(bucket, record.number + 1)
                if following is None:
                    self._head = None
                    continue
                record, revision = following
            attempts, omitted = self._attempts, self._omitted
            filled, rest = record.plus(attempts, omitted)
            try:
                revision = await bucket.update(self._key(filled.number), filled.dump(), revision)
            except WrongRevision:  # another worker was faster
                self._head = None
                conflicts += 1
                if conflicts == _MAX_WRITE_ATTEMPTS:
                    raise Unavailable("other workers change the attempt log too fast", fix="try again") from None
                continue
            self._head = (filled, revision)
            self._attempts = self._attempts[len(attempts) - len(rest) :]
            if self._omitted is omitted:
                self._omitted = None

    async def _find_head(self, queues: Queues) -> tuple[RecordBuilder, int]:
        """Read the newest record of the ring: the last one that was written."""
        with contextlib.suppress(UnknownMessage):
            found = await queues.streams.get_last(_STREAM, f"$KV.{PUSH_ATTEMPTS}.{self._prefix}.*")
            if OPERATION not in found.headers:
                return RecordBuilder.from_record(AttemptRecord.load(found.data)), found.sequence
        return RecordBuilder(0, ""), 0

    async def _begin_record(self, bucket: Bucket, number: int) -> tuple[RecordBuilder, int] | None:
        """Return an empty record, and the revision of the old one in its place; None if another worker has begun it."""
        entry = await bucket.newest(self._key(number))
        if entry is not None and not entry.deleted and AttemptRecord.load(entry.value).number >= number:
            return None
        return RecordBuilder(number, self._incarnation), 0 if entry is None else entry.revision

    def _key(self, number: int) -> str:
        return f"{self._prefix}.{number % RECORDS_PER_RING}"


class AttemptRecorder:
    """Records the attempts of one subscription."""

    def __init__(self, history: "AttemptHistory", name: str, incarnation: str) -> None:
        self.name = name
        self._history = history
        self._loop = asyncio.get_running_loop()
        self._failed = _Ring(name, incarnation, _FAILED, AttemptBudget(200, 50))
        self._acknowledged = _Ring(name, incarnation, _ACKNOWLEDGED, AttemptBudget(200, 20))

    def record(self, result: PushResult, endpoint: str, seconds: float) -> None:
        """Record an attempt. It runs for every push, so it is fast: a rate above the budget only adds to a counter."""
        action, at = result.decision.action, int(result.at * 1000)
        if action is Action.RELEASE:  # it was not sent
            return
        ring = self._acknowledged if action is Action.ACKNOWLEDGE else self._failed
        if ring.has_budget(self._loop.time()):
            ring.add(_attempt(result, self.name, endpoint, seconds, at))
        else:
            ring.count(at)
        self._history.write_soon(self)

    @property
    def rings(self) -> tuple[_Ring, _Ring]:
        """Its rings; the failures first."""
        return self._failed, self._acknowledged


class AttemptHistory:
    """Writes the attempt logs of a worker in the background, once a second."""

    def __init__(self, queues: Queues, *, replicas: int = 1, flush_seconds: float = FLUSH_SECONDS) -> None:
        self._queues = queues
        self._replicas = replicas
        self._flush_seconds = flush_seconds
        self._bucket: Bucket | None = None
        self._changed: dict[AttemptRecorder, None] = {}
        self._writing: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._logged: set[str] = set()

    def recorder(self, name: str, incarnation: str) -> AttemptRecorder:
        """Return a recorder for one subscription."""
        return AttemptRecorder(self, name, incarnation)

    def write_soon(self, recorder: AttemptRecorder) -> None:
        """Write the attempts of a subscription within a second."""
        if recorder not in self._changed:
            self._changed[recorder] = None
            if self._writing is None or self._writing.done():
                self._writing = asyncio.create_task(self._write())

    async def close(self) -> None:
        """Write what is there; give up if the server does not answer."""
        self._closing.set()
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=_CLOSE_TIMEOUT_SECONDS)
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    async def _write(self) -> None:
        while self._changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), self._flush_seconds)
            changed, self._changed = [*self._changed], {}
            for begin in range(0, len(changed), _CONCURRENT_WRITES):
                await asyncio.gather(*map(self._write_one, changed[begin : begin + _CONCURRENT_WRITES]))
                if not self._closing.is_set():
                    await asyncio.sleep(_CONCURRENT_WRITES / _MAX_SUBSCRIPTIONS_PER_SECOND)

    async def _write_one(self, recorder: AttemptRecorder) -> None:
        """Write the log of one subscription. An error is logged once for each subscription, and never stops push."""
        try:
            if self._bucket is None:
                self._bucket = await self._queues.bucket(attempts_bucket(self._replicas))
            for ring in recorder.rings:
                await ring.write(self._queues, self._bucket)
            self._logged.discard(recorder.name)
        except Exception as error:  # noqa: BLE001 - the log is for operators, and delivery does not depend on it
            is_retryable = isinstance(error, PurveyorError) and error.retryable
            for ring in recorder.rings:
                ring.handle_failure(drop=not is_retryable)
            if is_retryable:
                self._changed[recorder] = None
            if recorder.name not in self._logged:
                self._logged.add(recorder.name)
                what = "the worker tries again" if is_retryable else "they are lost"
                trace = None if isinstance(error, PurveyorError) else error
                text = "attempts to push to subscription %s cannot be logged (%s): %s"
                _log.warning(text, recorder.name, what, describe(error), exc_info=trace)


async def read_attempts(queues: Queues, found: Registered, query: AttemptQuery) -> AttemptPage:
    """Return a page of the attempt log of a subscription, the newest attempts first."""
    stored: list[bytes] = []
    wanted = {None: (_FAILED, _ACKNOWLEDGED), True: (_ACKNOWLEDGED,), False: (_FAILED,)}[query.is_acknowledged]
    for outcome in wanted:
        subject = f"$KV.{PUSH_ATTEMPTS}.{_ring_prefix(found.name, outcome)}.*"
        try:
            page = await read_page(queues, _STREAM, PageRequest(subject=subject, count=RECORDS_PER_RING))
        except UnknownStream:  # no worker has stored anything yet
            break
        stored += [message.data for message in page.messages]
    # In a thread: to parse a log of full size takes longer than other requests of an API should wait.
    return await asyncio.to_thread(_search_stored, stored, found.incarnation, query)


def _search_stored(stored: Sequence[bytes], incarnation: str, query: AttemptQuery) -> AttemptPage:
    records: list[AttemptRecord] = []
    unreadable: str | None = None
    for data in stored:
        try:
            record = AttemptRecord.load(data)
        except UnreadableRecord as error:
            unreadable = error.message
            continue
        if record.incarnation == incarnation:
            records.append(record)
    return search(records, query, unreadable)


def _ring_prefix(name: str, outcome: str) -> str:
    """Return the first part of the keys of a ring. No subscription has a name with `=`."""
    return f"{outcome}={name}"


def _attempt(result: PushResult, name: str, endpoint: str, seconds: float, at: int) -> PushAttempt:
    message, outcome = result.message, result.outcome
    envelope = read_envelope(message, name)
    return PushAttempt(
        at=at,
        sequence=message.sequence,
        position=message.position,
        kind=message.kind,
        realm=_short(envelope.realm),
        topic=_short(envelope.topic),
        key=None if envelope.key is None else _short(envelope.key),
        event_id=_short(envelope.id),
        endpoint=endpoint,
        attempt=message.num_delivered,
        action=result.decision.action,
        status=outcome.status,
        error=None if outcome.error is None else _short(outcome.error),
        milliseconds=round(seconds * 1000),
        excerpt=outcome.excerpt,
    )


def _short(text: str) -> str:
    """Shorten a text, and replace halves of surrogate pairs, which no record can hold."""
    return text[:MAX_TEXT_CHARACTERS].encode("utf-8", "replace").decode()

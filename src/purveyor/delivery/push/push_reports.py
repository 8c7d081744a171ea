"""Reports of push for operators: the failed attempts of each message, and the problems of each subscription.

Both are in one bucket. Delivery needs none of it.

`AttemptLog` keeps the failed attempts of a message until the message is acknowledged or becomes a dead letter. Each
message that failed has its own key, because the delivery state of a subscription is written with every message and has
to be short. The log holds the last attempts; the delivery state counts them. So a log that a newer worker wrote stops
nothing: this worker leaves it as it is and adds nothing.

`PushReporter` collects the problems that stop the push of one subscription. `PushProblems` stores them under a key of
the subscription, and repeats that while the problem lasts. The status of the subscription shows them. When the cause is
gone, the worker deletes the record; a record of a worker that has ended becomes stale and is ignored.

A loop of the worker survives every exception: it continues after a pause, and pauses double while failures follow each
other. The first failure of a series, and each with a new reason, is logged with its traceback.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from purveyor.delivery.lease_rules import MAX_FAILURES_PER_MESSAGE
from purveyor.jetstream.key_value import OPERATION, Bucket, BucketConfig
from purveyor.jetstream.streams import PageRequest, StoredMessage, read_page
from purveyor.model import json_fields
from purveyor.model.delivery_policy import Delivery
from purveyor.model.errors import (
    PurveyorError,
    Unavailable,
    UnknownKey,
    UnknownMessage,
    UnknownStream,
    UnreadableRecord,
    describe,
)
from purveyor.model.json_fields import Json, Kind, moment_field, read_fields, text_field, whole_field
from purveyor.model.retries import OPEN_BACKOFF, Backoff, describe_progress
from purveyor.queues.client import Queues
from purveyor.queues.permissions import PUSH_ATTEMPTS
from purveyor.queues.registry import Registered

_log = logging.getLogger(__name__)
_MAX_AGE: Final = timedelta(days=30)
_ATTEMPTS: Final = Kind("list of push attempts", ("incarnation", "attempts"))
UNAVAILABLE_PAUSE_SECONDS: Final = 1.0
"""The pause after an error that a retry may cure, such as a server that does not answer."""
_FAILURE_BACKOFF: Final = Backoff(1.0, 60.0)
_SERIES_END_SECONDS: Final = 60.0
"""After this time without a failure a new series begins."""
_REPEAT_SECONDS: Final = 20.0
_CLOSE_TIMEOUT_SECONDS: Final = 2.0
_STALE_AFTER: Final = timedelta(seconds=3 * OPEN_BACKOFF.longest_seconds)
"""A worker retries, and stores the problem again, more often than this."""
_STREAM: Final = f"KV_{PUSH_ATTEMPTS}"
_PAGE_SIZE: Final = 500
_PROBLEM: Final = Kind("push problem", ("incarnation", "reason", "since", "endpoints"))
EventCallback = Callable[[str, str, str], None]
"""Called with a subscription, the name of an event, and a description."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointFailure:
    """An endpoint that has accepted no message since `since`: the failed attempts, and how the last one ended."""

    endpoint: str
    since: datetime
    attempts: int
    status: int | None
    """The status of the last answer; None if there was none."""
    error: str | None
    """Why there was no answer; None if there was one."""
    breaker: str
    """The state of the circuit breaker: `closed`, `open` or `half open`."""
    window: int
    """How many messages may be in flight to it."""

    @property
    def reason(self) -> str:
        """The behaviour of the endpoint in a few words, which stay the same while it does not change."""
        return f"{self.endpoint} answers {self.status}" if self.status is not None else f"{self.endpoint}: {self.error}"

    @property
    def progress(self) -> str:
        """The attempts, the circuit breaker and the window, in a few words."""
        return describe_progress(self.attempts, self.breaker, self.window)

    def to_json(self) -> Json:
        """Return the form that is stored and that the API, the CLI and the console show."""
        return {**asdict(self), "since": self.since.isoformat()}

    @classmethod
    def from_json(cls, data: object) -> "EndpointFailure":
        """Build it from a stored record; InvalidInput names the wrong field."""
        return cls(**read_fields(_ENDPOINT_FIELDS, json_fields.mapping(data, _ENDPOINT), _ENDPOINT))


_ENDPOINT: Final = "failing endpoint"
_ENDPOINT_FIELDS: Final = (
    text_field("endpoint"),
    moment_field("since"),
    whole_field("attempts"),
    whole_field("status", default=None),
    text_field("error", default=None),
    text_field("breaker"),
    whole_field("window"),
)


class AttemptLog:
    """The attempt logs of all subscriptions. It caches the logs that this process wrote."""

    def __init__(self, queues: Queues, *, replicas: int = 1) -> None:
        self._queues = queues
        self._replicas = replicas
        self._bucket: Bucket | None = None
        self._cache: dict[str, list[Json]] = {}

    async def append(self, name: str, incarnation: str, sequence: int, attempt: int, entry: Json) -> None:
        """Add a failed attempt to the log of a message; `attempt` counts this one."""
        key = _attempts_key(name, sequence)
        if attempt > 1 and key not in self._cache:
            try:
                self._cache[key] = await self._read(key, incarnation)
            except UnreadableRecord as error:
                _log.warning("an attempt to push to subscription %s is not logged: %s", name, error)
                return
        log = [*self._cache.get(key, ()), entry][-MAX_FAILURES_PER_MESSAGE:]
        self._cache[key] = log
        await (await self._open()).put(key, _ATTEMPTS.dump({"incarnation": incarnation, "attempts": log}))

    async def read(self, name: str, incarnation: str, sequence: int) -> list[Json]:
        """Return the logged attempts of a message, in the form that a dead letter stores."""
        key = _attempts_key(name, sequence)
        log = self._cache.get(key)
        if log is None:
            log = []
            with contextlib.suppress(UnreadableRecord):
                log = await self._read(key, incarnation)
        return log

    async def delete(self, name: str, sequence: int) -> None:
        """Delete the log of a message that is acknowledged or parked."""
        key = _attempts_key(name, sequence)
        self._cache.pop(key, None)
        await (await self._open()).purge(key)

    def clear_cache(self, name: str) -> None:
        """Drop the cached logs of a subscription that this process no longer pushes."""
        for key in [key for key in self._cache if key.rpartition(".")[0] == name]:
            del self._cache[key]

    async def _read(self, key: str, incarnation: str) -> list[Json]:
        try:
            entry = await (await self._open()).get(key)
        except UnknownKey:
            return []
        found = _ATTEMPTS.read(entry.value, _ATTEMPTS.check)
        return list(found.get("attempts") or ()) if found.get("incarnation") == incarnation else []

    async def _open(self) -> Bucket:
        if self._bucket is None:
            self._bucket = await self._queues.bucket(attempts_bucket(self._replicas))
        return self._bucket


def attempts_bucket(replicas: int) -> BucketConfig:
    """Return the configuration of the bucket; entries of deleted subscriptions expire by age."""
    return BucketConfig(name=PUSH_ATTEMPTS, max_age=_MAX_AGE, replicas=replicas)


def _attempts_key(name: str, sequence: int) -> str:
    return f"{name}.{sequence}"


class FailureSeries:
    """The unexpected exceptions of one loop. `what` names the loop in the log."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._count = 0
        self._last_at = float("-inf")
        self._logged = ""

    def add(self, error: BaseException, now: float) -> str:
        """Count an exception, log it if its description is new, and return the description."""
        if now - self._last_at > self.pause_seconds + _SERIES_END_SECONDS:
            self._count, self._logged = 0, ""
        self._count += 1
        self._last_at = now
        description = describe(error)
        if description != self._logged:
            self._logged = description
            _log.error("%s failed, and continues after a pause: %s", self._what, description, exc_info=error)
        return description

    @property
    def pause_seconds(self) -> float:
        """How long the loop pauses now."""
        return _FAILURE_BACKOFF.delay_seconds(self._count)


class PushReporter:
    """Reports events and problems of one subscription."""

    def __init__(self, name: str, incarnation: str, problems: "PushProblems", on_event: EventCallback) -> None:
        self.name = name
        self.incarnation = incarnation
        self._problems = problems
        self._on_event = on_event
        self._last_event = ""
        self._reasons: dict[str, str] = {}
        """Why nothing is sent, by the thing that has the problem: an endpoint, the secrets, an activity."""
        self._failing: dict[str, EndpointFailure] = {}
        self._failures: dict[str, FailureSeries] = {}

    def report_event(self, event: str, description: str) -> None:
        """Report an event, unless the last one had the same description."""
        if description != self._last_event:
            self._last_event = description
            self._on_event(self.name, event, description)

    def report_recovery(self) -> None:
        """Report that messages are delivered again, and the next event even if it repeats the last one."""
        if self._last_event:
            self._on_event(self.name, "recovered", "messages are delivered again")
        self._last_event = ""

    def set_problem(self, what: str, reason: str) -> None:
        """Show a problem in the status of the subscription; an empty reason removes it."""
        if reason:
            self._reasons[what] = reason
        elif self._reasons.pop(what, None) is None:
            return
        self._show()

    def set_failing(self, failure: EndpointFailure) -> None:
        """Show an endpoint that accepts no messages in the status of the subscription."""
        self._failing[failure.endpoint] = failure
        self.set_problem(failure.endpoint, failure.reason)

    def clear_failing(self, endpoint: str) -> None:
        """Remove the problem of an endpoint that accepts messages again, or is no longer used."""
        self._failing.pop(endpoint, None)
        self.set_problem(endpoint, "")

    def _show(self) -> None:
        reason = "; ".join(dict.fromkeys(self._reasons.values()))
        self._problems.set(self.name, self.incarnation, reason, tuple(self._failing.values()))

    def report_failure(self, activity: str, error: Exception) -> float:
        """Report that an activity failed, and return the seconds to pause before the retry."""
        if isinstance(error, PurveyorError) and error.retryable:
            self.report_event("problem", str(error))
            return UNAVAILABLE_PAUSE_SECONDS
        series = self._failures.setdefault(activity, FailureSeries(f"push of subscription {self.name}: {activity}"))
        description = f"{activity} failed: {series.add(error, asyncio.get_running_loop().time())}"
        self.report_event("failed", description)
        self.set_problem(activity, description)
        return series.pause_seconds

    def clear_failure(self, activity: str) -> None:
        """Remove the problem of an activity that succeeded."""
        if activity in self._reasons:
            self.set_problem(activity, "")

    def close(self) -> None:
        """Remove all problems."""
        self._problems.set(self.name, self.incarnation, "")


@dataclass(frozen=True, slots=True)
class PushProblem:
    """Why a subscription is not pushed, and since when."""

    reason: str
    since: datetime
    endpoints: tuple[EndpointFailure, ...] = ()
    """The endpoints that accept no messages; none if the cause is another."""

    @property
    def state(self) -> str:
        """One word for lists: `failing` if an endpoint accepts no messages, else `stuck`."""
        return "failing" if self.endpoints else "stuck"

    @property
    def details(self) -> str:
        """The reason, with the attempts, the circuit breaker and the window of each failing endpoint."""
        return "; ".join([self.reason, *(each.progress for each in self.endpoints)])

    def to_json(self) -> Json:
        """Return the form that the API, the CLI and the console show."""
        endpoints = [each.to_json() for each in self.endpoints]
        return {"reason": self.reason, "since": self.since.isoformat(), "endpoints": endpoints}


@dataclass(slots=True)
class _CurrentProblem:
    reason: str
    since: datetime
    stored_at: float = float("-inf")


class PushProblems:
    """Stores the problems that one worker has. It writes in the background: a slow server must not delay push."""

    def __init__(self, queues: Queues, *, replicas: int = 1) -> None:
        self._queues = queues
        self._replicas = replicas
        self._bucket: Bucket | None = None
        self._current: dict[str, _CurrentProblem] = {}
        self._to_write: dict[str, bytes | None] = {}
        self._writing: asyncio.Task[None] | None = None

    def set(self, name: str, incarnation: str, reason: str, endpoints: tuple[EndpointFailure, ...] = ()) -> None:
        """Store that a subscription has, or still has, a problem; an empty reason deletes the record."""
        current = self._current.get(name)
        if not reason:
            if current is not None:
                del self._current[name]
                self._write_soon(name, None)
            return
        if current is None or current.reason != reason:
            since = min((each.since for each in endpoints), default=datetime.now(UTC))
            current = self._current[name] = _CurrentProblem(reason, since)
        now = asyncio.get_running_loop().time()
        if now - current.stored_at >= _REPEAT_SECONDS:
            current.stored_at = now
            value: Json = {"incarnation": incarnation, "reason": reason, "since": current.since.isoformat()}
            if endpoints:
                value["endpoints"] = [each.to_json() for each in endpoints]
            self._write_soon(name, _PROBLEM.dump(value))

    async def close(self) -> None:
        """Wait for pending writes; give up if the server does not answer."""
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=_CLOSE_TIMEOUT_SECONDS)
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    def _write_soon(self, name: str, value: bytes | None) -> None:
        self._to_write[name] = value
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())

    async def _write(self) -> None:
        while self._to_write:
            name, value = self._to_write.popitem()
            try:
                if self._bucket is None:
                    self._bucket = await self._queues.bucket(attempts_bucket(self._replicas))
                if value is None:
                    await self._bucket.purge(_problem_key(name))
                else:
                    await self._bucket.put(_problem_key(name), value)
            except Unavailable:
                self._to_write.setdefault(name, value)  # keep a newer value
                await asyncio.sleep(UNAVAILABLE_PAUSE_SECONDS)
            except PurveyorError as error:
                _log.debug("the push problem of subscription %s is not stored: %s", name, error)


async def read_problems(queues: Queues, subscriptions: Sequence[Registered]) -> dict[str, PushProblem]:
    """Return the current push problems of some subscriptions, by name."""
    pushed = {each.name: each for each in subscriptions if each.record.definition.delivery is Delivery.PUSH}
    found: dict[str, PushProblem] = {}
    for message in await _read_stored_problems(queues, [*pushed]):
        name = message.subject.removeprefix(f"$KV.{PUSH_ATTEMPTS}.").rpartition(".")[0]
        problem = _decode_problem(message, pushed[name]) if name in pushed else None
        if problem is not None:
            found[name] = problem
    return found


async def _read_stored_problems(queues: Queues, names: Sequence[str]) -> list[StoredMessage]:
    """Read the stored problems: for one subscription its record, for several all records that there are."""
    found: list[StoredMessage] = []
    try:
        if len(names) == 1:
            return [await queues.streams.get_last(_STREAM, f"$KV.{PUSH_ATTEMPTS}.{_problem_key(names[0])}")]
        has_more, after = bool(names), 0
        while has_more:
            request = PageRequest(subject=f"$KV.{PUSH_ATTEMPTS}.*.trouble", from_sequence=after + 1, count=_PAGE_SIZE)
            page = await read_page(queues, _STREAM, request)
            found += page.messages
            has_more = page.has_more and bool(page.messages)
            after = found[-1].sequence if found else 0
    except (UnknownMessage, UnknownStream):
        pass  # no worker has stored a problem yet
    return found


def _decode_problem(message: StoredMessage, subscription: Registered) -> PushProblem | None:
    is_stale = message.timestamp is None or datetime.now(UTC) - message.timestamp > _STALE_AFTER
    if is_stale or OPERATION in message.headers:
        return None

    def build(given: Json) -> PushProblem | None:
        value = _PROBLEM.check(given)
        if value.get("incarnation") != subscription.incarnation:
            return None
        reason = json_fields.text(value, "reason", _PROBLEM.what)
        endpoints = tuple(map(EndpointFailure.from_json, value.get("endpoints") or ()))
        return PushProblem(reason, json_fields.moment(value, "since", _PROBLEM.what), endpoints)

    try:
        return _PROBLEM.read(message.data, build)
    except UnreadableRecord as error:  # a newer worker stored it: there is a problem, with a reason we cannot read
        return PushProblem(str(error), message.timestamp or datetime.now(UTC))


def _problem_key(name: str) -> str:
    # Earlier versions use "trouble": the key stays, so that old and new workers see the same problem.
    return f"{name}.trouble"

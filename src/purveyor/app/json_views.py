"""JSON views of subscriptions, messages, dead letters, schemas and topics that the command line and the HTTP API share.

`check_object` checks an object against a schema. Matching patterns against topics runs in a thread: each match is
bounded (`model.subscription_limits`), but may be one of many.
"""

import asyncio
import base64
import dataclasses
import re
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from purveyor.delivery.dead_letters.park import ATTEMPTS_LOG, Attempt, attempts_of
from purveyor.delivery.dead_letters.service import Report
from purveyor.delivery.pull import DeliveredMessage
from purveyor.delivery.subscription_status import MOST_HOLDERS, SubscriptionStatus
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.headers import Headers, first
from purveyor.model import json_fields
from purveyor.model.ack_ranges import Expired
from purveyor.model.errors import SchemaMismatch, UnknownTopic
from purveyor.model.event import Event
from purveyor.model.json_fields import Json
from purveyor.model.message_headers import EVENT_ID
from purveyor.model.registration import PrefillState, PrefillStatus, RecordState
from purveyor.queues.dead_letters.store import ParkedMessage
from purveyor.queues.registry import Snapshot
from purveyor.sources.schemas.event_validator import SchemaValidator
from purveyor.sources.schemas.registry import RegistryContents, SchemaRegistry
from purveyor.sources.schemas.schema import Schema, Topic, find_governing_schema, topic_key

_MAX_NUMBER_DIGITS: Final = 4300
_HUGE_NUMBER: Final = re.compile(rb"[0-9]{%d}" % (_MAX_NUMBER_DIGITS + 1))
"""A number that Python clients refuse to parse."""
LIMIT_REACHED: Final = "Purveyor-Limit-Reached"
"""The HTTP header of a full list of topics."""


def dead_letter_summary(parked: ParkedMessage) -> dict[str, Any]:
    """Return a dead letter for a list."""
    letter = parked.letter
    return {
        "id": parked.id,
        "parked": _time(parked.at),
        "origin": parked.origin,
        "reason": parked.reason,
        "subject": None if letter is None else letter.subject,
        "attempts": None if letter is None else letter.attempts,
        "problem": parked.problem,
        "bytes": len(parked.data),
    }


def dead_letter_details(parked: ParkedMessage) -> dict[str, Any]:
    """Return a dead letter with its original message, headers and recorded attempts."""
    letter = parked.letter
    if letter is None:
        return {**dead_letter_summary(parked), "headers": _headers(parked.headers), **payload(parked.data)}
    return {
        **dead_letter_summary(parked),
        "headers": _headers(letter.headers),
        "sequence": letter.position,
        "failed_first": _time(letter.failed_first),
        "failed_last": _time(letter.failed_last),
        "attempts_log": [_attempt(each) for each in attempts_of(parked)],
        "details": {name: value for name, value in letter.details.items() if name != ATTEMPTS_LOG},
        **payload(parked.data),
    }


def replay_status(state: PrefillState) -> str:
    """Return how far a replay is: running, done or failed. A replay that failed does not hold back live events."""
    return "failed" if state.status is PrefillStatus.DONE and state.reason else state.status.value


def replay_json(state: PrefillState | None) -> dict[str, Any] | None:
    """Return the replay that runs, or ran last; None if there was none."""
    if state is None:
        return None
    return {
        "job": state.job,
        "status": replay_status(state),
        "written": state.written,
        "total": state.total,
        "reason": state.reason,
    }


def report_json(report: Report) -> dict[str, Any]:
    """Return the result of a retry or discard."""
    return {
        "chosen": report.chosen,
        "done": report.done,
        "gone": report.gone,
        "targets": report.targets,
        "failed": [{"id": each.id, "detail": each.message, "fix": each.fix} for each in report.failed],
    }


def payload(data: bytes) -> dict[str, str]:
    """Return a body as the field `data` if it is text, else as `data_base64`."""
    try:
        return {"data": data.decode()}
    except UnicodeDecodeError:
        return {"data_base64": base64.b64encode(data).decode()}


def _attempt(attempt: Attempt) -> dict[str, Any]:
    return {
        "time": _time(attempt.time),
        "status": attempt.status,
        "error": attempt.error,
        "excerpt": attempt.excerpt,
    }


def _headers(headers: Headers) -> dict[str, list[str]]:
    return {name: [_readable(value) for value in values] for name, values in headers.items()}


def _readable(text: str) -> str:
    """Replace bytes that are not UTF-8: JSON cannot hold them."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _time(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()


def schema_json(schema: Schema) -> Json:
    """Return a schema with the revision in force."""
    return {
        **schema.metadata_json(),
        "revision": schema.newest.number,
        "revisions": [each.number for each in schema.revisions],
        "revision_created": schema.newest.created.isoformat(),
        "definition": schema.newest.definition,
    }


def visible_part(schema: Schema, realms: Collection[str] | None) -> Schema | None:
    """Return the part of a schema that a login with these realms may see; None if there is none.

    `realms` None: the login sees all realms.
    """
    if realms is None:
        return schema
    own = tuple(each for each in schema.realms_topics if each.realm in realms)
    return dataclasses.replace(schema, realms_topics=own) if own else None


def check_object(schema: Schema, given: object) -> list[str]:
    """Return the problems of an object, as if it were published now. A text is Avro binary in base64."""
    topic = schema.realms_topics[0]
    about = {"publisher_name": "check", "ts": "2026-01-01T00:00:00Z", "realm": topic.realm, "topic": topic.topic}
    validator = SchemaValidator(schema)
    try:
        validator.check(Event.from_json(validator.decode({**about, "body": {"new": given}})))
    except SchemaMismatch as error:
        return [f"{where.removeprefix('body.new').removeprefix('.') or 'it'}: {what}" for where, what in error.mistakes]
    return []


@dataclass(frozen=True, slots=True)
class KnownTopicView:
    """A topic with its schema and its subscriptions."""

    topic: Topic
    schema: Schema | None
    subscriptions: tuple[str, ...]

    def to_json(self) -> Json:
        """Return the topic as JSON."""
        schema = self.schema
        return {
            **self.topic.to_json(),
            "schema": None if schema is None else {"name": schema.name, "revision": schema.newest.number},
            "subscriptions": list(self.subscriptions),
        }


async def list_known_topics(
    schemas: SchemaRegistry, subscriptions: Subscriptions, realms: Collection[str] | None = None
) -> list[KnownTopicView]:
    """Return all topics, or those of some realms, sorted by realm and name."""
    declared, snapshot = await schemas.list(), await subscriptions.list()
    found = (each for each in declared.topics.values() if realms is None or each.realm in realms)
    topics = sorted(found, key=lambda each: (each.realm, each.topic))
    return await asyncio.to_thread(lambda: [_to_view(topic, declared, snapshot) for topic in topics])


async def find_topic(schemas: SchemaRegistry, subscriptions: Subscriptions, realm: str, topic: str) -> KnownTopicView:
    """Return one topic. Raise `UnknownTopic` if it was neither declared nor seen."""
    declared = await schemas.list()
    found = declared.topics.get(topic_key(realm, topic))
    if found is None:
        raise unknown_topic(realm, topic)
    return await asyncio.to_thread(_to_view, found, declared, await subscriptions.list())


def unknown_topic(realm: str, topic: str) -> UnknownTopic:
    """Return the error for a topic that was neither declared nor seen, or that the login may not see."""
    return UnknownTopic(f"no topic {realm}:{topic}", fix="`purveyor topic list` lists them")


def _to_view(topic: Topic, declared: RegistryContents, snapshot: Snapshot) -> KnownTopicView:
    asking = tuple(
        name
        for name, found in snapshot.subscriptions.items()
        if found.record.state is not RecordState.DELETING
        and any(wanted.matches(topic.realm, topic.topic) for wanted in found.record.definition.realms_topics)
    )
    return KnownTopicView(topic, find_governing_schema(declared.schemas.values(), topic.realm, topic.topic), asking)


class _Object(msgspec.Struct):
    """Any JSON object: msgspec checks its syntax and keeps no field."""


_check_object: Final = msgspec.json.Decoder(_Object).decode


def message_json(message: DeliveredMessage, more: Json) -> bytes:
    """Return a message with the fields that the delivery adds. A body that is no JSON object is sent in base64."""
    added = b'"sequence_number":%d,"num_delivered":%d}' % (message.sequence, message.num_delivered)
    if more:
        added = json_fields.dump(more)[1:-1] + b"," + added
    body = message.data.strip()
    if not _is_object(body):
        body = json_fields.dump({"raw": base64.b64encode(message.data).decode()})
    inner = body[1:-1].strip()
    return b"{" + inner + (b"," if inner else b"") + added


def _is_object(body: bytes) -> bool:
    """Return whether a body is a JSON object that clients can parse: one broken body would spoil an answer of many."""
    try:
        if not body.isascii():
            body.decode()
        _check_object(body)
    except (ValueError, RecursionError):
        try:  # this parser accepts lone surrogates, which msgspec refuses
            return isinstance(json_fields.load(body.decode()), dict)
        except (ValueError, RecursionError):
            return False
    return len(body) < _MAX_NUMBER_DIGITS or _HUGE_NUMBER.search(body) is None


def lease_fields(message: DeliveredMessage) -> Json:
    """Return the fields of a lease that a delivered message has beside those of its event."""
    assert message.until is not None
    identity = first(message.headers, EVENT_ID)
    return {
        "position": message.position,
        "event_id": identity if identity and identity.isprintable() else None,
        "lease_id": message.lease,
        "lease_until": message.until.isoformat(),
    }


def status_json(found: SubscriptionStatus, now: datetime) -> Json:
    """Return the status of a subscription: the answer of `GET .../status`, and part of `subscription show --json`."""
    record, suspended, prefill = found.registered.record, found.registered.suspended, found.registered.own_prefill
    age = None if found.oldest is None else max((now - found.oldest).total_seconds(), 0.0)
    last = found.last_error
    return {
        "name": found.registered.name,
        "state": record.state.value,
        "paused": record.paused,
        "pause_reason": record.pause_reason,
        "begin": record.begin,
        "position": found.position,
        "acknowledged": found.acknowledged,
        "dispatched_up_to": found.dispatched_up_to,
        "lag": found.lag,
        "backlog": found.backlog,
        "backlog_by_kind": None
        if found.main is None
        else {"main": found.main, "prefill": found.prefill, "retry": found.retry},
        "oldest_stored": _time(found.oldest),
        "oldest_age_seconds": None if age is None else round(age, 3),
        "leased": found.leased,
        "leases": [
            {"instance": each.instance, "messages": each.messages, "until": each.until.isoformat()}
            for each in found.holders[:MOST_HOLDERS]
        ],
        "delayed": found.delayed,
        "next_attempt": _time(found.next_attempt),
        "dead_letters": found.dead_letters,
        "last_error": None
        if last is None
        else {"part": last.part, "reason": last.reason, "at": _time(last.at), "sequence": last.sequence},
        "suspended": None if suspended is None else suspended.to_json(),
        "prefill": None if prefill is None else prefill.to_json(),
        "replay": replay_json(found.registered.replay),
        "push_trouble": None if found.push_problem is None else found.push_problem.to_json(),
        "expired": expired_json(found.expired),
        "unreadable": found.unreadable,
    }


def expired_json(expired: Expired) -> Json | None:
    """Return the expired messages of a subscription; None if there are none."""
    if not expired.count:
        return None
    last = datetime.fromtimestamp(expired.at / 1000, UTC)
    return {"count": expired.count, "position": expired.position or None, "last": last.isoformat()}

"""JSON views of dead letters, schemas and topics that the command line and the HTTP API share.

`check_object` checks an object against a schema. Matching patterns against topics runs in a thread: each match is
bounded (`model.subscription_limits`), but may be one of many.
"""

import asyncio
import base64
import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from purveyor.delivery.dead_letters.park import ATTEMPTS_LOG, Attempt, attempts_of
from purveyor.delivery.dead_letters.service import Report
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.headers import Headers
from purveyor.model.errors import SchemaMismatch, UnknownTopic
from purveyor.model.event import Event
from purveyor.model.json_fields import Json
from purveyor.model.registration import RecordState
from purveyor.queues.dead_letters.store import ParkedMessage
from purveyor.queues.registry import Snapshot
from purveyor.sources.schemas.event_validator import SchemaValidator
from purveyor.sources.schemas.registry import RegistryContents, SchemaRegistry
from purveyor.sources.schemas.schema import Schema, Topic, find_governing_schema, topic_key


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

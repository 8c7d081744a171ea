"""What events must be like, as of one moment: all schemas and topics together, and the check of one event. Pure.

An event fits when the newest revision of the schema of its topic can read it: its new object fits that revision, or, in
Avro, an earlier one whose data the newest can read by the rules of resolution. `old` is not checked, because it was
accepted in its day; a deletion has nothing else. An event may tell the revision that it was written by, in the
attribute `schema-revision`; binary forms of an earlier revision must, because bytes do not tell.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from purveyor.model import json_fields
from purveyor.model.errors import (
    InvalidInput,
    PurveyorError,
    SchemaMismatch,
    Unavailable,
    UnknownSchema,
    UnreadableRecord,
)
from purveyor.model.event import Event
from purveyor.model.event_limits import check_place, encode_checked
from purveyor.model.json_fields import Json
from purveyor.model.stored_record import UPGRADE
from purveyor.model.subscription import RealmTopic, read_topics
from purveyor.sources.schemas.schema import (
    SCHEMA,
    TOPIC,
    Encoding,
    Revision,
    Schema,
    SchemaType,
    Topic,
    governing,
    topic_key,
)
from purveyor.sources.schemas.validators import (
    Mistake,
    Validator,
    compiled,
    from_base64,
    unreadable,
)

REVISION: Final = "schema-revision"
"""The attribute by which an event tells the revision that it was written by."""
_MOST_KNOWN: Final = 10_000
_log = logging.getLogger(__name__)


class Governor:
    """One schema, ready to check events. Revisions are made ready when they are needed first."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self._ready: dict[int, Validator] = {}
        self._readable: dict[int, bool] = {}

    def decoded(self, fields: Json) -> Json:
        """The fields of an event with its objects in place of their binary forms."""
        body = fields.get("body")
        if self.schema.encoding is not Encoding.BINARY or not isinstance(body, dict):
            return fields
        sides = {side: value for side, value in body.items() if side in ("old", "new")}
        attributes = fields.get("attributes")
        revision = self._written_by(attributes if isinstance(attributes, dict) else {}) or self.schema.newest
        for side, value in sides.items():
            if isinstance(value, str):
                try:
                    sides[side] = self._validator(revision).decode(from_base64(value))
                except InvalidInput as error:
                    raise self._mismatch([((side,), error.message)], revision, error.fix) from None
            elif side == "new" and value:
                raise self._mismatch([((side,), "is not in binary form")], revision, "send it in base64")
        return {**fields, "body": {**body, **sides}}

    def check(self, event: Event) -> None:
        """`SchemaMismatch` if it does not fit."""
        if not event.new or self.schema.encoding is Encoding.BINARY:
            return  # what came in binary form fits, or could not have been decoded
        told = self._written_by(event.attributes)
        given = dict(event.new)
        mistakes = self._mistakes(told or self.schema.newest, given)
        if not mistakes:
            return
        if told is None and self.schema.type is SchemaType.AVRO:
            earlier = reversed(self.schema.revisions[:-1])
            if any(self._can_be_read(each) and not self._mistakes(each, given) for each in earlier):
                return
        raise self._mismatch([(("new", *where), what) for where, what in mistakes], told or self.schema.newest)

    def _mistakes(self, revision: Revision, given: Json) -> list[Mistake]:
        try:
            return self._validator(revision).mistakes(given)
        except RecursionError:
            return [((), "it is nested too deeply")]

    def _validator(self, revision: Revision) -> Validator:
        found = self._ready.get(revision.number)
        if found is None:
            try:
                found = compiled(self.schema.type, self.schema.encoding, revision.definition)
            except PurveyorError as error:  # it was checked when it was added: by another version, perhaps
                raise Unavailable(
                    f"revision {revision.number} of schema {self.schema.name!r} cannot be used: {error.message}",
                    fix="commit another revision, or delete the schema",
                ) from error
            self._ready[revision.number] = found
        return found

    def _written_by(self, attributes: Mapping[str, Any]) -> Revision | None:
        """The revision that an event says it was written by; None if it says nothing."""
        text = attributes.get(REVISION)
        if text is None:
            return None
        newest = self.schema.newest
        try:
            told = self.schema.revision(int(text))
        except (ValueError, TypeError, UnknownSchema):
            raise self._unusable(f"there is no revision {text!r}") from None
        if told is not newest and not self._can_be_read(told):
            raise self._unusable(f"revision {newest.number}, which is in force, cannot read objects of {told.number}")
        return told

    def _can_be_read(self, revision: Revision) -> bool:
        """Whether the newest revision reads all objects of an earlier one."""
        found = self._readable.get(revision.number)
        if found is None:
            reader, writer = self.schema.newest.definition, revision.definition
            found = not unreadable(self.schema.type, reader=reader, writer=writer)
            self._readable[revision.number] = found
        return found

    def _unusable(self, what: str) -> SchemaMismatch:
        where = f"attributes.{REVISION}"
        return SchemaMismatch(
            f"{where}: {what} (schema {self.schema.name!r})",
            fix="leave the attribute out, or name a revision that can be read",
            mistakes=((where, what),),
        )

    def _mismatch(self, mistakes: list[Mistake], revision: Revision, fix: str | None = None) -> SchemaMismatch:
        told = tuple((".".join(("body", *where)), what) for where, what in mistakes)
        more = f", and {len(told) - 1} more" if len(told) > 1 else ""
        return SchemaMismatch(
            f"{told[0][0]}: {told[0][1]}{more} (schema {self.schema.name!r}, revision {revision.number})",
            fix=fix or f"send what fits it: `purveyor schema show {self.schema.name}`, GET /v1/schemas",
            mistakes=told,
        )


@dataclass(frozen=True, slots=True)
class Unread:
    """A schema or a topic in the registry that this program does not understand: no event of it is accepted."""

    key: str
    reason: str
    realms_topics: tuple[RealmTopic, ...] = ()
    """Of a schema, the topics that it governs."""

    def covers(self, realm: str, topic: str) -> bool:
        """Whether it is about a topic."""
        return self.key == topic_key(realm, topic) or any(each.matches(realm, topic) for each in self.realms_topics)


class Rules:
    """All that was declared, as of one moment. May be asked by several threads."""

    def __init__(
        self, governors: Mapping[str, Governor], topics: Mapping[str, Topic], unread: Sequence[Unread] = ()
    ) -> None:
        self._unread = unread
        self._governors = governors
        self._topics = topics
        self._strict = frozenset(each.realm for each in topics.values() if each.declared and each.strict)
        self._declared = frozenset((each.realm, each.topic) for each in topics.values() if each.declared)
        self._known: dict[tuple[str, str], Governor | None] = {}
        self._empty = not governors and not self._strict and not unread

    @property
    def schemas(self) -> list[Schema]:
        """All schemas."""
        return [each.schema for each in self._governors.values()]

    def read(self, fields: Json) -> tuple[Event, bytes]:
        """The event that fields are, and the body of its message.

        InvalidInput if they are no event or one beyond its limits, SchemaMismatch if it is not one of its topic,
        UnreadableRecord if what its topic demands is not understood.
        """
        realm, topic = fields.get("realm"), fields.get("topic")
        governor = None
        if not self._empty and isinstance(realm, str) and isinstance(topic, str):
            check_place(realm, topic)  # before expressions are run on them
            self._check_understood(realm, topic)
            governor = self._governor(realm, topic)
        event = Event.from_json(fields if governor is None else governor.decoded(fields))
        data = encode_checked(event)
        if realm in self._strict and (realm, topic) not in self._declared:
            what = f"{topic!r} is not declared, and the realm {realm!r} takes declared topics only"
            raise SchemaMismatch(f"topic: {what}", fix="declare it: `purveyor topic add`", mistakes=(("topic", what),))
        if governor is not None:
            governor.check(event)
        return event, data

    def _check_understood(self, realm: str, topic: str) -> None:
        for each in self._unread:
            if each.covers(realm, topic):
                raise UnreadableRecord(
                    f"events of {realm}:{topic} are not accepted, because what they must be like is not understood "
                    f"({each.key}): {each.reason}",
                    fix=UPGRADE,
                )

    def _governor(self, realm: str, topic: str) -> Governor | None:
        place = (realm, topic)
        try:
            return self._known[place]
        except KeyError:
            found = governing(self.schemas, realm, topic)
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            return self._known.setdefault(place, None if found is None else self._governors[found.name])


class Gathering:
    """Rules as they are built from the entries of the registry, one after the other. A later one counts."""

    def __init__(self) -> None:
        self.revisions: dict[str, int] = {}
        self.governors: dict[str, Governor] = {}
        self.topics: dict[str, Topic] = {}
        self.unread: dict[str, Unread] = {}

    def take(self, key: str, revision: int, value: bytes | None) -> bool:
        """One entry, None for a deletion; whether it was news. What is not understood stops the topics it is about."""
        if self.revisions.get(key, 0) >= revision:
            return False
        self.revisions[key] = revision
        kind, _, name = key.partition(".")
        self.topics.pop(key, None)
        self.unread.pop(key, None)
        self.governors.pop(name, None) if kind == "schema" else None
        if value is None:
            return True
        try:
            if kind == "schema":
                self.governors[name] = Governor(SCHEMA.read(value, Schema.from_json))
            elif kind == "topic":
                self.topics[key] = TOPIC.read(value, Topic.from_json)
        except UnreadableRecord as error:
            _log.error("events that %s in the registry of topics is about are not accepted: %s", key, error)
            self.unread[key] = Unread(key, error.message, _topics_in(value))
        return True

    def rules(self) -> Rules:
        """As of now."""
        return Rules(dict(self.governors), dict(self.topics), tuple(self.unread.values()))


def _topics_in(schema: bytes) -> tuple[RealmTopic, ...]:
    """The topics that a schema governs, whatever else it says; none if even that cannot be read."""
    try:
        return read_topics(json_fields.parse(schema, SCHEMA.what), "realms_topics")
    except InvalidInput:
        return ()

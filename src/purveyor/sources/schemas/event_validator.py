"""The validation of events against all schemas and topics of one moment. Pure.

An event is valid when the newest revision of the schema of its topic can read it: its new object fits that revision,
or, in Avro, an earlier one whose data the newest can read by the rules of resolution. `old` is not checked, because it
was accepted earlier; a deletion has nothing else. An event may name the revision that it was written with, in the
attribute `schema-revision`; a binary form of an earlier revision must, because its bytes do not show the revision.
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
from purveyor.model.event import Event, check_realm_topic, encode_checked
from purveyor.model.json_fields import UPGRADE, Json
from purveyor.model.subscription import RealmTopic, read_topics
from purveyor.sources.schemas.schema import (
    SCHEMA,
    TOPIC,
    Encoding,
    Revision,
    Schema,
    SchemaType,
    Topic,
    find_governing_schema,
    topic_key,
)
from purveyor.sources.schemas.validators import (
    Mistake,
    Validator,
    compile_schema,
    decode_base64,
    find_unreadable,
)

REVISION_ATTRIBUTE: Final = "schema-revision"
"""The attribute with the revision that an event was written with."""
_MAX_CACHED_TOPICS: Final = 10_000
_log = logging.getLogger(__name__)


class SchemaValidator:
    """Validates events against one schema. It compiles a revision at its first use."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self._validators: dict[int, Validator] = {}
        self._readable: dict[int, bool] = {}

    @property
    def is_binary(self) -> bool:
        """Whether events hold their objects in a binary form, which `decode` replaces."""
        return self.schema.encoding is Encoding.BINARY

    def decode(self, fields: Json) -> Json:
        """Return the fields of an event with its objects in place of their binary forms."""
        body = fields.get("body")
        if not self.is_binary or not isinstance(body, dict):
            return fields
        sides = {side: value for side, value in body.items() if side in ("old", "new")}
        attributes = fields.get("attributes")
        revision = self._named_revision(attributes if isinstance(attributes, dict) else {}) or self.schema.newest
        for side, value in sides.items():
            if isinstance(value, str):
                try:
                    sides[side] = self._validator(revision).decode(decode_base64(value))
                except InvalidInput as error:
                    raise self._mismatch([((side,), error.message)], revision, error.fix) from None
            elif side == "new" and value:
                raise self._mismatch([((side,), "is not in binary form")], revision, "send it in base64")
        return {**fields, "body": {**body, **sides}}

    def check(self, event: Event) -> None:
        """Raise SchemaMismatch if an event does not fit."""
        if not event.new or self.is_binary:
            return  # a binary form that could be decoded fits
        named = self._named_revision(event.attributes)
        given = dict(event.new)
        mistakes = self._find_mistakes(named or self.schema.newest, given)
        if not mistakes:
            return
        if named is None and self.schema.type is SchemaType.AVRO:
            earlier = reversed(self.schema.revisions[:-1])
            if any(self._is_readable(each) and not self._find_mistakes(each, given) for each in earlier):
                return
        raise self._mismatch([(("new", *where), what) for where, what in mistakes], named or self.schema.newest)

    def _find_mistakes(self, revision: Revision, given: Json) -> list[Mistake]:
        try:
            return self._validator(revision).find_mistakes(given)
        except RecursionError:
            return [((), "it is nested too deeply")]

    def _validator(self, revision: Revision) -> Validator:
        found = self._validators.get(revision.number)
        if found is None:
            try:
                found = compile_schema(self.schema.type, self.schema.encoding, revision.definition)
            except PurveyorError as error:  # the registry checked it, but perhaps another version of it
                raise Unavailable(
                    f"revision {revision.number} of schema {self.schema.name!r} cannot be used: {error.message}",
                    fix="commit another revision, or delete the schema",
                ) from error
            self._validators[revision.number] = found
        return found

    def _named_revision(self, attributes: Mapping[str, Any]) -> Revision | None:
        """Return the revision that an event names; None if it names none."""
        text = attributes.get(REVISION_ATTRIBUTE)
        if text is None:
            return None
        newest = self.schema.newest
        try:
            named = self.schema.revision(int(text))
        except (ValueError, TypeError, UnknownSchema):
            raise self._invalid_revision(f"there is no revision {text!r}") from None
        if named is not newest and not self._is_readable(named):
            raise self._invalid_revision(
                f"revision {newest.number}, which is in force, cannot read objects of {named.number}"
            )
        return named

    def _is_readable(self, revision: Revision) -> bool:
        """Whether the newest revision can read all objects of an earlier one."""
        found = self._readable.get(revision.number)
        if found is None:
            reader, writer = self.schema.newest.definition, revision.definition
            found = not find_unreadable(self.schema.type, reader=reader, writer=writer)
            self._readable[revision.number] = found
        return found

    def _invalid_revision(self, what: str) -> SchemaMismatch:
        where = f"attributes.{REVISION_ATTRIBUTE}"
        return SchemaMismatch(
            f"{where}: {what} (schema {self.schema.name!r})",
            fix="leave the attribute out, or name a revision that can be read",
            mistakes=((where, what),),
        )

    def _mismatch(self, mistakes: list[Mistake], revision: Revision, fix: str | None = None) -> SchemaMismatch:
        described = tuple((".".join(("body", *where)), what) for where, what in mistakes)
        more = f", and {len(described) - 1} more" if len(described) > 1 else ""
        return SchemaMismatch(
            f"{described[0][0]}: {described[0][1]}{more} (schema {self.schema.name!r}, revision {revision.number})",
            fix=fix or f"send an object that fits it: `purveyor schema show {self.schema.name}`, GET /v1/schemas",
            mistakes=described,
        )


@dataclass(frozen=True, slots=True)
class UnreadableEntry:
    """A schema or a topic in the registry that this version cannot read: the process accepts no event of it."""

    key: str
    reason: str
    realms_topics: tuple[RealmTopic, ...] = ()
    """The topics of a schema."""

    def covers(self, realm: str, topic: str) -> bool:
        """Whether the entry is about a topic."""
        return self.key == topic_key(realm, topic) or any(each.matches(realm, topic) for each in self.realms_topics)


class EventValidator:
    """The validator of all topics, as of one moment. Several threads may use it."""

    def __init__(
        self,
        validators: Mapping[str, SchemaValidator],
        topics: Mapping[str, Topic],
        unreadable: Sequence[UnreadableEntry] = (),
    ) -> None:
        self._unreadable = unreadable
        self._validators = validators
        self._topics = topics
        self._strict = frozenset(each.realm for each in topics.values() if each.declared and each.strict)
        self._declared = frozenset((each.realm, each.topic) for each in topics.values() if each.declared)
        self._by_topic: dict[tuple[str, str], SchemaValidator | None] = {}
        self._empty = not validators and not self._strict and not unreadable

    @property
    def schemas(self) -> list[Schema]:
        """All schemas."""
        return [each.schema for each in self._validators.values()]

    def read(self, fields: Json) -> tuple[Event, bytes]:
        """Return the event in these fields, and the body of its message.

        Raises InvalidInput if they are no event or exceed its limits, SchemaMismatch if it does not fit its schema,
        UnreadableRecord if this version cannot read the schema of its topic.
        """
        realm, topic = fields.get("realm"), fields.get("topic")
        validator = None
        if not self._empty and isinstance(realm, str) and isinstance(topic, str):
            check_realm_topic(realm, topic)  # before regular expressions run on them
            validator = self.find(realm, topic)
        event = Event.from_json(fields if validator is None else validator.decode(fields))
        data = encode_checked(event)
        self.check(event, validator)
        return event, data

    def find(self, realm: str, topic: str) -> SchemaValidator | None:
        """Return the validator of a topic that is within its limits; None if it has no schema.

        Raises UnreadableRecord if this version cannot read the schema.
        """
        if self._empty:
            return None
        self._require_readable(realm, topic)
        return self._find_validator(realm, topic)

    def check(self, event: Event, validator: SchemaValidator | None) -> None:
        """Raise SchemaMismatch if a decoded event does not fit the validator of its topic, or must not have its topic.

        It is the last step of `read`, for a caller that decoded the event itself.
        """
        realm, topic = event.realm, event.topic
        if realm in self._strict and (realm, topic) not in self._declared:
            what = f"{topic!r} is not declared, and the realm {realm!r} takes declared topics only"
            raise SchemaMismatch(f"topic: {what}", fix="declare it: `purveyor topic add`", mistakes=(("topic", what),))
        if validator is not None:
            validator.check(event)

    def _require_readable(self, realm: str, topic: str) -> None:
        for each in self._unreadable:
            if each.covers(realm, topic):
                raise UnreadableRecord(
                    f"events of {realm}:{topic} are not accepted, because this version cannot read their schema "
                    f"({each.key}): {each.reason}",
                    fix=UPGRADE,
                )

    def _find_validator(self, realm: str, topic: str) -> SchemaValidator | None:
        key = (realm, topic)
        try:
            return self._by_topic[key]
        except KeyError:
            found = find_governing_schema(self.schemas, realm, topic)
            if len(self._by_topic) >= _MAX_CACHED_TOPICS:
                self._by_topic.clear()
            return self._by_topic.setdefault(key, None if found is None else self._validators[found.name])


class ValidatorBuilder:
    """Builds an `EventValidator` from the entries of the registry; a later revision of an entry replaces an earlier."""

    def __init__(self) -> None:
        self.revisions: dict[str, int] = {}
        self.validators: dict[str, SchemaValidator] = {}
        self.topics: dict[str, Topic] = {}
        self.unreadable: dict[str, UnreadableEntry] = {}

    def apply(self, key: str, revision: int, value: bytes | None) -> bool:
        """Apply one entry, None for a deletion; return whether it was new. An unreadable entry blocks its topics."""
        if self.revisions.get(key, 0) >= revision:
            return False
        self.revisions[key] = revision
        kind, _, name = key.partition(".")
        self.topics.pop(key, None)
        self.unreadable.pop(key, None)
        self.validators.pop(name, None) if kind == "schema" else None
        if value is None:
            return True
        try:
            if kind == "schema":
                self.validators[name] = SchemaValidator(SCHEMA.read(value, Schema.from_json))
            elif kind == "topic":
                self.topics[key] = TOPIC.read(value, Topic.from_json)
        except UnreadableRecord as error:
            _log.error("the process accepts no events of %s in the registry of topics: %s", key, error)
            self.unreadable[key] = UnreadableEntry(key, error.message, _read_topics(value))
        return True

    def build(self) -> EventValidator:
        """Return the validator of the current entries."""
        return EventValidator(dict(self.validators), dict(self.topics), tuple(self.unreadable.values()))


def _read_topics(schema: bytes) -> tuple[RealmTopic, ...]:
    """Return the topics of a schema that is otherwise unreadable; none if they are unreadable as well."""
    try:
        return read_topics(json_fields.parse(schema, SCHEMA.what), "realms_topics")
    except InvalidInput:
        return ()

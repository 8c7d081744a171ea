"""Schemas with their revisions, and declared topics. Pure.

A schema governs the topics that it names, exact or by expression. `event_validator` checks events against its newest
revision. A revision never changes: a commit adds one, a rollback adds a copy of an earlier one, so that the numbers
show the history. `json_compatibility` and `avro_schema` decide whether a revision may follow another.
"""

import dataclasses
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Final

from purveyor.model import json_fields
from purveyor.model.errors import InvalidConfig, InvalidInput, InvalidName, UnknownSchema
from purveyor.model.event import check_realm_or_topic
from purveyor.model.json_fields import Json, Kind
from purveyor.model.name_rules import is_exact
from purveyor.model.subscription import RealmTopic, read_topics

SCHEMA: Final = Kind("schema", ("name", "type", "encoding", "compatibility", "realms_topics", "revisions"))
"""In every version `realms_topics` keeps its meaning: a program that cannot read the rest refuses events of these
topics."""
TOPIC: Final = Kind("topic", ("realm", "topic", "since", "declared", "strict", "description"))
MAX_REVISIONS: Final = 100
MAX_DEFINITION_BYTES: Final = 128 << 10
MAX_SCHEMA_BYTES: Final = 512 << 10
"""Of all revisions together: they are one value in the registry, below the limit of every server."""
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAX_DESCRIPTION_CHARACTERS: Final = 1000


class SchemaType(Enum):
    """The language of a schema."""

    JSON_SCHEMA = "json-schema"
    AVRO = "avro"


class Encoding(Enum):
    """How publishers write the objects: as JSON, or as Avro's binary form in base64."""

    JSON = "json"
    BINARY = "binary"


class Compatibility(Enum):
    """What a new revision must keep, compared with the one before it."""

    NONE = "none"
    BACKWARD = "backward"
    """The new revision reads objects of the last one."""
    FORWARD = "forward"
    """The last revision reads objects of the new one."""
    FULL = "full"
    """Both."""

    @property
    def backward(self) -> bool:
        """Whether the new revision must read old objects."""
        return self in (Compatibility.BACKWARD, Compatibility.FULL)

    @property
    def forward(self) -> bool:
        """Whether the old revision must read new objects."""
        return self in (Compatibility.FORWARD, Compatibility.FULL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """One committed definition of a schema."""

    number: int
    definition: Json
    created: datetime
    copy_of: int | None = None
    """The revision that this one is a copy of, after a rollback."""

    def to_json(self) -> Json:
        """Return the revision as stored and shown."""
        copied = {} if self.copy_of is None else {"copy_of": self.copy_of}
        return {"number": self.number, "created": self.created.isoformat(), **copied, "definition": self.definition}

    @classmethod
    def from_json(cls, data: object) -> "Revision":
        """Read and check the stored fields."""
        fields = json_fields.mapping(data, "revision")
        json_fields.reject_unknown(fields, ("number", "created", "copy_of", "definition"), "revision")
        return cls(
            number=json_fields.whole(fields, "number", "revision"),
            definition=json_fields.mapping(fields.get("definition"), "definition of the revision"),
            created=json_fields.moment(fields, "created", "revision"),
            copy_of=None if fields.get("copy_of") is None else json_fields.whole(fields, "copy_of", "revision"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """A schema with its revisions, oldest first; the newest is in force."""

    name: str
    type: SchemaType
    realms_topics: tuple[RealmTopic, ...]
    revisions: tuple[Revision, ...]
    encoding: Encoding = Encoding.JSON
    compatibility: Compatibility = Compatibility.BACKWARD

    def __post_init__(self) -> None:
        check_schema_name(self.name)
        if not self.realms_topics:
            raise InvalidInput(f"schema {self.name!r} is for no topic", fix="name at least one realm and topic")
        if self.encoding is Encoding.BINARY and self.type is not SchemaType.AVRO:
            raise InvalidConfig(f"schema {self.name!r}: only Avro has a binary form", fix="choose the encoding json")
        if not self.revisions:
            raise InvalidInput(f"schema {self.name!r} has no revision", fix="give a definition")

    @property
    def newest(self) -> Revision:
        """The revision in force."""
        return self.revisions[-1]

    def revision(self, number: int) -> Revision:
        """Return a revision; raise UnknownSchema if there is none of that number."""
        found = next((each for each in self.revisions if each.number == number), None)
        if found is None:
            known = ", ".join(str(each.number) for each in self.revisions)
            raise UnknownSchema(f"schema {self.name!r} has no revision {number}", fix=f"it has {known}")
        return found

    def with_revision(self, definition: Json, now: datetime, *, copy_of: int | None = None) -> "Schema":
        """Return the schema with one more revision; raise InvalidInput if that is too large."""
        revision = Revision(
            number=self.newest.number + 1, definition=check_definition(definition), created=now, copy_of=copy_of
        )
        return check_size(dataclasses.replace(self, revisions=(*self.revisions, revision)))

    def with_rollback(self, number: int, now: datetime) -> "Schema":
        """Return the schema with a copy of an earlier revision as the newest."""
        return self.with_revision(self.revision(number).definition, now, copy_of=number)

    def without_revision(self, number: int) -> "Schema":
        """Return the schema without a revision that is not in force; its number is not used again."""
        if self.revision(number) is self.newest:
            raise InvalidInput(
                f"revision {number} of schema {self.name!r} is in force",
                fix="roll back to another one first, or delete the schema",
            )
        return dataclasses.replace(self, revisions=tuple(each for each in self.revisions if each.number != number))

    def matching_topic(self, realm: str, topic: str) -> RealmTopic | None:
        """Return the declared topic that matches: the exact one, else the longest expression; None if none matches.

        `precedence` decides between several schemas.
        """
        found = [each for each in self.realms_topics if each.matches(realm, topic)]
        return min(found, key=precedence, default=None)

    def to_json(self) -> Json:
        """Return the fields as stored."""
        return {**self.metadata_json(), "revisions": [each.to_json() for each in self.revisions]}

    def metadata_json(self) -> Json:
        """Return all fields but the revisions."""
        return {
            "name": self.name,
            "type": self.type.value,
            "encoding": self.encoding.value,
            "compatibility": self.compatibility.value,
            "realms_topics": [each.to_json() for each in self.realms_topics],
        }

    @classmethod
    def from_json(cls, data: object) -> "Schema":
        """Read and check the stored fields."""
        fields = SCHEMA.check(data)
        revisions = fields.get("revisions")
        if not isinstance(revisions, list):
            raise InvalidInput(
                f"the schema has {json_fields.describe_type(revisions)} as 'revisions'", fix="give a list of them"
            )
        return cls(
            name=json_fields.text(fields, "name", "schema"),
            type=json_fields.member(SchemaType, fields, "type", "schema"),
            encoding=json_fields.member(Encoding, fields, "encoding", "schema"),
            compatibility=json_fields.member(Compatibility, fields, "compatibility", "schema"),
            realms_topics=read_topics(fields, "realms_topics"),
            revisions=tuple(map(Revision.from_json, revisions)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """A topic that a user declared, or that an event was accepted for."""

    realm: str
    topic: str
    since: datetime
    declared: bool = False
    strict: bool = False
    """Whether its realm accepts events of declared topics only."""
    description: str = ""

    def __post_init__(self) -> None:
        check_realm_or_topic(self.realm, "realm")
        check_realm_or_topic(self.topic, "topic")
        if len(self.description) > _MAX_DESCRIPTION_CHARACTERS:
            raise InvalidInput(f"the description of {self.label} is too long", fix="use up to 1000 characters")

    @property
    def label(self) -> str:
        """Realm and topic in one text."""
        return f"{self.realm}:{self.topic}"

    @property
    def key(self) -> str:
        """The key in the registry: a hash, because a key cannot hold every character of a topic."""
        return topic_key(self.realm, self.topic)

    def to_json(self) -> Json:
        """Return the fields as stored."""
        return {
            "realm": self.realm,
            "topic": self.topic,
            "since": self.since.isoformat(),
            "declared": self.declared,
            "strict": self.strict,
            "description": self.description,
        }

    @classmethod
    def from_json(cls, data: object) -> "Topic":
        """Read and check the stored fields."""
        fields = TOPIC.check(data)
        return cls(
            realm=json_fields.text(fields, "realm", "topic"),
            topic=json_fields.text(fields, "topic", "topic"),
            since=json_fields.moment(fields, "since", "topic"),
            declared=json_fields.flag(fields, "declared", "topic"),
            strict=json_fields.flag(fields, "strict", "topic"),
            description=str(fields.get("description") or ""),
        )


def precedence(topic: RealmTopic) -> tuple[bool, int, str]:
    """Return the sort key of a topic: an exact one comes first, then the longest expression.

    >>> sorted([RealmTopic("r", ".*"), RealmTopic("r", "a"), RealmTopic("r", "a.*")], key=precedence)[0].topic
    'a'
    """
    return not is_exact(topic.topic), -len(topic.topic), topic.topic


def find_governing_schema(schemas: Iterable[Schema], realm: str, topic: str) -> Schema | None:
    """Return the schema that governs a topic; None if there is none."""
    found = [(precedence(by), schema.name, schema) for schema in schemas if (by := schema.matching_topic(realm, topic))]
    return min(found, key=lambda each: each[:2], default=(None, None, None))[2]


def topic_key(realm: str, topic: str) -> str:
    """Return the key of a topic in the registry."""
    return "topic." + hashlib.sha256(f"{realm}\0{topic}".encode("utf-8", "surrogatepass")).hexdigest()[:32]


def check_schema_name(name: str) -> str:
    """Return the name of a schema; raise InvalidName unless it is 1 to 64 letters, digits, '-' and '_'."""
    if not _NAME.fullmatch(name):
        raise InvalidName(f"invalid schema name {name!r}", fix="use 1 to 64 letters, digits, '-' or '_'")
    return name


def check_definition(definition: Json) -> Json:
    """Return a definition; raise InvalidInput if it is too large."""
    size = len(json_fields.dump(definition))
    if size > MAX_DEFINITION_BYTES:
        raise InvalidInput(f"a definition of {size} bytes", fix=f"the largest is {MAX_DEFINITION_BYTES}")
    return definition


def check_size(schema: Schema) -> Schema:
    """Return a schema; raise InvalidInput if its revisions are too large or too many."""
    size = len(json_fields.dump(schema.to_json()))
    if size > MAX_SCHEMA_BYTES or len(schema.revisions) > MAX_REVISIONS:
        raise InvalidInput(
            f"schema {schema.name!r} has {len(schema.revisions)} revisions of {size} bytes together",
            fix="delete revisions that are no longer needed",
        )
    return schema

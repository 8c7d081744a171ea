"""Schemas and topics as declared: what the objects of a topic look like, revision by revision. Pure.

A schema governs the topics that it names, exact or by expression. Events are checked against its newest revision (see
`intake.schemas`). A revision never changes: a commit adds one, a rollback adds a copy of an earlier one, so that the
numbers tell what was in force when. Whether a revision may follow another is told by `json_rules` and `avro_rules`.
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
from purveyor.model.event import check_word
from purveyor.model.json_fields import Json
from purveyor.model.stored_record import Kind
from purveyor.model.subscription import RealmTopic, read_topics
from purveyor.model.topics import is_exact

SCHEMA: Final = Kind("schema", ("name", "type", "encoding", "compatibility", "realms_topics", "revisions"))
"""In every version `realms_topics` keeps its meaning: a program that does not understand the rest refuses events of
these topics."""
TOPIC: Final = Kind("topic", ("realm", "topic", "since", "declared", "strict", "description"))
MOST_REVISIONS: Final = 100
LARGEST_DEFINITION: Final = 128 << 10
LARGEST_SCHEMA: Final = 512 << 10
"""All revisions together: they are one value in the registry, below what every server takes."""
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LONGEST_DESCRIPTION: Final = 1000


class SchemaType(Enum):
    """The language of a schema."""

    JSON_SCHEMA = "json-schema"
    AVRO = "avro"


class Encoding(Enum):
    """How publishers write the objects: as JSON, or as Avro's binary form in base64."""

    JSON = "json"
    BINARY = "binary"


class Compatibility(Enum):
    """What a new revision must keep, seen from the one before it."""

    NONE = "none"
    BACKWARD = "backward"
    """It reads what was written for the last one."""
    FORWARD = "forward"
    """What is written for it can be read by those who know the last one."""
    FULL = "full"
    """Both."""

    @property
    def backward(self) -> bool:
        """Whether old data must be read by the new revision."""
        return self in (Compatibility.BACKWARD, Compatibility.FULL)

    @property
    def forward(self) -> bool:
        """Whether new data must be read by the old revision."""
        return self in (Compatibility.FORWARD, Compatibility.FULL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Revision:
    """One text of a schema, as it was committed."""

    number: int
    definition: Json
    created: datetime
    copy_of: int | None = None
    """The revision that was rolled back to, if it is one of those."""

    def to_json(self) -> Json:
        """As it is kept and shown."""
        copied = {} if self.copy_of is None else {"copy_of": self.copy_of}
        return {"number": self.number, "created": self.created.isoformat(), **copied, "definition": self.definition}

    @classmethod
    def from_json(cls, data: object) -> "Revision":
        """Checked."""
        fields = json_fields.mapping(data, "revision")
        json_fields.only(fields, ("number", "created", "copy_of", "definition"), "revision")
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
        """One of its revisions; `UnknownSchema` if it has none of that number."""
        found = next((each for each in self.revisions if each.number == number), None)
        if found is None:
            known = ", ".join(str(each.number) for each in self.revisions)
            raise UnknownSchema(f"schema {self.name!r} has no revision {number}", fix=f"it has {known}")
        return found

    def committed(self, definition: Json, now: datetime, *, copy_of: int | None = None) -> "Schema":
        """With one more revision; InvalidInput if that is too much."""
        revision = Revision(
            number=self.newest.number + 1, definition=check_definition(definition), created=now, copy_of=copy_of
        )
        return check_size(dataclasses.replace(self, revisions=(*self.revisions, revision)))

    def rolled_back(self, number: int, now: datetime) -> "Schema":
        """With a copy of an earlier revision as the newest."""
        return self.committed(self.revision(number).definition, now, copy_of=number)

    def without(self, number: int) -> "Schema":
        """Without a revision that is not in force; its number is not used again."""
        if self.revision(number) is self.newest:
            raise InvalidInput(
                f"revision {number} of schema {self.name!r} is in force",
                fix="roll back to another one first, or delete the schema",
            )
        return dataclasses.replace(self, revisions=tuple(each for each in self.revisions if each.number != number))

    def governs(self, realm: str, topic: str) -> RealmTopic | None:
        """By which of its topics it governs that one: the exact one, else the longest that matches; None: not at all.

        Of several schemas the one whose topic `precedes` counts.
        """
        found = [each for each in self.realms_topics if each.matches(realm, topic)]
        return min(found, key=precedence, default=None)

    def to_json(self) -> Json:
        """As it is kept."""
        return {**self.heading(), "revisions": [each.to_json() for each in self.revisions]}

    def heading(self) -> Json:
        """All but its revisions."""
        return {
            "name": self.name,
            "type": self.type.value,
            "encoding": self.encoding.value,
            "compatibility": self.compatibility.value,
            "realms_topics": [each.to_json() for each in self.realms_topics],
        }

    @classmethod
    def from_json(cls, data: object) -> "Schema":
        """Checked."""
        fields = SCHEMA.check(data)
        revisions = fields.get("revisions")
        if not isinstance(revisions, list):
            raise InvalidInput(
                f"the schema has {json_fields.kind(revisions)} as 'revisions'", fix="give a list of them"
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
    """A topic that was declared, or that an event was accepted for."""

    realm: str
    topic: str
    since: datetime
    declared: bool = False
    strict: bool = False
    """Whether its realm takes events of declared topics alone."""
    description: str = ""

    def __post_init__(self) -> None:
        check_word(self.realm, "realm")
        check_word(self.topic, "topic")
        if len(self.description) > _LONGEST_DESCRIPTION:
            raise InvalidInput(f"the description of {self.label} is too long", fix="use up to 1000 characters")

    @property
    def label(self) -> str:
        """As people write it."""
        return f"{self.realm}:{self.topic}"

    @property
    def key(self) -> str:
        """Its place in the registry: a key there cannot hold every character of a topic."""
        return topic_key(self.realm, self.topic)

    def to_json(self) -> Json:
        """As it is kept."""
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
        """Checked."""
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
    """Which of several topics of schemas goes first: an exact one, then the longest expression.

    >>> sorted([RealmTopic("r", ".*"), RealmTopic("r", "a"), RealmTopic("r", "a.*")], key=precedence)[0].topic
    'a'
    """
    return not is_exact(topic.topic), -len(topic.topic), topic.topic


def governing(schemas: Iterable[Schema], realm: str, topic: str) -> Schema | None:
    """The one schema that governs a topic, if any."""
    found = [(precedence(by), schema.name, schema) for schema in schemas if (by := schema.governs(realm, topic))]
    return min(found, key=lambda each: each[:2], default=(None, None, None))[2]


def topic_key(realm: str, topic: str) -> str:
    """Where a topic stands in the registry."""
    return "topic." + hashlib.sha256(f"{realm}\0{topic}".encode("utf-8", "surrogatepass")).hexdigest()[:32]


def check_schema_name(name: str) -> str:
    """A name of a schema: letters, digits, '-' and '_', at most 64."""
    if not _NAME.fullmatch(name):
        raise InvalidName(f"invalid schema name {name!r}", fix="use 1 to 64 letters, digits, '-' or '_'")
    return name


def check_definition(definition: Json) -> Json:
    """Not larger than can be kept."""
    size = len(json_fields.dump(definition))
    if size > LARGEST_DEFINITION:
        raise InvalidInput(f"a definition of {size} bytes", fix=f"the largest is {LARGEST_DEFINITION}")
    return definition


def check_size(schema: Schema) -> Schema:
    """All revisions together are not more than can be kept."""
    size = len(json_fields.dump(schema.to_json()))
    if size > LARGEST_SCHEMA or len(schema.revisions) > MOST_REVISIONS:
        raise InvalidInput(
            f"schema {schema.name!r} has {len(schema.revisions)} revisions of {size} bytes together",
            fix="delete revisions that nobody needs any more",
        )
    return schema

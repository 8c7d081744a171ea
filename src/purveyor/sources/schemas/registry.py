"""The registry of schemas and topics, in the bucket `topics`; each write is a compare-and-set.

schema.<name>   a `Schema` with all its revisions in one value: they change together or not at all
topic.<hash>    a `Topic` that a user declared, or that an event was accepted for

`SchemaCache` holds them in the memory of a process: it reads them once, and a watch keeps them up to date. A write of
another process takes effect here as soon as the watch delivers it, a write of this process at once. While the server is
unavailable nothing can be published, so a slightly old cache does no harm. Before the first read the process accepts no
event.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Final, TypeVar

from purveyor.jetstream.key_value import Bucket, BucketConfig
from purveyor.model.errors import (
    AlreadyExists,
    Incompatible,
    InvalidInput,
    PurveyorError,
    Unavailable,
    UnknownKey,
    UnknownSchema,
    UnknownTopic,
    UnreadableRecord,
    WrongRevision,
)
from purveyor.model.event import Event, check_realm_topic
from purveyor.model.json_fields import Json, check_surrogates
from purveyor.model.subscription import RealmTopic
from purveyor.model.subscription_limits import check_topics
from purveyor.queues.client import Queues
from purveyor.queues.permissions import TOPICS
from purveyor.sources.schemas.event_validator import EventValidator, ValidatorBuilder
from purveyor.sources.schemas.schema import (
    SCHEMA,
    TOPIC,
    Compatibility,
    Encoding,
    Revision,
    Schema,
    SchemaType,
    Topic,
    check_schema_name,
    check_size,
    topic_key,
)
from purveyor.sources.schemas.validators import compile_schema, find_incompatibilities

_MAX_WRITE_ATTEMPTS: Final = 20
_MAX_CONCURRENT_CHECKS: Final = 2
_MAX_SHOWN_PROBLEMS: Final = 5
T = TypeVar("T")
OnWrite = Callable[[str, int, bytes | None], None]
"""Called after each write with the key, its revision in the registry, and the value, None for a deletion."""


@dataclass(frozen=True, slots=True)
class RegistryContents:
    """The contents of the registry, by name."""

    schemas: dict[str, Schema] = field(default_factory=dict)
    topics: dict[str, Topic] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    """The keys whose values this version cannot read, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSchema:
    """A schema to be added."""

    name: str
    type: SchemaType
    definition: Json
    realms_topics: tuple[RealmTopic, ...]
    encoding: Encoding = Encoding.JSON
    compatibility: Compatibility = Compatibility.BACKWARD

    def build(self, now: datetime) -> Schema:
        """Return the schema with its first revision."""
        return check_size(
            Schema(
                name=self.name,
                type=self.type,
                encoding=self.encoding,
                compatibility=self.compatibility,
                realms_topics=self.realms_topics,
                revisions=(Revision(number=1, definition=self.definition, created=now),),
            )
        )


def _ignore(_key: str, _revision: int, _value: bytes | None) -> None:
    """Ignore a write."""


class SchemaRegistry:
    """The registry. Every method raises `Unavailable` while the server is unavailable."""

    def __init__(self, queues: Queues, *, replicas: int = 1, on_write: OnWrite = _ignore) -> None:
        self._queues = queues
        self._replicas = replicas
        self._on_write = on_write
        self._bucket: Bucket | None = None
        self._checking = asyncio.Semaphore(_MAX_CONCURRENT_CHECKS)

    async def bucket(self) -> Bucket:
        """Return the bucket; create it if it is missing."""
        if self._bucket is None:
            self._bucket = await self._queues.bucket(BucketConfig(name=TOPICS, replicas=self._replicas))
        return self._bucket

    async def list(self) -> RegistryContents:
        """Return all schemas and topics."""
        found = RegistryContents()
        bucket = await self.bucket()
        async with contextlib.aclosing(bucket.watch()) as changes:
            async for entry in changes:
                if entry is None:
                    break
                if entry.deleted:
                    continue
                try:
                    if entry.key.startswith("schema."):
                        schema = SCHEMA.read(entry.value, Schema.from_json)
                        found.schemas[schema.name] = schema
                    else:
                        topic = TOPIC.read(entry.value, Topic.from_json)
                        found.topics[topic.key] = topic
                except UnreadableRecord as error:
                    found.unreadable[entry.key] = error.message
        return found

    async def get(self, name: str) -> Schema:
        """Return a schema; raise UnknownSchema if there is none."""
        return (await self._read(name))[0]

    async def add(self, new: NewSchema) -> tuple[Schema, bool]:
        """Add a schema; return False if the same is there. Raises AlreadyExists if another one has its name."""
        check_topics(new.realms_topics)
        schema = new.build(datetime.now(UTC))
        await self.check(lambda: compile_schema(new.type, new.encoding, new.definition))
        try:
            await self._create(_schema_key(new.name), SCHEMA.dump(schema.to_json()))
        except AlreadyExists:
            found = await self.get(new.name)
            if found.metadata_json() == schema.metadata_json() and found.newest.definition == new.definition:
                return found, False
            raise AlreadyExists(
                f"schema {new.name!r} exists, and is another",
                fix="commit a revision to it, change its topics, or choose another name",
                code=409,
            ) from None
        return schema, True

    async def commit(self, name: str, definition: Json) -> tuple[Schema, bool]:
        """Add a revision and put it in force; return False if it is already. Raises Incompatible if not compatible."""

        def change(schema: Schema) -> Schema:
            if schema.newest.definition == definition:
                return schema
            problems = find_revision_problems(schema, definition)
            if problems:
                more = (
                    f", and {len(problems) - _MAX_SHOWN_PROBLEMS} more" if len(problems) > _MAX_SHOWN_PROBLEMS else ""
                )
                raise Incompatible(
                    f"not {schema.compatibility.value}-compatible with revision {schema.newest.number} of schema "
                    f"{name!r}: {'; '.join(problems[:_MAX_SHOWN_PROBLEMS])}{more}",
                    fix="keep what the last revision promised, or set another compatibility first",
                    code=409,
                )
            return schema.with_revision(definition, datetime.now(UTC))

        return await self._change(name, change)

    async def check(self, work: Callable[[], T]) -> T:
        """Run work on a definition in a thread, a few at a time: it can take seconds (see `MAX_WORK`)."""
        async with self._checking:
            return await asyncio.to_thread(work)

    async def roll_back(self, name: str, number: int) -> Schema:
        """Put an earlier revision in force again, as a new one, without a check of compatibility."""
        found, _ = await self._change(name, lambda schema: schema.with_rollback(number, datetime.now(UTC)))
        return found

    async def change(
        self, name: str, *, compatibility: Compatibility | None = None, topics: tuple[RealmTopic, ...] | None = None
    ) -> Schema:
        """Change the compatibility or the topics."""
        check_topics(topics or ())

        def changed(schema: Schema) -> Schema:
            return dataclasses.replace(
                schema,
                compatibility=compatibility or schema.compatibility,
                realms_topics=schema.realms_topics if topics is None else topics,
            )

        return (await self._change(name, changed))[0]

    async def delete_revision(self, name: str, number: int) -> Schema:
        """Delete a revision that is not in force."""
        found, _ = await self._change(name, lambda schema: schema.without_revision(number))
        return found

    async def delete(self, name: str) -> None:
        """Delete a schema with all its revisions; its topics take any object from now on."""
        _, revision = await self._read(name)
        await self._remove(_schema_key(name), revision)

    async def topic(self, realm: str, topic: str) -> Topic:
        """Return a declared or seen topic; raise UnknownTopic if there is none."""
        return (await self._read_topic(realm, topic))[0]

    async def declare(self, topic: Topic) -> tuple[Topic, bool]:
        """Declare a topic, or change a declared one; return False if that changes nothing."""
        check_realm_topic(topic.realm, topic.topic)
        check_surrogates(topic.description, "description")
        for _ in range(_MAX_WRITE_ATTEMPTS):
            try:
                found, revision = await self._read_topic(topic.realm, topic.topic)
            except UnknownTopic:
                await self._check_room()
                with contextlib.suppress(AlreadyExists):
                    await self._create(topic.key, TOPIC.dump(topic.to_json()))
                    return topic, True
                continue
            wanted = dataclasses.replace(topic, since=found.since)
            if found == wanted:
                return found, False
            with contextlib.suppress(WrongRevision):
                await self._update(topic.key, TOPIC.dump(wanted.to_json()), revision)
                return wanted, not found.declared
        raise _busy(f"the topic {topic.label}")

    async def _check_room(self) -> None:
        """Raise InvalidInput if the registry lists the largest number of topics."""
        if len(await (await self.bucket()).keys("topic.*")) >= MAX_TOPICS:
            raise InvalidInput(
                f"the list of known topics is full: {MAX_TOPICS}",
                fix="delete topics that no publisher uses any more with `purveyor topic delete`",
            )

    async def forget_topic(self, realm: str, topic: str) -> None:
        """Delete a topic; the next accepted event of it adds it again."""
        _, revision = await self._read_topic(realm, topic)
        await self._remove(topic_key(realm, topic), revision)

    async def add_seen_topics(self, topics: Iterable[tuple[str, str]]) -> None:
        """Add the topics of accepted events."""
        now = datetime.now(UTC)
        for realm, name in topics:
            topic = Topic(realm=realm, topic=name, since=now)
            with contextlib.suppress(AlreadyExists):
                await self._create(topic.key, TOPIC.dump(topic.to_json()))

    async def _change(self, name: str, change: Callable[[Schema], Schema]) -> tuple[Schema, bool]:
        for _ in range(_MAX_WRITE_ATTEMPTS):
            schema, revision = await self._read(name)
            changed = await self.check(partial(change, schema))
            if changed == schema:
                return schema, False
            with contextlib.suppress(WrongRevision):  # another writer was faster: read again
                await self._update(_schema_key(name), SCHEMA.dump(check_size(changed).to_json()), revision)
                return changed, True
        raise _busy(f"schema {name!r}")

    async def _read(self, name: str) -> tuple[Schema, int]:
        check_schema_name(name)
        try:
            entry = await (await self.bucket()).get(_schema_key(name))
        except UnknownKey:
            raise unknown_schema(name) from None
        return SCHEMA.read(entry.value, Schema.from_json, f"schema {name!r}"), entry.revision

    async def _read_topic(self, realm: str, topic: str) -> tuple[Topic, int]:
        try:
            entry = await (await self.bucket()).get(topic_key(realm, topic))
        except UnknownKey:
            raise UnknownTopic(f"no topic {realm}:{topic}", fix="`purveyor topic list` lists them") from None
        return TOPIC.read(entry.value, Topic.from_json, f"topic {realm}:{topic}"), entry.revision

    async def _create(self, key: str, data: bytes) -> None:
        self._on_write(key, await (await self.bucket()).create(key, data), data)

    async def _update(self, key: str, data: bytes, revision: int) -> None:
        self._on_write(key, await (await self.bucket()).update(key, data, revision), data)

    async def _remove(self, key: str, revision: int) -> None:
        await (await self.bucket()).delete(key, revision=revision)
        self._on_write(key, revision + 1, None)  # a later write has a higher revision in any case


def find_revision_problems(schema: Schema, definition: Json) -> tuple[str, ...]:
    """Return why a definition may not be the next revision; empty if it may. Raises InvalidInput for an invalid one."""
    compile_schema(schema.type, schema.encoding, definition)
    return find_incompatibilities(schema.type, schema.compatibility, schema.newest.definition, definition)


def unknown_schema(name: str) -> UnknownSchema:
    """Return the error about a schema that is missing, or that the caller may not see."""
    return UnknownSchema(f"no schema {name!r}", fix="`purveyor schema list` lists them")


def _schema_key(name: str) -> str:
    return f"schema.{check_schema_name(name)}"


def _busy(what: str) -> Unavailable:
    return Unavailable(f"other writers change {what} at the same time", fix="try again")


_RETRY_DELAY_SECONDS: Final = 1.0
MAX_TOPICS: Final = 10_000
"""The largest number of topics that the registry lists. Events of further topics are accepted and delivered, but not
listed: a publisher with a new topic for each event does not fill the registry, which every API loads at its start."""
_log = logging.getLogger(__name__)


class SchemaCache:
    """The cache of one process."""

    def __init__(self, queues: Queues, *, replicas: int = 1) -> None:
        self.registry = SchemaRegistry(queues, replicas=replicas, on_write=self._apply_own_write)
        self._builder = self._next_builder = ValidatorBuilder()
        self._validator: EventValidator | None = None
        self._seen: set[tuple[str, str]] = set()
        self._recording: asyncio.Task[None] | None = None
        self._warned_full = False

    @property
    def validator(self) -> EventValidator:
        """The current validator; use one for all events of a request. Raises `Unavailable` before the first read."""
        if self._validator is None:
            raise Unavailable("the schemas of events are not read yet", fix="try again in a moment")
        return self._validator

    @property
    def is_full(self) -> bool:
        """Whether the registry lists the largest number of topics."""
        return len(self._seen) >= MAX_TOPICS

    async def follow(self, ready: Callable[[], None]) -> None:
        """Keep the cache up to date until cancelled; call `ready` whenever it is."""
        while True:
            try:
                await self._follow(ready)
            except PurveyorError as error:
                _log.warning("the cache of schemas gets no changes until the watch works again: %s", error)
            await asyncio.sleep(_RETRY_DELAY_SECONDS)

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Keep the cache up to date for the length of a block; raise if the first read fails."""
        began: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def ready() -> None:
            if not began.done():
                began.set_result(None)

        async def run() -> None:
            try:
                await self._follow(ready)
            except PurveyorError as error:
                if not began.done():
                    began.set_exception(error)
                    return
            await self.follow(ready)

        following = asyncio.create_task(run())
        try:
            await began
            yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    def record_topics_in_background(self, events: Iterable[Event]) -> None:
        """Add the new topics of accepted events to the registry, in the background."""
        new = self._unlisted((event.realm, event.topic) for event in events)
        if new and (self._recording is None or self._recording.done()):
            self._recording = asyncio.create_task(self._record(new))

    async def record_topics(self, topics: Iterable[tuple[str, str]]) -> None:
        """Add the new ones of these topics to the registry."""
        new = self._unlisted(topics)
        if new:
            await self._record(new)

    def _unlisted(self, topics: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
        """Return topics that the registry does not list, at most as many as it has room for."""
        new = set(topics) - self._seen
        room = max(MAX_TOPICS - len(self._seen), 0)
        if len(new) > room and not self._warned_full:
            self._warned_full = True
            _log.warning(
                "the list of known topics is full: %d. Events of other topics are delivered, but not listed; "
                "`purveyor topic delete` makes room",
                MAX_TOPICS,
            )
        return set(itertools.islice(new, room))

    async def close(self) -> None:
        """End the background task."""
        if self._recording is not None:
            self._recording.cancel()
            await asyncio.gather(self._recording, return_exceptions=True)

    async def _record(self, topics: set[tuple[str, str]]) -> None:
        try:
            await self.registry.add_seen_topics(topics)
        except PurveyorError as error:
            _log.warning("the registry does not list new topics: %s", error)
        self._seen |= topics  # one attempt is enough, also if it failed

    async def _follow(self, ready: Callable[[], None]) -> None:
        bucket = await self.registry.bucket()
        current = False
        # A new builder: a server that lost its store counts revisions from 1 again.
        builder = self._next_builder = ValidatorBuilder()
        async with contextlib.aclosing(bucket.watch()) as changes:
            async for entry in changes:
                if entry is None:
                    current, self._builder = True, builder
                    self._rebuild()
                    ready()
                elif builder.apply(entry.key, entry.revision, None if entry.deleted else entry.value) and current:
                    self._rebuild()

    def _apply_own_write(self, key: str, revision: int, value: bytes | None) -> None:
        """Apply a write of this process."""
        for each in {self._builder, self._next_builder}:
            each.apply(key, revision, value)
        if self._validator is not None:
            self._rebuild()

    def _rebuild(self) -> None:
        self._validator = self._builder.build()
        self._seen = {(topic.realm, topic.topic) for topic in self._builder.topics.values()}

"""Topics as every surface shows them: what was declared or seen, the schema that governs each, and who asks for it.

Expressions are run on topics in a thread: each is bounded (`model.topic_cost`), and there may be many of both.
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass

from purveyor.delivery.subscriptions import Subscriptions
from purveyor.model.errors import UnknownTopic
from purveyor.model.json_fields import Json
from purveyor.model.registration import RecordState
from purveyor.queues.registry import Snapshot
from purveyor.sources.schemas.registry import Declared, Schemas
from purveyor.sources.schemas.schema import Schema, Topic, governing, topic_key


@dataclass(frozen=True, slots=True)
class Known:
    """A topic with all that belongs to it."""

    topic: Topic
    schema: Schema | None
    subscriptions: tuple[str, ...]

    def to_json(self) -> Json:
        """For the API and the command line."""
        schema = self.schema
        return {
            **self.topic.to_json(),
            "schema": None if schema is None else {"name": schema.name, "revision": schema.newest.number},
            "subscriptions": list(self.subscriptions),
        }


async def known_topics(
    schemas: Schemas, subscriptions: Subscriptions, realms: Collection[str] | None = None
) -> list[Known]:
    """All topics, or those of some realms, by realm and name."""
    declared, snapshot = await schemas.list(), await subscriptions.list()
    found = (each for each in declared.topics.values() if realms is None or each.realm in realms)
    topics = sorted(found, key=lambda each: (each.realm, each.topic))
    return await asyncio.to_thread(lambda: [_known(topic, declared, snapshot) for topic in topics])


async def topic_known(schemas: Schemas, subscriptions: Subscriptions, realm: str, topic: str) -> Known:
    """One topic; `UnknownTopic` if it was neither declared nor seen."""
    declared = await schemas.list()
    found = declared.topics.get(topic_key(realm, topic))
    if found is None:
        raise no_topic(realm, topic)
    return await asyncio.to_thread(_known, found, declared, await subscriptions.list())


def no_topic(realm: str, topic: str) -> UnknownTopic:
    """The error about a topic that was neither declared nor seen, or that is not to be seen."""
    return UnknownTopic(f"no topic {realm}:{topic}", fix="`purveyor topic list` lists them")


def _known(topic: Topic, declared: Declared, snapshot: Snapshot) -> Known:
    asking = tuple(
        name
        for name, found in snapshot.subscriptions.items()
        if found.record.state is not RecordState.DELETING
        and any(wanted.matches(topic.realm, topic.topic) for wanted in found.record.definition.realms_topics)
    )
    return Known(topic, governing(declared.schemas.values(), topic.realm, topic.topic), asking)

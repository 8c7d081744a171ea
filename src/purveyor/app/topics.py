"""Topics as every surface shows them: what was declared or seen, the schema that governs each, and who asks for it."""

from dataclasses import dataclass

from purveyor.delivery.subscriptions import Subscriptions
from purveyor.intake.schemas.store import Declared, Schemas
from purveyor.model.errors import UnknownTopic
from purveyor.model.jsontext import Json
from purveyor.model.registration import RecordState
from purveyor.model.schema import Schema, Topic, governing, topic_key
from purveyor.queues.registry import Snapshot


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


async def known_topics(schemas: Schemas, subscriptions: Subscriptions) -> list[Known]:
    """All topics, by realm and name."""
    declared, snapshot = await schemas.list(), await subscriptions.list()
    topics = sorted(declared.topics.values(), key=lambda each: (each.realm, each.topic))
    return [_known(topic, declared, snapshot) for topic in topics]


async def topic_known(schemas: Schemas, subscriptions: Subscriptions, realm: str, topic: str) -> Known:
    """One topic; `UnknownTopic` if it was neither declared nor seen."""
    declared = await schemas.list()
    found = declared.topics.get(topic_key(realm, topic))
    if found is None:
        raise UnknownTopic(f"no topic {realm}:{topic}", fix="`purveyor topic list` lists them")
    return _known(found, declared, await subscriptions.list())


def _known(topic: Topic, declared: Declared, snapshot: Snapshot) -> Known:
    asking = tuple(
        name
        for name, found in snapshot.subscriptions.items()
        if found.record.state is not RecordState.DELETING
        and any(wanted.matches(topic.realm, topic.topic) for wanted in found.record.definition.realms_topics)
    )
    return Known(topic, governing(declared.schemas.values(), topic.realm, topic.topic), asking)

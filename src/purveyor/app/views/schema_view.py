"""Schemas as every surface shows them, and what one says to an object."""

import dataclasses
from collections.abc import Collection

from purveyor.model.errors import SchemaMismatch
from purveyor.model.event import Event
from purveyor.model.json_fields import Json
from purveyor.sources.schemas.event_validator import Governor
from purveyor.sources.schemas.schema import Schema


def schema_json(schema: Schema) -> Json:
    """A schema with the revision in force, for the API and the command line."""
    return {
        **schema.heading(),
        "revision": schema.newest.number,
        "revisions": [each.number for each in schema.revisions],
        "definition": schema.newest.definition,
    }


def part_for(schema: Schema, realms: Collection[str] | None) -> Schema | None:
    """Return the part of a schema that a login of these realms may see; None if there is none.

    A login without realms (None) is bound to none and sees all of it.
    """
    if realms is None:
        return schema
    own = tuple(each for each in schema.realms_topics if each.realm in realms)
    return dataclasses.replace(schema, realms_topics=own) if own else None


def judge(schema: Schema, given: object) -> list[str]:
    """What is wrong with an object, as if it were published now; a text is its binary form."""
    topic = schema.realms_topics[0]
    about = {"publisher_name": "check", "ts": "2026-01-01T00:00:00Z", "realm": topic.realm, "topic": topic.topic}
    governor = Governor(schema)
    try:
        governor.check(Event.from_json(governor.decoded({**about, "body": {"new": given}})))
    except SchemaMismatch as error:
        return [f"{where.removeprefix('body.new').removeprefix('.') or 'it'}: {what}" for where, what in error.mistakes]
    return []

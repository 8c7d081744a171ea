"""Schemas as every surface shows them, and what one says to an object."""

from purveyor.intake.schemas.rules import Governor
from purveyor.model.errors import SchemaMismatch
from purveyor.model.event import Event
from purveyor.model.jsontext import Json
from purveyor.model.schema import Schema


def schema_json(schema: Schema) -> Json:
    """A schema with the revision in force, for the API and the command line."""
    return {
        **schema.heading(),
        "revision": schema.newest.number,
        "revisions": [each.number for each in schema.revisions],
        "definition": schema.newest.definition,
    }


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

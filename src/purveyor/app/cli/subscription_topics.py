"""The flags of `purveyor subscription edit` that change the topics of a subscription."""

from dataclasses import dataclass
from typing import Annotated

import typer

from purveyor.app.cli.parsers import parse_topic
from purveyor.model.errors import InvalidInput
from purveyor.model.json_fields import Json
from purveyor.model.subscription import RealmTopic

NewTopics = Annotated[
    list[str] | None,
    typer.Option("--topic", "-t", metavar="REALM:TOPIC", help="Replace all topics by this one; repeatable."),
]
AddTopics = Annotated[
    list[str] | None, typer.Option("--add-topic", metavar="REALM:TOPIC", help="Add this topic; repeatable.")
]
RemoveTopics = Annotated[
    list[str] | None, typer.Option("--remove-topic", metavar="REALM:TOPIC", help="Remove this topic; repeatable.")
]
PrefillNewTopics = Annotated[
    bool, typer.Option("--prefill", help="Deliver the current state of the objects of new topics first.")
]


@dataclass(frozen=True, slots=True)
class TopicFlags:
    """The topics to set, or to add and to remove."""

    topics: tuple[RealmTopic, ...] = ()
    added: tuple[RealmTopic, ...] = ()
    removed: tuple[RealmTopic, ...] = ()
    prefill: bool = False

    @classmethod
    def parse(
        cls, topics: list[str] | None, added: list[str] | None, removed: list[str] | None, *, prefill: bool
    ) -> "TopicFlags":
        """Build it from the flags; InvalidInput for flags that exclude each other."""
        flags = cls(_parse(topics), _parse(added), _parse(removed), prefill)
        if flags.topics and (flags.added or flags.removed):
            raise InvalidInput(
                "--topic replaces all topics, so --add-topic and --remove-topic have no meaning beside it",
                fix="give --topic alone, or only the others",
            )
        if prefill and not (flags.topics or flags.added):
            raise InvalidInput("--prefill needs new topics", fix="add --add-topic REALM:TOPIC")
        return flags

    def options(self, now: tuple[RealmTopic, ...]) -> Json:
        """Return the option of the API for a subscription with these topics; none if the flags change no topic."""
        if not (self.topics or self.added or self.removed):
            return {}
        for each in self.removed:
            if each not in now:
                raise InvalidInput(
                    f"the subscription has no topic {each.realm}:{each.topic}",
                    fix=f"it has {', '.join(f'{topic.realm}:{topic.topic}' for topic in now)}",
                )
        wanted = self.topics or (*(each for each in now if each not in self.removed), *self.added)
        return {"realms_topics": [each.to_json() for each in dict.fromkeys(wanted)]}


def _parse(given: list[str] | None) -> tuple[RealmTopic, ...]:
    return tuple(dict.fromkeys(map(parse_topic, given or [])))

"""The rows that dispatch works on, from the stream or from the archive: what a message is, and who may get it."""

from typing import Final

from pyspark.sql import DataFrame

from purveyor.model.control import CONTROL_SUBJECT

SOURCE_COLUMNS: Final = "sequence,subject,headers,data"
COLUMNS: Final = ("position", "subject", "headers", "data", "realm", "topic")
"""What the dispatcher needs to know of a message. One that is no event has no realm and no topic."""


def archived(events: DataFrame) -> DataFrame:
    """The events of the archive as `COLUMNS`."""
    return events.where("kind = 'event'").select(*COLUMNS)


def live(incoming: DataFrame) -> DataFrame:
    """Messages as the format `jetstream-events` gives them, as `COLUMNS`; control events are left out."""
    return incoming.where(f"subject <> '{CONTROL_SUBJECT}'").withColumnRenamed("sequence", "position")

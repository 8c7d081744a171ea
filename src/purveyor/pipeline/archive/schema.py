"""The first step behind `stream:incoming`: a message and what it says as an event become the archive's columns.

Dispatch and archive read by the same format, so what is archived as an event is what is dispatched.
"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody writes it

from purveyor.jetstream.headers import EVENT_ID, MSG_ID
from purveyor.model.control_events import CONTROL_SUBJECT

SCHEMA = (
    "position bigint, stored timestamp, subject string, kind string, realm string, topic string, key string, "
    "id string, publisher_name string, ts timestamp, operation string, headers map<string,array<string>>, data binary"
)
"""The archive's columns, in Spark's words."""

ORDER = ("realm", "topic", "position")
"""How rows lie in a file, so that a query for one topic skips the rest."""

COLUMNS = tuple(field.split()[0] for field in SCHEMA.split(", "))

EVENT, CONTROL, INVALID = "event", "control", "invalid"
"""The kinds of messages; one that is no event is kept as it is, so that people can look at it."""


def as_archived(incoming: DataFrame) -> DataFrame:
    """The archive's columns from those of the format `jetstream-events`, all of them.

    >>> as_archived(spark.read.format("jetstream-events").options(stream="stream:incoming"))  # doctest: +SKIP
    """
    control = F.col("subject") == F.lit(CONTROL_SUBJECT)
    kind = F.when(control, CONTROL).when(F.col("realm").isNotNull(), EVENT).otherwise(INVALID)
    made = {
        "position": F.col("sequence"),
        "stored": F.col("timestamp"),
        "kind": kind,
        "id": F.coalesce(*(F.get(F.col("headers")[name], F.lit(0)) for name in (EVENT_ID, MSG_ID))),
    }
    return incoming.select(*(made[name].alias(name) if name in made else name for name in COLUMNS))

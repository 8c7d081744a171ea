r"""The first look at a message: its realm and topic, and whether it is an event beyond doubt.

One pass over the JSON and a few cheap tests, which nearly every event passes. What does not pass is not wrong by that,
only doubtful: such rows, and no others, are judged by the model's own rule where they are written. So the hot path is
Spark SQL, and the verdict is that of `Event.decode`. Whether a body is UTF-8 is seen there as well, nearly for free.
"""

from typing import Final

from pyspark.sql import DataFrame

from purveyor.model.control import CONTROL_SUBJECT
from purveyor.model.event import KEY_FIELDS
from purveyor.pipeline.whole_json import is_whole, read_json

SOURCE_COLUMNS: Final = "sequence,subject,headers,data"
COLUMNS: Final = ("position", "subject", "headers", "data", "realm", "topic", "doubtful")
"""What the dispatcher needs to know of a message. The realm and topic of one that is doubtful are perhaps not right."""

_KEYS = ", ".join(f"{name}: string" for name in KEY_FIELDS)
_FIELDS = (
    "realm string, topic string, key string, publisher_name string, ts string, attributes map<string,string>, "
    f"body struct<new: struct<{_KEYS}>, old: struct<{_KEYS}>>"
)
_STRICT = "map('allowSingleQuotes', 'false', 'allowNonNumericNumbers', 'false')"
# What is read as text may have been a number, true, a list or an object: whatever could be is doubtful. The four fields
# that an event must have are looked at together, a line for each, because every expression costs its start.
# They are tried with greedy loops over few ranges, which Java is quick at: nothing of a line can match its end.
_WORD = r"(?!true\\n|false\\n|[-0-9\\[{])[ -~\\x{a0}-\\x{2027}\\x{202a}-\\x{10ffff}]+\\n"
_DAY = r"(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
_TIME = (
    rf"[12][0-9]{{3}}-{_DAY}T(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.(?:[0-9]{{3}}|[0-9]{{6}}))?"
    r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])?"
)
_KEY = r"^(?!(?:true|false|-?[0-9][-+.eE0-9]*)$)[^\\[{]"
_SOME_FIELD = ", ".join(f"given.body.{side}.{name}" for side in ("new", "old") for name in KEY_FIELDS)
_CERTAIN = " and ".join(
    [
        is_whole("given"),
        f"concat_ws('\\n', given.realm, given.topic, given.publisher_name, given.ts) rlike '^{_WORD * 3}{_TIME}$'",
        "given.body.new is not null",
        "given.body.old is not null",
        f"coalesce({_SOME_FIELD}) is not null",
        f"(given.key is null or given.key rlike '{_KEY}')",
        f"(given.attributes is null or forall(map_values(given.attributes), one -> one rlike '{_KEY}'))",
    ]
)


def archived(events: DataFrame) -> DataFrame:
    """The events of the archive, which were judged when they came there, as `COLUMNS`."""
    return events.where("kind = 'event'").selectExpr(*COLUMNS[:-1], "false as doubtful")


def judged(incoming: DataFrame) -> DataFrame:
    """Messages as the `jetstream` source gives them, as `COLUMNS`; control events are left out."""
    read = incoming.where(f"subject <> '{CONTROL_SUBJECT}'").selectExpr(
        "sequence as position",
        "subject",
        "headers",
        "data",
        f"{read_json('cast(data as string)', _FIELDS, _STRICT)} as given",
    )
    return read.selectExpr(
        "position",
        "subject",
        "headers",
        "data",
        "given.realm as realm",
        "given.topic as topic",
        f"not coalesce({_CERTAIN}, false) as doubtful",
    )

r"""The first look at a message: its realm and topic, and whether it is an event beyond doubt.

All of it is one pass over the JSON, and a few cheap tests which nearly every event passes. What does not pass is not
wrong by that, only doubtful: such rows, and no others, are judged by the model's own rule where they are written. So the
hot path is Spark SQL, and the verdict is that of `Event.decode`.
"""

from typing import Final

from pyspark.sql import DataFrame

from purveyor.model.control import CONTROL_SUBJECT
from purveyor.model.event import KEY_FIELDS

COLUMNS: Final = ("position", "subject", "headers", "data", "realm", "topic", "doubtful")
"""What the dispatcher needs to know of a message. The realm and topic of one that is doubtful are perhaps not right."""

_KEYS = ", ".join(f"{name}: string" for name in KEY_FIELDS)
_FIELDS = (
    "realm string, topic string, key string, publisher_name string, ts string, attributes map<string,string>, "
    f"body struct<new: struct<{_KEYS}>, old: struct<{_KEYS}>>, _corrupt_record string"
)
_STRICT = "map('allowSingleQuotes', 'false', 'allowNonNumericNumbers', 'false')"
# What is read as text may have been a number, true, a list or an object: all that could be is doubtful.
_WORD = r"^(?!(true|false)$)[^-0-9\\[{\\x00-\\x1f\\x7f\\x{85}\\x{2028}\\x{2029}][^\\x00-\\x1f\\x7f\\x{85}\\x{2028}\\x{2029}]*$"
_TEXT = r"^(?!(true|false)$)[^-0-9\\[{]"
_KEY = r"^(?!(true|false|-?[0-9][-+.eE0-9]*)$)[^\\[{]"
_DAY = r"((0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
_TIME = (
    rf"^[12][0-9]{{3}}-{_DAY}T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.([0-9]{{3}}|[0-9]{{6}}))?"
    r"(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])?$"
)
_HAS_FIELDS = "coalesce(" + ", ".join(f"given.body.{side}.{name}" for side in ("new", "old") for name in KEY_FIELDS) + ")"
_CERTAIN = " and ".join(
    [
        "given._corrupt_record is null",
        f"given.realm rlike '{_WORD}'",
        f"given.topic rlike '{_WORD}'",
        f"given.publisher_name rlike '{_TEXT}'",
        f"given.ts rlike '{_TIME}'",
        f"(given.key is null or given.key rlike '{_KEY}')",
        "given.body.new is not null",
        "given.body.old is not null",
        f"{_HAS_FIELDS} is not null",
        f"(given.attributes is null or forall(map_values(given.attributes), one -> one rlike '{_TEXT}'))",
        "endswith(data, X'7D')",
        "is_valid_utf8(cast(data as string))",
    ]
)


def judged(incoming: DataFrame) -> DataFrame:
    """Messages as the `jetstream` source gives them, as `COLUMNS`; control events are left out."""
    read = incoming.where(f"subject <> '{CONTROL_SUBJECT}'").selectExpr(
        "sequence as position",
        "subject",
        "headers",
        "data",
        f"from_json(cast(data as string), '{_FIELDS}', {_STRICT}) as given",
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

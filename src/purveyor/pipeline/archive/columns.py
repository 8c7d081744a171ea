"""The first step behind `stream:incoming`: a message as the `jetstream` source reads it becomes the archive's columns.

Dispatch and archive both stand on `parsed`, so what is archived as an event is what is dispatched. It agrees with
`Event.decode`, and all of it is Spark SQL: one pass over the JSON takes out the few fields of the schema below. Two
questions that pass cannot answer are asked again, and only of the rows that need it: whether an object without any key
field is empty, and whether a text that reads like `true` or `[1]` stood in quotes.
"""

from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - as everybody writes it

from purveyor.model.control import CONTROL_SUBJECT
from purveyor.model.event import KEY_FIELDS
from purveyor.pipeline.whole_json import is_whole, read_json
from purveyor.queues.headers import MSG_ID

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

_SIDES = ("new", "old")
_KEYS = ", ".join(f"{name}: string" for name in KEY_FIELDS)
_FIELDS = (
    "realm string, topic string, key string, publisher_name string, ts string, attributes map<string,string>, "
    f"body struct<new: struct<{_KEYS}>, old: struct<{_KEYS}>>"
)
_STRICT_JSON = {"allowSingleQuotes": "false", "allowNonNumericNumbers": "false"}
_STRICT_SQL = "map('allowSingleQuotes', 'false', 'allowNonNumericNumbers', 'false')"
_TYPES = (
    "realm variant, topic variant, key variant, publisher_name variant, ts variant, attributes map<string,variant>, "
    f"body struct<new: struct<{_KEYS}>, old: struct<{_KEYS}>>"
).replace(": string", ": variant")
# What a value that is no string looks like once it is text, alone on its line. A whole number may be a key.
_NO_STRING = r"(?m)^(true|false|-?[0-9][-+.eE0-9]*|[\[{].*)$"
_NO_KEY = r"(?s)^(true|false|-?[0-9]+[.eE][-+.eE0-9]*|[\[{].*)$"
_KEY_TYPE = r"^(STRING|BIGINT|DECIMAL\(\d+,0\))$"
_CONTROL_CHARACTER = r"[\x{00}-\x{1f}\x{7f}\x{85}\x{2028}\x{2029}]"
_ZONE = r"(Z|[+-]\d\d:\d\d)$"
_FULL_TIME = r"^\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d:\d\d)$"
_TIME = r"^\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d{1,9})?)?(Z|[+-]\d\d:\d\d)?)?$"


def parsed(incoming: DataFrame) -> DataFrame:
    """The archive's columns from those of the `jetstream` source: sequence, timestamp, subject, headers, data.

    >>> parsed(spark.read.format("jetstream").option("stream", "stream:incoming").load())  # doctest: +SKIP
    """
    text = F.try_validate_utf8(F.col("data").cast("string"))
    given = F.col("_given")
    read = incoming.withColumn("_text", F.when(_is_control(), None).otherwise(text)).withColumn(
        "_given", F.expr(read_json("_text", _FIELDS, _STRICT_SQL))
    )
    judged = read.withColumn("_new", _is_full("new")).withColumn("_old", _is_full("old"))
    judged = judged.withColumn("_ts", _moment(given["ts"]))
    judged = judged.withColumn("_event", F.coalesce(_is_event(), F.lit(False)))
    return judged.select(
        F.col("sequence").alias("position"),
        F.col("timestamp").alias("stored"),
        "subject",
        F.when(_is_control(), CONTROL).when(F.col("_event"), EVENT).otherwise(INVALID).alias("kind"),
        *(F.when(F.col("_event"), given[name]).alias(name) for name in ("realm", "topic")),
        F.when(F.col("_event"), _key()).alias("key"),
        F.get(F.col("headers")[MSG_ID], F.lit(0)).alias("id"),
        F.when(F.col("_event"), given["publisher_name"]).alias("publisher_name"),
        F.when(F.col("_event"), F.col("_ts")).alias("ts"),
        F.when(F.col("_event"), _operation()).alias("operation"),
        "headers",
        "data",
    )


def _is_control() -> Column:
    return F.col("subject") == F.lit(CONTROL_SUBJECT)


def _moment(text: Column) -> Column:
    """An ISO time, whatever the zone of the session is; null for what is none. Seconds and zone may be left out."""
    to_seconds = F.regexp_replace(text, r"([T ]\d\d:\d\d)(?=Z|[+-]|$)", "$1:00")
    with_time = F.when(F.length(text) == 10, F.concat(text, F.lit("T00:00:00"))).otherwise(to_seconds)
    in_zone = F.when(with_time.rlike(_ZONE), with_time).otherwise(F.concat(with_time, F.lit("Z")))
    return F.when(text.rlike(_FULL_TIME), F.try_to_timestamp(text)).when(text.rlike(_TIME), F.try_to_timestamp(in_zone))


def _is_full(side: str) -> Column:
    """Whether an object has fields; null when it is no object. One with a key field has, any other is looked at."""
    known = F.coalesce(*(F.col(f"_given.body.{side}.{name}") for name in KEY_FIELDS)).isNotNull()
    looked = F.size(F.from_json("_text", f"body struct<{side}: map<string,string>>", _STRICT_JSON)["body"][side]) > 0
    body = F.get_json_object("_text", "$.body")
    left_out = ~F.array_contains(F.json_object_keys(body), side)
    return F.when(known, F.lit(True)).otherwise(F.coalesce(looked, F.when(left_out, F.lit(False))))


def _is_event() -> Column:
    """The rules of `Event.from_json`."""
    given = F.col("_given")
    strings = [given[name] for name in ("realm", "topic", "publisher_name", "ts")]
    values = F.map_values(given["attributes"])
    doubtful = F.concat_ws("\n", *strings, "_given.key", values).rlike(_NO_STRING)
    null = F.expr("exists(map_values(_given.attributes), value -> value is null)")
    nulls = F.when(given["attributes"].isNull(), F.lit(False)).otherwise(null)
    rules = [
        F.expr(is_whole("_given")),
        *(text != "" for text in strings),
        F.coalesce(given["key"] != "", F.lit(True)),
        ~F.concat("_given.realm", "_given.topic").rlike(_CONTROL_CHARACTER),
        F.col("_ts").isNotNull() & F.col("_new").isNotNull() & F.col("_old").isNotNull(),
        F.col("_new") | F.col("_old"),
        ~nulls,
        F.when(doubtful, _strings_are_strings()).otherwise(F.lit(True)),
    ]
    return reduce(Column.__and__, rules)


# With names of our own: lambdas of Python number their variables anew each time, and Spark compiles such a plan again.
_PASS = f"from_json(_text, '{_TYPES}', {_STRICT_SQL})"
"""One more pass over the JSON, for values with their types: one, because it is written only once in the plan."""
_STRINGS = (
    f"flatten(transform(array({_PASS}), typed -> concat("
    "array(typed.realm, typed.topic, typed.publisher_name, typed.ts, typed.key), "
    "coalesce(map_values(typed.attributes), cast(array() as array<variant>)))))"
)
_CANDIDATES = ", ".join(f"typed.body.{side}.{name}" for side in _SIDES for name in KEY_FIELDS)
_KEYS_FOUND = (
    f"filter(flatten(transform(array({_PASS}), typed -> array({_CANDIDATES}))), "
    f"value -> schema_of_variant(value) rlike r'{_KEY_TYPE}' and cast(value as string) <> '')"
)


def _strings_are_strings() -> Column:
    """The slow look at the types as they were written; what was not given is null here."""
    return F.expr(f"forall({_STRINGS}, value -> value is null or schema_of_variant(value) = 'STRING')")


def _key() -> Column:
    """As `event_key` finds it."""
    places = [f"{side}.{name}" for side in _SIDES for name in KEY_FIELDS]
    found = F.coalesce(*(F.nullif(F.col(f"_given.body.{place}"), F.lit("")) for place in places))
    slow = F.expr(f"cast(get({_KEYS_FOUND}, 0) as string)")
    return F.coalesce(F.col("_given.key"), F.when(found.rlike(_NO_KEY), slow).otherwise(found))


def _operation() -> Column:
    return F.when(~F.col("_new"), "delete").when(F.col("_old"), "modify").otherwise("create")

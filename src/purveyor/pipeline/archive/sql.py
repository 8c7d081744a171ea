"""SQL queries on the archive: the tables, and a result that a terminal or a program can show.

- `events`: every event, with the archive's columns and its objects `old` and `new` as VARIANT
- `objects`: the current state: for each object its last event, without deletions, with the same columns
- `messages`: all messages unchanged, including control events and messages that are not events
"""

import base64
import re
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal

from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # Spark's bridge ships no types
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual alias
from pyspark.sql.types import VariantVal

from purveyor.model.errors import InvalidInput
from purveyor.pipeline.archive.layout import EVENT
from purveyor.pipeline.archive.reader import ArchiveSource, events, objects_at

_LAST_POSITION = 1 << 62
_ERROR_LOCATION = re.compile(r"[;.]?\s*(SQLSTATE: \w+)?\s*;?\s*(\(?line (\d+),? pos (\d+)\)?)?;?$")


@dataclass(frozen=True, slots=True)
class QueryResult:
    """Rows of plain values; `more` if there are others behind them."""

    columns: tuple[str, ...]
    rows: list[tuple[object, ...]]
    more: bool = False


def run_query(spark: SparkSession, source: ArchiveSource, sql: str, *, limit: int) -> QueryResult:
    """Run a query and return at most `limit` rows. InvalidInput says what is wrong with the query.

    >>> run_query(spark, source, "select topic, count(*) from events group by topic", limit=100)  # doctest: +SKIP
    """
    create_views(spark, source)
    try:
        found = spark.sql(sql)
        rows = found.limit(limit + 1).collect() if found.columns else []
    except (PySparkException, Py4JError) as error:
        raise InvalidInput(
            f"the query fails: {error_sentence(str(error))}", fix="see docs/guides/archive.md"
        ) from error
    plain_rows = [tuple(to_json_value(value) for value in row) for row in rows[:limit]]
    return QueryResult(tuple(found.columns), plain_rows, more=len(rows) > limit)


def create_views(spark: SparkSession, source: ArchiveSource) -> None:
    """Create the tables, as views of this session."""
    messages = events(spark, source, 1, _LAST_POSITION)
    messages.createOrReplaceTempView("messages")
    add_objects(messages.where(F.col("kind") == EVENT)).createOrReplaceTempView("events")
    add_objects(objects_at(spark, source, _LAST_POSITION)).createOrReplaceTempView("objects")


def add_objects(rows: DataFrame) -> DataFrame:
    """Add the old and the new object to the columns; only a query that uses them parses them."""
    whole = F.try_parse_json(F.col("data").cast("string"))
    sides = {side: F.try_variant_get(whole, f"$.body.{side}", "variant") for side in ("old", "new")}
    return rows.drop("kind").withColumns(sides)


def error_sentence(text: str) -> str:
    r"""Extract Spark's sentence from the error of a query.

    >>> error_sentence("[PARSE_SYNTAX_ERROR] Syntax error at or near 'selct'. SQLSTATE: 42601 (line 1, pos 0)\n\n==")
    "Syntax error at or near 'selct' (line 1, column 1)"
    """
    found = re.search(r"\[[A-Z][A-Z0-9_.]+\] ([^\n]*)", text)
    line = found[1] if found else text.strip().partition("\n")[0]
    location = _ERROR_LOCATION.search(line)
    if location is None:
        return line
    where = f" (line {location[3]}, column {int(location[4]) + 1})" if location[3] else ""
    return line[: location.start()] + where


def to_json_value(value: object) -> object:
    """Convert a value of Spark to JSON; times are in UTC, bytes are text if they can be decoded."""
    if isinstance(value, VariantVal):
        return to_json_value(value.toPython())
    if isinstance(value, Row):
        return {str(name): to_json_value(item) for name, item in value.asDict().items()}
    if isinstance(value, dict):
        return {str(name): to_json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    if isinstance(value, datetime):  # without a zone it is in that of this process
        return value.astimezone(UTC).isoformat()
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, bytearray | bytes):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError:
            return base64.b64encode(bytes(value)).decode()
    return value

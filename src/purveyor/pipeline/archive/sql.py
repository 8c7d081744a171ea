"""Questions of people to the archive in SQL: its tables, and an answer that a terminal or a program can show.

- `events`: every event, with the archive's columns and its objects `old` and `new` as VARIANT
- `objects`: the current state: for each object its last event, deletions left out, with the same columns
- `messages`: everything there was, control events and what is no event included, as it came
"""

import base64
import re
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal

from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # Spark's bridge ships no types
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody writes it
from pyspark.sql.types import VariantVal

from purveyor.model.errors import InvalidInput
from purveyor.pipeline.archive.reader import ArchiveSource, events, objects_at
from purveyor.pipeline.archive.schema import EVENT

_EVER = 1 << 62
_PLACE = re.compile(r"[;.]?\s*(SQLSTATE: \w+)?\s*;?\s*(\(?line (\d+),? pos (\d+)\)?)?;?$")


@dataclass(frozen=True, slots=True)
class Answer:
    """Rows of plain values; `more` when there are others behind them."""

    columns: tuple[str, ...]
    rows: list[tuple[object, ...]]
    more: bool = False


def answer(spark: SparkSession, source: ArchiveSource, sql: str, *, limit: int) -> Answer:
    """What a query says, at most `limit` rows of it. InvalidInput tells what is wrong with the query.

    >>> answer(spark, source, "select topic, count(*) from events group by topic", limit=100)  # doctest: +SKIP
    """
    make_tables(spark, source)
    try:
        found = spark.sql(sql)
        rows = found.limit(limit + 1).collect() if found.columns else []
    except (PySparkException, Py4JError) as error:
        raise InvalidInput(f"the query fails: {reason(str(error))}", fix="see the guide of the archive") from error
    plain_rows = [tuple(plain(value) for value in row) for row in rows[:limit]]
    return Answer(tuple(found.columns), plain_rows, more=len(rows) > limit)


def make_tables(spark: SparkSession, source: ArchiveSource) -> None:
    """The tables, as views of this session."""
    messages = events(spark, source, 1, _EVER)
    messages.createOrReplaceTempView("messages")
    with_objects(messages.where(F.col("kind") == EVENT)).createOrReplaceTempView("events")
    with_objects(objects_at(spark, source, _EVER)).createOrReplaceTempView("objects")


def with_objects(rows: DataFrame) -> DataFrame:
    """The old and the new object beside the columns; parsed only by a query that asks for them."""
    whole = F.try_parse_json(F.col("data").cast("string"))
    sides = {side: F.try_variant_get(whole, f"$.body.{side}", "variant") for side in ("old", "new")}
    return rows.drop("kind").withColumns(sides)


def reason(text: str) -> str:
    r"""Spark's own sentence out of what it says when a query fails.

    >>> reason("[PARSE_SYNTAX_ERROR] Syntax error at or near 'selct'. SQLSTATE: 42601 (line 1, pos 0)\n\n== SQL ==")
    "Syntax error at or near 'selct' (line 1, column 1)"
    """
    found = re.search(r"\[[A-Z][A-Z0-9_.]+\] ([^\n]*)", text)
    line = found[1] if found else text.strip().partition("\n")[0]
    place = _PLACE.search(line)
    if place is None:
        return line
    where = f" (line {place[3]}, column {int(place[4]) + 1})" if place[3] else ""
    return line[: place.start()] + where


def plain(value: object) -> object:
    """A value of Spark as JSON has it; times are in UTC, bytes are text if they can be."""
    if isinstance(value, VariantVal):
        return plain(value.toPython())
    if isinstance(value, Row):
        return {str(name): plain(item) for name, item in value.asDict().items()}
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
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

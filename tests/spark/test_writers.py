"""Writing rows: each one is stored or refused with a reason, in order, once for each id."""

from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual alias

from purveyor.jetstream.address import Address
from purveyor.spark.options import WriteSettings
from purveyor.spark.writers import to_messages
from tests.support.broker import Broker
from tests.support.spark_session import Read, error_text, failure
from tests.support.waiting import PATIENCE_SECONDS

NOWHERE = Address(("nats://127.0.0.1:1",))


def write(frame: DataFrame, broker: Broker, **options: Any) -> None:
    given = {"servers": broker.url, **options}
    frame.write.format("jetstream").mode("append").options(**given).save()


def refused(frame: DataFrame, broker: Broker, **options: Any) -> str:
    return error_text(lambda: write(frame, broker, **options))


def test_rows_become_messages_with_all_columns(broker: Broker, spark: SparkSession, unique: str) -> None:
    broker.make(unique)
    rows = [
        (f"{unique}.a", bytearray(b"\x00\xff"), {"Trace": ["x", "y"], "Leer": []}, "id-1"),
        (f"{unique}.ä", bytearray(b""), None, "id-2"),
        (f"{unique}.b", None, {}, None),
    ]
    frame = spark.createDataFrame(
        rows, "subject string, data binary, headers map<string,array<string>>, msg_id string"
    ).coalesce(1)
    write(frame, broker)
    stored = broker.rows(unique)
    assert [(row["subject"], row["data"]) for row in stored] == [
        (f"{unique}.a", b"\x00\xff"),
        (f"{unique}.ä", b""),
        (f"{unique}.b", b""),
    ]
    headers = [dict(row["headers"]) for row in stored]
    assert headers[0] == {"Trace": ["x", "y"], "Nats-Msg-Id": ["id-1"]}
    assert headers[1] == {"Nats-Msg-Id": ["id-2"]}
    assert len(headers[2]["Nats-Msg-Id"][0]) > 20, "a message without an id gets one for its way"


def test_string_data_single_headers_and_the_subject_option(broker: Broker, spark: SparkSession, unique: str) -> None:
    broker.make(unique)
    rows = [(None, "Grüße", {"A": "1", "B": "2"}), (f"{unique}.own", None, None), (None, "", {})]
    frame = spark.createDataFrame(rows, "subject string, data string, headers map<string,string>").coalesce(1)
    write(frame, broker, subject=f"{unique}.default")
    stored = broker.rows(unique)
    assert [row["subject"].removeprefix(f"{unique}.") for row in stored] == ["default", "own", "default"]
    assert [row["data"].decode() for row in stored] == ["Grüße", "", ""]
    found = dict(stored[0]["headers"])
    assert (found["A"], found["B"]) == (["1"], ["2"])
    write(spark.createDataFrame([("only data",)], "data string"), broker, subject=unique)
    assert broker.texts(unique)[-1] == "only data"


@given(st.lists(st.none() | st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=3), max_size=6),
       st.integers(0, 6))  # fmt: skip
def test_single_headers_become_lists_of_one(maps: list[dict[str, str] | None], start: int) -> None:
    column = pa.array([None if m is None else list(m.items()) for m in maps], pa.map_(pa.string(), pa.string()))
    batch = pa.record_batch({"data": pa.array([b""] * len(maps), pa.binary()), "headers": column}).slice(start)
    result = to_messages(batch, WriteSettings(address=NOWHERE, subject="s"))
    expected = [{name: [value] for name, value in (m or {}).items()} for m in maps[start:]]
    assert [dict(each or ()) for each in result.column("headers").to_pylist()] == expected


def test_rows_are_stored_in_the_order_of_a_column(broker: Broker, spark: SparkSession, unique: str) -> None:
    broker.make(unique)
    frame = spark.range(2000).select(
        F.lit(unique).alias("subject"), F.col("id").cast("string").alias("data"), (F.col("id") * -1).alias("place")
    )
    write(frame.repartition(1), broker, orderBy="place")
    assert broker.texts(unique) == [str(number) for number in range(1999, -1, -1)]


def test_writing_again_with_ids_adds_only_what_is_missing(broker: Broker, spark: SparkSession, unique: str) -> None:
    broker.make(unique)

    def rows(count: int) -> DataFrame:
        text = F.col("id").cast("string")
        return spark.range(count).select(text.alias("data"), F.concat(F.lit("id-"), text).alias("msg_id"))

    write(rows(50), broker, subject=unique)
    write(rows(80), broker, subject=unique)
    assert sorted(map(int, broker.texts(unique))) == list(range(80))


def test_writing_without_ids_adds_all_again(broker: Broker, spark: SparkSession, unique: str) -> None:
    broker.make(unique)
    for _ in range(2):
        write(spark.createDataFrame([("x",)], "data string"), broker, subject=unique)
    assert broker.texts(unique) == ["x", "x"]


WRONG_COLUMNS = [
    ("data string, key string", {"subject": "s"}, "cannot write column 'key'", "select from subject, data"),
    ("data string", {}, "no subject to write to", "option subject"),
    ("subject string", {}, "no column data to write", "binary or string"),
    ("subject string, data long", {}, "column 'data' is bigint", "binary or string"),
    ("subject long, data string", {}, "column 'subject' is bigint", "string"),
    ("subject string, data string, headers string", {}, "column 'headers' is string", "map<string,array<string>>"),
    ("subject string, data string, msg_id long", {}, "column 'msg_id' is bigint", "string"),
    ("subject string, data string", {"orderBy": "n"}, "there is no column 'n'", "select it"),
    ("subject string, data string, n map<int,int>", {"orderBy": "n"}, "cannot be sorted by", "a number"),
    ("subject string, data string", {"orderby": "data", "sorted": "1"}, "no option 'sorted'", "known"),
]


@pytest.mark.parametrize(("schema", "options", "reported", "fix"), WRONG_COLUMNS)
def test_wrong_columns_are_an_error_before_anything_is_sent(  # noqa: PLR0917 - fixtures
    broker: Broker, spark: SparkSession, schema: str, options: dict[str, str], reported: str, fix: str
) -> None:
    text = refused(spark.createDataFrame([], schema), broker, **options)
    assert reported in text
    assert fix in text


def test_overwriting_is_refused(broker: Broker, spark: SparkSession, unique: str) -> None:
    broker.make(unique)
    broker.numbers(unique, 1, 3)
    with pytest.raises(Exception, match="a stream cannot be overwritten"):
        spark.createDataFrame([("x",)], "data string").write.format("jetstream").mode("overwrite").options(
            servers=broker.url, subject=unique
        ).save()
    assert broker.texts(unique) == ["1", "2", "3"]


def test_a_full_stream_is_an_error_with_the_servers_reason(broker: Broker, spark: SparkSession, unique: str) -> None:
    broker.make(unique, max_msgs=5, discard="new")
    frame = spark.range(10).select(F.col("id").cast("string").alias("data")).coalesce(1)
    reported = refused(frame, broker, subject=unique)
    assert "maximum messages exceeded" in reported
    assert "10077" in reported
    assert "PublishRefused" in reported
    assert broker.state(unique)["messages"] == 5


def test_a_sealed_stream_a_large_row_and_a_subject_without_a_stream(
    broker: Broker, spark: SparkSession, unique: str
) -> None:
    one = spark.createDataFrame([("x",)], "data string")
    broker.make(unique)
    assert "PublishRefused" in (
        reported := refused(one, broker, subject=unique, stream="SOMEWHERE-ELSE", delivery="pipelined")
    )
    assert "10060" in reported
    large = spark.createDataFrame([("x" * 17_000_000,)], "data string")
    assert "16777216" in refused(large, broker, subject=unique)
    assert "no stream takes" in refused(one, broker, subject=f"{unique}-nobody")
    assert "'a..b'" in refused(spark.createDataFrame([("a..b", "x")], "subject string, data string"), broker)
    assert broker.state(unique)["messages"] == 0
    broker.update(unique, sealed=True)
    reported = refused(one, broker, subject=unique)
    assert "sealed" in reported
    assert "10109" in reported


def test_a_null_subject_without_a_default_is_an_error(broker: Broker, spark: SparkSession, unique: str) -> None:
    broker.make(unique)
    frame = spark.createDataFrame([(unique, "1"), (None, "2")], "subject string, data string").coalesce(1)
    assert "subject" in refused(frame, broker)


def test_atomic_where_the_stream_allows_it_is_all_or_nothing(broker: Broker, spark: SparkSession, unique: str) -> None:
    """The stream has room for 500 of 600: pipelined stores what fits, atomic nothing."""
    frame = spark.range(600).select(F.col("id").cast("string").alias("data")).coalesce(1)
    for mode, options in (("atomic", {"stream": unique}), ("also", {"stream": unique, "delivery": "atomic"})):
        broker.make(unique, max_msgs=500, discard="new", allow_atomic=True)
        assert "10" in refused(frame, broker, subject=unique, **options), mode
        assert broker.state(unique)["messages"] == 0, mode
        broker.drop(unique)
    broker.make(unique, max_msgs=500, discard="new", allow_atomic=True)
    refused(frame, broker, subject=unique, stream=unique, delivery="pipelined")
    assert broker.state(unique)["messages"] == 500
    broker.drop(unique)
    broker.make(unique, max_msgs=500, discard="new")  # does not allow it: auto goes pipelined
    refused(frame, broker, subject=unique, stream=unique)
    assert broker.state(unique)["messages"] == 500


def test_atomic_on_a_stream_that_does_not_allow_it_is_an_error(
    broker: Broker, spark: SparkSession, unique: str
) -> None:
    broker.make(unique)
    reported = refused(spark.createDataFrame([("x",)], "data string"), broker, subject=unique, stream=unique,
                   delivery="atomic")  # fmt: skip
    assert "atomic" in reported
    assert broker.state(unique)["messages"] == 0


def test_atomic_batches_with_ids_again(broker: Broker, spark: SparkSession, unique: str) -> None:
    broker.make(unique, allow_atomic=True)
    text = F.col("id").cast("string")
    frame = spark.range(2500).select(text.alias("data"), text.alias("msg_id"), "id").repartition(1)
    for _ in range(2):
        write(frame, broker, subject=unique, stream=unique, orderBy="id")
    assert broker.texts(unique) == [str(number) for number in range(2500)]


def sink(frame: DataFrame, broker: Broker, checkpoint: Path, **options: Any) -> Any:
    given = {"servers": broker.url, "checkpointLocation": str(checkpoint), **options}
    return frame.writeStream.format("jetstream").options(**given).trigger(availableNow=True).start()


def test_a_stream_from_source_to_sink(broker: Broker, follow: Read, tmp_path: Path, unique: str) -> None:
    source, target = broker.make(f"{unique}-in"), broker.make(f"{unique}-out")
    broker.numbers(source, 1, 40)
    frame = follow(source, maxOffsetsPerTrigger=15, minPartitions=3).select(
        F.lit(target).alias("subject"),
        F.concat(F.lit(f"{source}:"), F.col("sequence")).alias("msg_id"),
        "data",
        "sequence",
    )
    query = sink(frame.repartition(1), broker, tmp_path / "cp", orderBy="sequence")
    assert query.awaitTermination(PATIENCE_SECONDS)
    assert broker.texts(target) == [str(number) for number in range(1, 41)]
    # The whole query once more, as if the checkpoint had been lost: ids keep the target as it is.
    query = sink(frame.repartition(1), broker, tmp_path / "cp-2", orderBy="sequence")
    assert query.awaitTermination(PATIENCE_SECONDS)
    assert broker.texts(target) == [str(number) for number in range(1, 41)]


def test_a_refused_row_fails_the_query_and_a_restart_completes_the_batch(
    broker: Broker, follow: Read, tmp_path: Path, unique: str
) -> None:
    source = broker.make(f"{unique}-in")
    target = broker.make(f"{unique}-out", max_msgs=5, discard="new")
    broker.numbers(source, 1, 10)
    frame = follow(source).select("data", F.col("sequence").cast("string").alias("msg_id"), "sequence").repartition(1)
    options = {"subject": target, "orderBy": "sequence"}
    reported = failure(sink(frame, broker, tmp_path / "cp", **options))
    assert "maximum messages exceeded" in reported
    assert "10077" in reported
    assert broker.texts(target) == ["1", "2", "3", "4", "5"]
    broker.update(target, max_msgs=-1)
    assert sink(frame, broker, tmp_path / "cp", **options).awaitTermination(PATIENCE_SECONDS)
    assert broker.texts(target) == [str(number) for number in range(1, 11)]


def test_a_wrong_column_of_a_streaming_write_is_an_error(
    broker: Broker, follow: Read, tmp_path: Path, unique: str
) -> None:
    broker.make(unique)
    writing = partial(sink, follow(unique), broker, tmp_path / "cp", subject=f"{unique}.x")
    text = error_text(lambda: writing().awaitTermination(PATIENCE_SECONDS))
    assert "cannot write column 'sequence'" in text

"""Reading a stream as a table: every message with exact types, by any choice of offsets, subjects and columns."""

from datetime import UTC, datetime, timedelta

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual alias
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk.net.pool import RetryDeadline, connect, release
from purveyor.spark import register
from tests.support.broker import Broker
from tests.support.command_line import url_of
from tests.support.spark_session import Read


def sequences(frame: DataFrame) -> list[int]:
    return sorted(row.sequence for row in frame.select("sequence").collect())


def test_a_message_is_a_row_with_exact_types(broker: Broker, read: Read, unique: str) -> None:
    broker.make(unique)
    headers = {"Trace": ["a", "b"], "Sprache": ["Grüße, 世界"]}
    before = datetime.now(UTC)
    broker.add(unique, [(f"{unique}.ünï", b"\x00\xff payload", headers, "id-1")])
    frame = read(unique)
    assert frame.schema == StructType(
        [
            StructField("sequence", LongType()),
            StructField("timestamp", TimestampType()),
            StructField("subject", StringType()),
            StructField("headers", MapType(StringType(), ArrayType(StringType()))),
            StructField("data", BinaryType()),
        ]
    )
    (row,) = frame.collect()
    assert row.sequence == 1
    assert row.subject == f"{unique}.ünï"
    assert bytes(row.data) == b"\x00\xff payload"
    assert row.headers == {**headers, "Nats-Msg-Id": ["id-1"]}
    stored = row.timestamp.astimezone(UTC)
    assert before - timedelta(seconds=1) < stored < datetime.now(UTC) + timedelta(seconds=1)
    assert frame.select(F.max("timestamp")).first()[0] == row.timestamp  # type: ignore[index]


def test_payloads_and_headers_of_every_kind(broker: Broker, read: Read, unique: str) -> None:
    broker.make(unique)
    large = bytes(range(256)) * 31_250  # 8 MB
    tricky = b"MSG a 1 2\r\nHMSG x 1 10 20\r\n\r\nNATS/1.0\r\n\r\n"
    payloads = [b"", tricky, large, "Straße 😀".encode(), b"\r\n", bytes(1)]
    broker.add(unique, [(unique, data, {} if number % 2 else {"N": str(number)}, None) for number, data in
                        enumerate(payloads)])  # fmt: skip
    rows = read(unique, minPartitions=2).orderBy("sequence").collect()
    assert [bytes(row.data) for row in rows] == payloads
    assert [row.headers.get("N") for row in rows] == [["0"], None, ["2"], None, ["4"], None]


def test_a_message_without_headers_has_an_empty_map(broker: Broker, read: Read, unique: str) -> None:
    broker.make(unique, subjects=[unique])
    link = connect(broker.address, RetryDeadline(60))
    link.request(unique, b"plain")
    release(broker.address, link)
    (row,) = read(unique).collect()
    assert row.headers == {}
    assert bytes(row.data) == b"plain"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, range(1, 21)),
        ({"startingOffsets": "earliest", "endingOffsets": "latest"}, range(1, 21)),
        ({"startingOffsets": "5"}, range(5, 21)),
        ({"endingOffsets": "5"}, range(1, 6)),
        ({"startingOffsets": "7", "endingOffsets": "7"}, [7]),
        ({"startingOffsets": "8", "endingOffsets": "7"}, []),
        ({"startingOffsets": "latest"}, []),
        ({"endingOffsets": "earliest"}, []),
        ({"startingOffsets": "0", "endingOffsets": "1000"}, range(1, 21)),
        ({"startingOffsets": "21"}, []),
        ({"startingOffsets": "5000"}, []),
        ({"minPartitions": "7"}, range(1, 21)),
        ({"minPartitions": "1000"}, range(1, 21)),
    ],
)
def test_start_and_end_by_word_and_sequence(
    broker: Broker, read: Read, unique: str, options: dict[str, str], expected: range | list[int]
) -> None:
    broker.make(unique)
    broker.numbers(unique, 1, 20)
    assert sequences(read(unique, **options)) == list(expected)


def test_start_and_end_by_time(broker: Broker, read: Read, unique: str) -> None:
    broker.make(unique)
    broker.numbers(unique, 1, 30)
    stored = [row["timestamp"] for row in broker.rows(unique)]
    middle = stored[14]
    from_middle = [number for number, moment in enumerate(stored, 1) if moment >= middle]
    before_middle = [number for number, moment in enumerate(stored, 1) if moment < middle]
    found = sequences(read(unique, startingOffsets=middle.isoformat()))
    # The server keeps nanoseconds, the column microseconds: what was stored within that microsecond is in.
    assert found == from_middle
    assert sequences(read(unique, endingOffsets=middle.isoformat())) == before_middle
    later = (stored[-1] + timedelta(days=1)).isoformat()
    assert sequences(read(unique, startingOffsets=later)) == []
    assert sequences(read(unique, startingOffsets="2001-01-01", endingOffsets=later)) == list(range(1, 31))


@pytest.mark.parametrize(
    ("subjects", "expected"),
    [
        ("{0}.a", [1, 4]),
        ("{0}.*", [1, 2, 4]),
        ("{0}.>", [1, 2, 3, 4, 5]),
        ("{0}.a, {0}.b.c", [1, 3, 4]),
        ("{0}.a,{0}.*", [1, 2, 4]),
        ("{0}.*.c,{0}.b", [2, 3, 5]),
        ("{0}.nobody", []),
        (">", [1, 2, 3, 4, 5]),
    ],
)
def test_subjects_with_wildcards_and_several(
    broker: Broker, read: Read, unique: str, subjects: str, expected: list[int]
) -> None:
    broker.make(unique)
    for token in ("a", "b", "b.c", "a", "a.c"):
        broker.add(f"{unique}.{token}", ["x"])
    assert sequences(read(unique, subjects=subjects.format(unique))) == expected
    assert sequences(read(unique, subjects=subjects.format(unique), columns="sequence", minPartitions=3)) == expected


def test_only_selected_columns_are_read(broker: Broker, read: Read, spark: SparkSession, unique: str) -> None:
    broker.make(unique)
    broker.numbers(unique, 1, 3)
    frame = read(unique, columns="data, sequence")
    assert frame.columns == ["sequence", "data"]
    assert [tuple(map(str, row)) for row in frame.select("sequence").collect()] == [("1",), ("2",), ("3",)]
    given = {"servers": broker.url, "stream": unique}
    by_schema = spark.read.format("jetstream").schema("sequence long, subject string").options(**given).load()
    assert [tuple(row) for row in by_schema.collect()] == [(number, unique) for number in (1, 2, 3)]
    assert read(unique, columns="headers").count() == 3


def test_a_long_range_is_read_by_several_tasks(broker: Broker, read: Read, unique: str) -> None:
    broker.make(unique)
    broker.numbers(unique, 1, 20_000)
    frame = read(unique, minPartitions=4)
    assert frame.rdd.getNumPartitions() == 4
    found = frame.select(
        F.count("*"),
        F.count_distinct("sequence"),
        F.sum(F.col("data").cast("string").cast("long") - F.col("sequence")),
    ).first()
    assert tuple(found or ()) == (20_000, 20_000, 0)


def test_a_stream_of_the_last_of_each_subject_is_read_by_few_tasks(broker: Broker, read: Read, unique: str) -> None:
    broker.make(unique, max_msgs_per_subject=1)
    broker.add(f"{unique}.a", ["first"])
    broker.numbers(unique, 1, 800_000)
    frame = read(unique)
    assert frame.rdd.getNumPartitions() == 1
    assert sequences(frame) == [1, 800_001]


def test_an_empty_stream_is_an_empty_table(broker: Broker, read: Read, unique: str) -> None:
    broker.make(unique)
    assert read(unique).count() == 0
    assert read(unique, startingOffsets="latest", minPartitions=4).collect() == []
    broker.numbers(unique, 1, 5)
    broker.purge(unique)
    assert read(unique).collect() == []


@pytest.mark.parametrize("gone", [[1, 2], [5, 6], [19, 20], [1, 3, 5, 7, 9, 20], list(range(1, 21))])
def test_deleted_messages_are_not_there_and_no_loss(broker: Broker, read: Read, unique: str, gone: list[int]) -> None:
    broker.make(unique)
    broker.numbers(unique, 1, 20)
    broker.delete(unique, *gone)
    expected = [number for number in range(1, 21) if number not in gone]
    assert sequences(read(unique, minPartitions=3)) == expected


@pytest.mark.parametrize("retention", ["interest", "workqueue"])
def test_reading_leaves_streams_for_consumers_as_they_are(
    broker: Broker, read: Read, unique: str, retention: str
) -> None:
    broker.make(unique, retention=retention)
    broker.durable(unique, "somebody")
    broker.numbers(unique, 1, 50)
    assert sequences(read(unique, minPartitions=2)) == list(range(1, 51))
    assert broker.sequences(unique) == list(range(1, 51))
    assert broker.consumers(unique) == ["somebody"]


def test_history_is_a_table_for_sql(broker: Broker, read: Read, spark: SparkSession, unique: str) -> None:
    broker.make(unique)
    broker.add("", [(f"{unique}.{n % 3}", b'{"amount": %d}' % n, {"Kind": "even" if n % 2 == 0 else "odd"}, None)
                    for n in range(30)])  # fmt: skip
    read(unique).createOrReplaceTempView("messages")
    found = spark.sql(
        "select headers['Kind'][0] kind, sum(get_json_object(string(data), '$.amount')) total from messages group by 1"
    ).collect()
    assert {row.kind: int(row.total) for row in found} == {"even": 210, "odd": 225}


def test_a_start_that_is_gone_is_an_error(broker: Broker, read: Read, unique: str) -> None:
    broker.make(unique)
    broker.numbers(unique, 1, 20)
    broker.purge(unique, seq=11)
    assert sequences(read(unique)) == list(range(11, 21))
    assert sequences(read(unique, startingOffsets=5, failOnDataLoss=False)) == list(range(11, 21))
    with pytest.raises(Exception, match="sequences 5 to 10 of stream") as caught:
        read(unique, startingOffsets=5).collect()
    assert "set failOnDataLoss to false" in str(caught.value)


def test_without_servers_a_read_finds_the_server_of_the_environment(
    spark: SparkSession, broker: Broker, address: Address, monkeypatch: pytest.MonkeyPatch, unique: str
) -> None:
    broker.make(unique)
    broker.numbers(unique, 1, 3)
    monkeypatch.setenv("PURVEYOR_NATS_URL", url_of(address))
    before = dict(spark.sparkContext.environment)
    register(spark)
    try:
        assert spark.read.format("jetstream").option("stream", unique).load().count() == 3
    finally:
        spark.sparkContext.environment.clear()
        spark.sparkContext.environment.update(before)
        monkeypatch.delenv("PURVEYOR_NATS_URL")
        register(spark)

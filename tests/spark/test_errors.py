"""A user's mistake gives a Purveyor error, in the exception that the user sees."""

import pytest
from pyspark.sql import SparkSession

from tests.support.broker import Broker
from tests.support.spark_session import Collector, Read, error_text, failure
from tests.support.waiting import PATIENCE_SECONDS

SECRET = "s3cr3t-Pa55"


@pytest.mark.parametrize(
    ("options", "message", "fix"),
    [
        ({"startingOfsets": "1"}, "no option 'startingofsets'", "did you mean startingOffsets?"),
        ({"columns": "key"}, "no column 'key'", "choose from sequence, timestamp"),
        ({"minPartitions": "none"}, "option minPartitions: 'none'", "a whole number, 1 or more"),
        ({"stream": "a b"}, "a b", ""),
        ({"stream": "NO-SUCH"}, "no stream 'NO-SUCH'", "stream"),
        ({"servers": "ftp://x"}, "invalid NATS address 'ftp://x'", "nats://host:4222"),
    ],
)
def test_a_mistake_of_a_reader(read: Read, options: dict[str, str], message: str, fix: str) -> None:
    text = error_text(lambda: read(**{"stream": "S", **options}).collect())
    assert message in text
    assert fix in text


def test_a_missing_option(spark: SparkSession) -> None:
    address = {"servers": "nats://127.0.0.1:1"}
    assert "option stream is missing" in error_text(spark.read.format("jetstream").options(**address).load)
    alone = spark.read.format("jetstream").options(stream="S", user="ada")
    assert "option user is given without option servers" in error_text(alone.load)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("sequence int", "no column 'sequence' of type int"),
        ("key string", "no column 'key' of type string"),
        ("data binary, sequence long", "keep their order"),
    ],
)
def test_a_wrong_schema(spark: SparkSession, broker: Broker, unique: str, schema: str, message: str) -> None:
    broker.make(unique)
    reader = spark.read.format("jetstream").schema(schema).options(servers=broker.url, stream=unique)
    assert message in error_text(lambda: reader.load().collect())


def test_a_following_query_has_no_end(follow: Read, collector: Collector) -> None:
    text = error_text(lambda: collector.start(follow("S", endingOffsets="5")).awaitTermination(PATIENCE_SECONDS))
    assert "option endingOffsets is for batch reads" in text


def test_a_failed_query_shows_no_secret(broker: Broker, follow: Read, collector: Collector) -> None:
    secret = broker.address.password
    assert secret is not None
    assert secret not in failure(collector.start(follow("NO-SUCH-STREAM")))


def test_a_plan_shows_no_password_given_as_an_option(broker: Broker, read: Read, follow: Read, unique: str) -> None:
    """Spark shows options in plans, and hides those of such a name (an address it shows whole)."""
    broker.make(unique)
    for reading in (read, follow):
        frame = reading(unique, servers=broker.address.urls[0], user="ada", password=SECRET)
        assert SECRET not in frame._jdf.queryExecution().toString()


def test_the_error_for_a_wrong_password_does_not_show_it(read: Read, broker: Broker, unique: str) -> None:
    host = broker.address.urls[0]
    text = error_text(lambda: read(unique, servers=host, user="ada", password=SECRET).collect())
    assert "check user, password" in text
    assert SECRET not in text


def test_a_server_that_is_not_there(read: Read) -> None:
    text = error_text(lambda: read("S", servers="nats://127.0.0.1:1", patienceSeconds=1).collect())
    assert "127.0.0.1:1" in text
    assert "is the server up" in text


def test_an_interest_stream_without_direct_get_is_an_error(read: Read, broker: Broker, unique: str) -> None:
    broker.make(unique, retention="interest", allow_direct=False)
    broker.durable(unique, "somebody")
    broker.numbers(unique, 1, 3)
    text = error_text(lambda: read(unique).collect())
    assert "does not allow direct gets" in text
    assert "switch allow_direct on" in text

"""The `jetstream` format: makes the reader or writer that Spark asks for."""

import dataclasses

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from purveyor.model.errors import InvalidConfig
from purveyor.spark.options import COLUMNS, NamedOffset, ReadSettings, read_settings, write_settings
from purveyor.spark.readers import JetStreamReader, JetStreamStreamReader
from purveyor.spark.task_tuning import freeze_imports
from purveyor.spark.writers import JetStreamStreamWriter, JetStreamWriter, check_columns

_TYPES = {
    "sequence": "bigint",
    "timestamp": "timestamp",
    "subject": "string",
    "headers": "map<string,array<string>>",
    "data": "binary",
}


class JetStreamDataSource(DataSource):
    """NATS JetStream as a table and as a stream. Name: `jetstream`.

    Columns read: `sequence` bigint, `timestamp`, `subject` string, `headers` map<string, array<string>>, `data` binary.

    Options for every use
        servers             nats://host:4222[,...], tls://...; default: the server that the environment names
        user, password      or token, or credentials (a .creds or nkey seed file, there on driver and executors)
        tlsCa, tlsCertificate, tlsKey, tlsHostname, tlsFirst
        patienceSeconds     how long the query waits for a lost server (60)

    Options to read
        stream              the stream (required)
        subjects            only these, comma-separated, wildcards allowed
        startingOffsets     earliest (default), latest, a sequence, or an ISO time
        endingOffsets       the same, for batch reads; a sequence is included, a time is not (latest)
        maxOffsetsPerTrigger  the most sequences in a micro-batch
        batchSeconds        about how long a micro-batch should take: with much to read, batches grow and shrink towards
                            it, up to maxOffsetsPerTrigger (or 500,000)
        minPartitions       the least number of tasks (1; one per 500,000 messages)
        failOnDataLoss      true: sequences gone before they were read are an error; false: a warning, counted as `lost`
                            in the offsets of the query's progress
        durable             a durable consumer of this name is moved as the query commits
        columns             only these columns: others are not read
        idleWaitMillis      how long a poll waits for a new message (500)
        holdSeconds         with durable: how long the stream keeps the messages of a batch that is done (0)
        syncCheckpoint      with durable: the path of the query's checkpoint on this machine, which is flushed to the
                            disk before the durable moves

    Columns written: `subject` string (or option), `data` binary or string, `headers`, `msg_id` string.

    Options to write
        stream              refuse messages that another stream would take
        subject             for rows without one
        orderBy             a column to sort the rows of each task by; it is not written
        delivery            auto (atomic batches if `stream` is named and allows it), atomic, pipelined

    Examples:
    >>> spark.read.format("jetstream").option("servers", url).option("stream", "ORDERS").load()  # doctest: +SKIP
    """

    @classmethod
    def name(cls) -> str:
        """Return the name for `.format(...)`."""
        return "jetstream"

    def schema(self) -> str:
        """Return all columns, or those of option `columns`."""
        return ", ".join(f"{name} {_TYPES[name]}" for name in self._read_settings().columns)

    def _read_settings(self) -> ReadSettings:
        return read_settings(self.options)

    def _with_schema(self, schema: StructType) -> ReadSettings:
        """Read only the columns of a schema that the user gave."""
        settings = self._read_settings()
        for field in schema.fields:
            if _TYPES.get(field.name) != field.dataType.simpleString():
                raise InvalidConfig(
                    f"the jetstream format has no column {field.name!r} of type {field.dataType.simpleString()}",
                    fix=f"choose from {', '.join(f'{name} {_TYPES[name]}' for name in COLUMNS)}",
                )
        names = tuple(field.name for field in schema.fields)
        if names != tuple(name for name in COLUMNS if name in names):
            raise InvalidConfig("the columns of a schema keep their order", fix=f"order: {', '.join(COLUMNS)}")
        return dataclasses.replace(settings, columns=names)

    def reader(self, schema: StructType) -> JetStreamReader:
        """Make the reader for `spark.read`."""
        return JetStreamReader(self._with_schema(schema))

    def streamReader(self, schema: StructType) -> JetStreamStreamReader:  # noqa: N802 - Spark's name
        """Make the reader for `spark.readStream`."""
        settings = self._with_schema(schema)
        if settings.ending is not NamedOffset.LATEST:
            raise InvalidConfig(
                "option endingOffsets is for batch reads", fix="leave it out; trigger(availableNow=True) ends a query"
            )
        return JetStreamStreamReader(settings)

    def writer(self, schema: StructType, overwrite: bool) -> JetStreamWriter:
        """Make the writer for `df.write`."""
        if overwrite:
            raise InvalidConfig("a stream cannot be overwritten", fix='use .mode("append")')
        settings = write_settings(self.options)
        check_columns(settings, schema)
        return JetStreamWriter(settings)

    def streamWriter(self, schema: StructType, overwrite: bool) -> JetStreamStreamWriter:  # noqa: N802 - Spark's name
        """Make the writer for `df.writeStream`. It appends, in any output mode."""
        del overwrite
        freeze_imports()  # Spark calls this in a worker twice for each micro-batch
        settings = write_settings(self.options)
        check_columns(settings, schema)
        return JetStreamStreamWriter(settings)

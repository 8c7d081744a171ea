"""A Spark job between two streams: orders become bills, one stream per step, each order billed once.

    spark-submit --py-files purveyor.zip job.py --servers nats://127.0.0.1:4222 --checkpoint /shared/checkpoints/bills

Reads stream ORDERS (subjects `orders.<country>`, JSON `{"customer": ..., "cents": ...}`) from where the last run ended,
and writes stream BILLS (subjects `bills.<country>`). It ends when it has billed what was there when it began.
"""

import argparse

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual alias

from purveyor.spark import register

TASKS = 2
"""How many tasks write: about as many as there are cores (Spark's default of 200 is for larger batches)."""


def bills(orders: DataFrame) -> DataFrame:
    """One bill for each order with an amount; the id names the order, so that a repetition is recognised."""
    order = F.from_json(F.col("data").cast("string"), "customer string, cents bigint")
    return (
        orders.withColumn("order", order)
        .where("order.cents > 0")
        .select(
            F.regexp_replace("subject", "^orders", "bills").alias("subject"),
            F.to_json(F.struct("order.customer", "order.cents", F.col("sequence").alias("order"))).alias("data"),
            F.concat(F.lit("ORDERS:"), F.col("sequence")).alias("msg_id"),
            "sequence",
        )
        .repartition(TASKS, "subject")  # the rows of a subject in one task; the sink sorts them
    )


def main() -> None:
    """One run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", required=True)
    parser.add_argument("--checkpoint", required=True, help="a directory that driver and executors reach")
    given = parser.parse_args()

    spark = SparkSession.builder.appName("bills").getOrCreate()
    register(spark)
    reading = spark.readStream.format("jetstream").options(servers=given.servers, stream="ORDERS")
    orders = reading.options(maxOffsetsPerTrigger=10_000, minPartitions=2).load()
    writing = bills(orders).writeStream.format("jetstream").options(servers=given.servers, stream="BILLS")
    query = writing.options(orderBy="sequence", checkpointLocation=given.checkpoint).trigger(availableNow=True).start()
    query.awaitTermination()

    written = spark.read.format("jetstream").options(servers=given.servers, stream="BILLS", columns="subject").load()
    written.groupBy("subject").count().orderBy("subject").show()
    spark.stop()


if __name__ == "__main__":
    main()

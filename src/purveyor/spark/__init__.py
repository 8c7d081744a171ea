"""Spark on JetStream: the `jetstream` data source and a session tuned for it. Usable without the rest of Purveyor.

Needs the extra `spark`.

from purveyor.spark import register, session

spark = session("orders")                    # or your own SparkSession
register(spark)
spark.read.format("jetstream").option("servers", url).option("stream", "ORDERS").load()
"""

from purveyor.model.extras import NeedsExtra

with NeedsExtra("purveyor.spark"):
    from purveyor.spark.progress import Progress, progress_of
    from purveyor.spark.session import register, session
    from purveyor.spark.source import JetStreamDataSource

__all__ = ["JetStreamDataSource", "Progress", "progress_of", "register", "session"]

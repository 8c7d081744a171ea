"""A user's own session, made as in Spark's documentation: copies a stream into another, and counts it by SQL.

`python -m tests.spark.plain_session URL SOURCE TARGET CHECKPOINT MASTER`
"""

import sys
from typing import Any

from pyspark.sql import SparkSession

from purveyor.spark import register


def main(url: str, source: str, target: str, checkpoint: str, master: str) -> None:
    small: dict[str, Any] = {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
    }
    spark = SparkSession.builder.master(master).config(map=small).getOrCreate()
    register(spark)
    stream = spark.readStream.format("jetstream").options(servers=url, stream=source).load()
    rows = stream.selectExpr(f"'{target}' as subject", "data", "concat('copy-', sequence) as msg_id")
    query = (
        rows.writeStream.format("jetstream")
        .options(servers=url, stream=target, checkpointLocation=checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    print("read", spark.read.format("jetstream").options(servers=url, stream=source).load().count())
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])

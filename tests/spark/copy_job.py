"""A program of its own, to be killed: copies a stream to one subject, in order, by the recipe of the guide.

Its arguments are one JSON object. It says which package its executors run, and ends when all that was there is copied.
"""

import json
import sys
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - the usual alias

from purveyor.spark import session
from tests.support.spark_session import QUIET


def recipe(frame: DataFrame, source: str, target: str) -> DataFrame:
    """Ids from the origin, one task for the target; the sink sorts by the position."""
    origin = F.concat(F.lit(f"{source}:"), F.col("sequence"))
    rows = frame.select(F.lit(target).alias("subject"), origin.alias("msg_id"), "data", "sequence")
    return rows.repartition(2, "subject")


def homes(spark: SparkSession) -> list[str]:
    """Where executors have the package from."""

    def look(_: int) -> str:
        import purveyor  # noqa: PLC0415 - on the executor

        return str(purveyor.__file__)

    return sorted(spark.sparkContext.parallelize(range(4), 4).map(look).distinct().collect())


def main(job: dict[str, Any]) -> None:
    spark = session("copy", master=job["master"], options={**QUIET, **job.get("spark", {})})
    spark.sparkContext.setLogLevel("OFF")
    if job["master"].startswith("local-cluster"):
        print(json.dumps({"homes": homes(spark)}), flush=True)
    reading = spark.readStream.format("jetstream").options(servers=job["servers"], stream=job["source"])
    frame = reading.options(maxOffsetsPerTrigger=job["batch"], minPartitions=3).load()
    writing = recipe(frame, job["source"], job["target"]).writeStream.format("jetstream")
    writing = writing.options(servers=job["servers"], orderBy="sequence", checkpointLocation=job["checkpoint"])
    writing.trigger(availableNow=True).start().awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

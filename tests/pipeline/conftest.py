"""Fixtures of the Spark session of this worker, which the tests of the data source use too."""

from tests.support.spark_session import broker, collector, follow, read, spark

__all__ = ["broker", "collector", "follow", "read", "spark"]

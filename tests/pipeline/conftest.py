"""The Spark session of the worker (the one that tests of the data source use) and its server, for tests of the flow."""

from tests.spark.conftest import broker, collector, follow, read, spark

__all__ = ["broker", "collector", "follow", "read", "spark"]

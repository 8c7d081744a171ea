"""What a user sees when something fails: the text of Spark's exception."""

from collections.abc import Callable

import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql.streaming.query import StreamingQuery


def said(action: Callable[[], object]) -> str:
    """What a call fails with."""
    with pytest.raises(PySparkException) as caught:
        action()
    return str(caught.value)


def failure(query: StreamingQuery) -> str:
    """What a query ends with."""
    with pytest.raises(StreamingQueryException) as caught:
        query.awaitTermination(120)
    return str(caught.value)

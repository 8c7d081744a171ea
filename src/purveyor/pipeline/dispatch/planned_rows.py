"""The rows that dispatch takes from the archive: what a message is, and who may get it."""

from typing import Final

from pyspark.sql import DataFrame

_LINES: Final = (
    "flatten(transform(map_entries(headers), "
    "each -> transform(each.value, value -> concat(each.key, ': ', value, '\\r\\n'))))"
)
_BLOCK: Final = f"if(cardinality(headers) > 0, concat('NATS/1.0\\r\\n', array_join({_LINES}, ''), '\\r\\n'), '')"


def archived(events: DataFrame) -> DataFrame:
    """The events of the archive, each as a pack of its own (see `packs`)."""
    return events.where("kind = 'event'").selectExpr(
        "position as portion",
        "subject",
        "realm",
        "topic",
        "array(position) as positions",
        "array(octet_length(data)) as ends",
        "data",
        f"array(octet_length({_BLOCK})) as header_ends",
        f"cast({_BLOCK} as binary) as headers",
    )

"""The queues of the transform on a server of one test, and a way to run the query over what is there."""

import asyncio
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from purveyor.jetstream.address import Address
from purveyor.pipeline.transform.transform_query import TransformSettings, start_transform
from purveyor.queues.catalogue import DEAD_LETTERS, LDIF, incoming
from purveyor.queues.client import connect
from tests.support.broker import Broker
from tests.support.waiting import PATIENCE_SECONDS

INCOMING = incoming()


class Flow:
    """Messages in, events and dead letters out."""

    def __init__(self, address: Address, spark: SparkSession, directory: Path) -> None:
        self.broker = Broker(address)
        self.spark = spark
        self.checkpoint = directory / "checkpoint"
        asyncio.run(self._ensure(address))

    async def _ensure(self, address: Address) -> None:
        async with connect(address) as queues:
            for queue in (LDIF, INCOMING, DEAD_LETTERS):
                (await queues.ensure(queue)).require_ready()

    def send(self, *bodies: bytes | str, source: str = "people") -> None:
        self.broker.add(f"ldif.{source}", bodies)

    def start(self, **settings: Any) -> StreamingQuery:
        given = {"checkpoint": str(self.checkpoint), "available_now": True, "hold_seconds": 0, **settings}
        return start_transform(self.spark, TransformSettings(address=self.broker.address, **given))

    def run(self, **settings: Any) -> None:
        """All that is there, then the end."""
        query = self.start(**settings)
        assert query.awaitTermination(PATIENCE_SECONDS)

    def events(self) -> list[dict[str, Any]]:
        """What lies in `incoming`, all of it or what is left."""
        return [json.loads(row["data"]) for row in self.rows()]

    def rows(self) -> list[dict[str, Any]]:
        return self.broker.rows(INCOMING.stream)

    def letters(self) -> list[dict[str, Any]]:
        """What was parked: body and headers."""
        return [
            {"data": row["data"], **{name: values[0] for name, values in row["headers"]}}
            for row in self.broker.rows(DEAD_LETTERS.stream)
        ]

    def consume(self, *durables: str) -> None:
        """As if these readers were done with everything in `incoming`."""
        last = self.broker.state(INCOMING.stream)["last_seq"]
        for durable in durables:
            self.broker.move(INCOMING.stream, durable, past=last)


def summary(events: Iterable[dict[str, Any]]) -> list[tuple[str, str | None, str | None]]:
    """Topic, old dn, new dn of each event."""
    return [(each["topic"], each["body"]["old"].get("dn"), each["body"]["new"].get("dn")) for each in events]

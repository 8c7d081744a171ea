"""Warms a pipeline up: some batches of each part, on queues that only this process uses.

The first batch of a query takes many times as long as the later ones: the JVM loads and compiles classes, Spark
generates code, Python workers start. All of that is a matter of the process and not of the queues. So `warm_up` starts
the same parts, by the same functions, on a NATS server of its own in a scratch directory, lets some messages go through
them, and stops them. Afterwards a part that starts on the real queues finds everything warm.

It has no effect on the real queues, checkpoints or archive, and none that a metric or a trace shows: the events match
no subscription, and the record is of an entry that the mapping ignores.
"""

import asyncio
import json
import logging
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from py4j.protocol import Py4JError  # type: ignore[import-untyped]  # Spark's bridge ships no types
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import outgoing, publish_many
from purveyor.jetstream.server import EmbeddedServer, ServerOptions
from purveyor.model.errors import PurveyorError
from purveyor.model.event import Event
from purveyor.model.registration import Record, RecordState
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.pipeline.event_sources import event_format, topic_batch_format
from purveyor.pipeline.part_starts import ensure_queues, start_part
from purveyor.pipeline.part_supervisor import RunningPart
from purveyor.pipeline.pipeline_settings import PartName, PipelineSettings
from purveyor.queues.client import connect
from purveyor.queues.registry import Registry
from purveyor.spark.pyspark_internals import clone_session
from purveyor.spark.session import is_local

_log = logging.getLogger(__name__)

ROUNDS: Final = 5
"""How many batches each query runs: in the first one everything is loaded, in the next ones the JVM compiles."""
_LONGEST_SECONDS: Final = 120.0
_POLL_SECONDS: Final = 0.02
_STOP_SECONDS: Final = 5.0
_ARCHIVE_SECONDS: Final = 0.2
_NAME: Final = "warm-up"
_MAPPING: Final = """\
realm = "warm-up"
unmatched = "ignore"

[[rule]]
any = ["inetOrgPerson"]
topic = "warm-up/entry"

[rule.properties]
cn = "string"
"""
_ENTRY: Final = {"dn": "cn=warm-up", "change": "content", "attributes": {"objectClass": ["device"]}, "line": 1}
_STREAMS: Final[Mapping[PartName, str]] = {
    PartName.TRANSFORM: "ldif",
    PartName.DISPATCH: "incoming",
    PartName.ARCHIVE: "incoming",
}
"""The queue that each streaming query reads. Prefill has none: it runs batch jobs, for which a second is not much."""


def warm_up(spark: SparkSession, parts: Sequence[PartName], scratch: Path, should_continue: Callable[[], bool]) -> bool:
    """Run the parts on queues of their own; return whether that was done. Never raises: a cold part works as well.

    Executors on other machines cannot reach those queues: there nothing is warmed up.
    """
    queries = [part for part in parts if part in _STREAMS]
    if not queries or not is_local(spark):
        return False
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(dir=scratch, prefix="warm-up-", ignore_cleanup_errors=True) as directory,
            EmbeddedServer(Path(directory) / "nats", ServerOptions(sync="2m")) as server,
        ):
            return _run(spark, queries, Path(directory), server.address, should_continue)
    except (PurveyorError, PySparkException, Py4JError, OSError) as error:
        _log.warning("the first batches will be slow, because the pipeline could not be warmed up: %s", error)
        return False


def _run(
    spark: SparkSession,
    parts: Sequence[PartName],
    directory: Path,
    address: Address,
    should_continue: Callable[[], bool],
) -> bool:
    mapping = directory / "mapping.toml"
    mapping.write_text(_MAPPING, encoding="utf-8")
    settings = PipelineSettings(
        data_dir=directory,
        find_address=lambda: address,
        parts=tuple(parts),
        mapping=mapping,
        archive_seconds=_ARCHIVE_SECONDS,
        is_rehearsal=True,
    )
    ensure_queues(settings)
    asyncio.run(_subscribe(address))
    for register in (event_format, topic_batch_format):
        register(spark)  # the clone knows them as well
    session = clone_session(spark)  # the queries of one session need different names
    running: dict[PartName, RunningPart] = {}
    deadline = time.monotonic() + _LONGEST_SECONDS

    def go_on() -> bool:
        return should_continue() and time.monotonic() < deadline

    try:
        for part in parts:
            running[part] = start_part(part, session, settings)
        return all(_pass_round(number, running, address, go_on) for number in range(ROUNDS))
    finally:
        for started in running.values():
            started.stop(_STOP_SECONDS)


async def _subscribe(address: Address) -> None:
    """Register a subscription that no event matches: so dispatch has a target, and writes nothing to it."""
    definition = Subscription(name=_NAME, realms_topics=(RealmTopic(_NAME, "other"), RealmTopic(_NAME, "others/.*")))
    now = datetime.now(UTC)
    record = Record(incarnation=str(uuid.uuid4()), definition=definition, created=now)
    async with connect(address, name="purveyor-warm-up") as queues:
        await (await Registry.open(queues)).create(replace(record, begin=1, state=RecordState.ACTIVE))


def _pass_round(
    number: int, running: Mapping[PartName, RunningPart], address: Address, go_on: Callable[[], bool]
) -> bool:
    """Send a message through each part; return whether all have passed it."""
    event = Event(publisher_name=_NAME, ts=datetime.now(UTC), realm=_NAME, topic=f"events/{number}", new={"id": number})
    messages = [("incoming", event.encode(), None, None), ("ldif.warm-up", json.dumps(_ENTRY).encode(), None, None)]
    ends = publish_many(address, outgoing(messages)).last_sequences
    while go_on():
        for part, started in running.items():
            if not started.is_alive():
                _log.warning("the %s of the warm-up ended: %s", part.value, started.failure())
                return False
        if all(_position(started) >= ends[f"stream:{_STREAMS[part]}"] for part, started in running.items()):
            return True
        time.sleep(_POLL_SECONDS)
    return False


def _position(started: RunningPart) -> int:
    progress = started.read()
    return 0 if progress is None or progress.position is None else progress.position

"""Read the records and dead letters of an import from the server."""

import json
from typing import Any

from purveyor.jetstream import ReadOptions, read_range
from purveyor.jetstream.address import Address
from purveyor.model.errors import UnknownStream
from purveyor.queues.catalogue import DEAD_LETTERS, LDIF
from purveyor.queues.client import Queues
from purveyor.queues.dead_letters.letter import DeadLetter
from purveyor.sources.ldif.importer import ImportCounts, Importer
from purveyor.sources.ldif.inputs import find_inputs
from purveyor.sources.ldif.queue_store import QueueStore


async def import_file(queues: Queues, target: object, source: str) -> ImportCounts:
    return await Importer(await QueueStore.open(queues)).run(find_inputs(str(target), source=source))


def stored(address: Address, source: str) -> list[dict[str, Any]]:
    """Return the records of a source in the queue, in order."""
    options = ReadOptions(subjects=(f"ldif.{source}",), columns=("data",))
    try:
        batches = list(read_range(address, LDIF.stream, 1, 1 << 40, options))
    except UnknownStream:
        return []
    return [json.loads(data) for batch in batches for data in batch.column("data").to_pylist()]


def names(address: Address, source: str) -> list[str]:
    """Return the DNs of records."""
    return [record["dn"] for record in stored(address, source)]


def expected(count: int, tag: str, *, first: int = 1) -> list[str]:
    """Return the DNs of `ldif_text.people`."""
    return [f"uid=u{number},ou={tag}" for number in range(first, first + count)]


def parked(address: Address, source: str) -> list[DeadLetter]:
    """Return the dead letters of a source."""
    options = ReadOptions(subjects=("dead-letters.intake",), columns=("headers", "data"))
    letters = [
        DeadLetter.from_message({name: tuple(values) for name, values in row["headers"]}, row["data"])
        for batch in read_range(address, DEAD_LETTERS.stream, 1, 1 << 40, options)
        for row in batch.to_pylist()
    ]
    return [letter for letter in letters if letter.subject == f"ldif.{source}"]

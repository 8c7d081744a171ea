"""LDIF: the parser compared with the simplest loop over the same bytes, an import with one publish at a time.

`python -m benchmarks.ldif_import` starts a server and prints the table. A rate is the best of several rounds in which
both variants alternate.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

from benchmarks.report import Row, Section, table
from purveyor.jetstream.address import Address
from purveyor.jetstream.server import EmbeddedServer, ServerOptions
from purveyor.queues.client import Queues, connect
from purveyor.sources.ldif.importer import Importer
from purveyor.sources.ldif.inputs import CHUNK_BYTES, find_inputs
from purveyor.sources.ldif.ldif_parser import parse_ldif
from purveyor.sources.ldif.queue_store import QueueStore
from purveyor.sources.ldif.records import Record, encode_record

RECORDS = 200_000
ROUNDS = 3


def entry(number: int, tag: str = "people") -> bytes:
    """Return a person of about 310 bytes, with one of its ten values in base64."""
    return (
        f"dn: uid=user{number},ou={tag},dc=example,dc=com\nobjectClass: top\nobjectClass: person\n"
        f"objectClass: inetOrgPerson\nuid: user{number}\ncn: User Number {number}\nsn: Number {number}\n"
        f"givenName: User\nmail: user{number}@example.com\ntelephoneNumber: +49 30 {number}\ndescription:: w4TDpMO8\n"
        f"entryUUID: 00000000-0000-0000-0000-{number:012d}\n\n"
    ).encode()


def run(address: Address, *, records: int = RECORDS) -> list[Section]:
    """Run all comparisons."""
    data = b"".join(entry(number) for number in range(records))
    parse = _best_rates({"ours": lambda: _parse(data), "peer": lambda: _plain_loop(data)}, records)
    few = max(records // 40, 1000)
    stored = _best_rates(
        {
            "ours": lambda: asyncio.run(_import(address, 10 * few)),
            "again": lambda: asyncio.run(_import(address, 10 * few, twice=True)),
            "peer": lambda: asyncio.run(_one_by_one(address, few)),
        },
        few,
    )
    rows = [
        Row("parse", parse["ours"], parse["peer"], "records/s", note=f"{records:,} records, {len(data) >> 20} MiB"),
        Row("import", 10 * stored["ours"], stored["peer"], "records/s", note="peer: publish, await, next"),
        Row("import again", 10 * stored["again"], 10 * stored["ours"], "records/s", note="peer: the first import"),
    ]
    text = (
        "`parse` is compared with a loop that only splits lines at their first colon. `import` reads a file, stores "
        "each record once and enters it into the ledger; its peer is the same parser with an awaited publish for "
        "each record. `import again` finds all records known."
    )
    return [Section("LDIF import", text, rows)]


def _best_rates(variants: dict[str, Callable[[], float]], count: int) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for _ in range(ROUNDS):
        for name, measure in variants.items():
            seconds[name] = min(measure(), seconds.get(name, float("inf")))
    return {name: count / best for name, best in seconds.items()}


def _chunks(data: bytes) -> Iterator[bytes]:
    return (data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES))


def _parse(data: bytes) -> float:
    began = time.perf_counter()
    assert all(isinstance(item, Record) for item in parse_ldif(_chunks(data)))
    return time.perf_counter() - began


def _plain_loop(data: bytes) -> float:
    began = time.perf_counter()
    record: list[list[bytes]] = []
    for line in data.split(b"\n"):
        if line:
            record.append(line.split(b":", 1))
        else:
            record = []
    return time.perf_counter() - began


async def _import(address: Address, count: int, *, twice: bool = False) -> float:
    tag = uuid4().hex
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "people.ldif"
        file.write_bytes(b"".join(entry(number, tag) for number in range(count)))
        async with connect(address) as queues:
            first = await _timed_import(queues, file)
            return await _timed_import(queues, file) if twice else first


async def _timed_import(queues: Queues, file: Path) -> float:
    store = await QueueStore.open(queues)
    began = time.perf_counter()
    await Importer(store).run(find_inputs(str(file)))
    return time.perf_counter() - began


async def _one_by_one(address: Address, count: int) -> float:
    tag = uuid4().hex
    data = b"".join(entry(number, tag) for number in range(count))
    async with connect(address) as queues:
        began = time.perf_counter()
        for number, item in enumerate(parse_ldif([data])):
            assert isinstance(item, Record)
            await queues.publish("ldif.people", encode_record(item), msg_id=f"{tag}-{number}")
        return time.perf_counter() - began


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as directory,
        EmbeddedServer(Path(directory) / "store", ServerOptions(sync="2m")) as server,
    ):
        for section in run(server.address):
            print(table(section))


if __name__ == "__main__":
    main()

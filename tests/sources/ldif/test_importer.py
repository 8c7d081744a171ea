"""Each record is stored in the queue once and in order, despite failures of the file, the import or the server."""

import asyncio
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from purveyor.jetstream import PublishReport, ServerOptions, publish_many
from purveyor.jetstream.address import Address
from purveyor.model.errors import InvalidInput, OutcomeUnknown, ServerUnavailable
from purveyor.queues.catalogue import LDIF
from purveyor.queues.client import Queues, connect
from purveyor.sources.ldif.importer import Importer, ImportListener
from purveyor.sources.ldif.inputs import Input, InputChange, find_inputs
from purveyor.sources.ldif.ldif_parser import parse_ldif
from purveyor.sources.ldif.queue_store import BLOCK_RECORDS, Block, BlockResult, ImportLedger, QueueStore, RecordIdChain
from purveyor.sources.ldif.records import BrokenRecord
from tests.support.ldif_queue import expected, import_file, names, parked, stored
from tests.support.ldif_text import people, person
from tests.support.nats_servers import OwnServer
from tests.support.proxy import TcpProxy
from tests.support.scale import pick
from tests.support.waiting import until

MANY = 2 * BLOCK_RECORDS + BLOCK_RECORDS // 2


async def test_a_file_is_imported_once_and_in_order(
    queues: Queues, address: Address, unique: str, tmp_path: Path
) -> None:
    file = tmp_path / "people.ldif"
    file.write_bytes(people(MANY, unique))
    first = await import_file(queues, file, unique)
    assert (first.added, first.known, first.broken, first.records) == (MANY, 0, 0, MANY)
    assert first.position == (await queues.streams.get_last(LDIF.stream, f"ldif.{unique}")).sequence
    again = await import_file(queues, file.rename(tmp_path / "other.ldif"), unique)
    assert (again.added, again.known, again.position) == (0, MANY, None)
    assert names(address, unique) == expected(MANY, unique)


async def test_an_import_of_a_grown_file_continues_where_it_ended(
    queues: Queues, address: Address, unique: str, tmp_path: Path
) -> None:
    file = tmp_path / "people.ldif"
    total = 0
    for more in (3, 1, BLOCK_RECORDS - 4, BLOCK_RECORDS + 7, 0, 5):
        with file.open("ab") as end:
            end.write(people(more, unique, first=total + 1))
        tally = await import_file(queues, file, unique)
        assert (tally.added, tally.known) == (more, total)
        total += more
    assert names(address, unique) == expected(total, unique)


async def test_a_beginning_of_what_was_imported_adds_nothing(
    queues: Queues, address: Address, unique: str, tmp_path: Path
) -> None:
    file = tmp_path / "people.ldif"
    file.write_bytes(people(MANY, unique))
    await import_file(queues, file, unique)
    for count in (1, BLOCK_RECORDS - 1, BLOCK_RECORDS, BLOCK_RECORDS + 3):
        file.write_bytes(people(count, unique))
        assert (await import_file(queues, file, unique)).added == 0
    file.write_bytes(people(BLOCK_RECORDS + 3, unique) + person(1, f"{unique}-else"))
    assert (await import_file(queues, file, unique)).added == 1, "another continuation is another record"
    assert names(address, unique) == [*expected(MANY, unique), f"uid=u1,ou={unique}-else"]


async def test_the_ledger_remembers_for_longer_than_the_server(own_server: OwnServer, tmp_path: Path) -> None:
    """The deduplication window of the server is 100 ms here."""
    server = own_server()
    file = tmp_path / "people.ldif"
    file.write_bytes(people(20))
    async with connect(server.address) as queues:
        await QueueStore.open(queues)
        await queues.streams.update(LDIF.stream, {"duplicate_window": 100_000_000})
        await import_file(queues, file, "people")

        async def forgotten() -> bool:
            return not (await queues.publish("ldif.probe", msg_id="probe")).duplicate

        assert await forgotten()
        await until(forgotten)
        file.write_bytes(people(25))
        assert (await import_file(queues, file, "people")).added == 5
        assert names(server.address, "people") == expected(25, "people")

        # BlockResult and not noted, as after a crash between the two: seen from the newest message of the source.
        await queues.streams.remove("KV_imports")
        tally = await import_file(queues, file, "people")
        assert (tally.added, tally.known) == (0, 25)


async def test_after_a_crash_before_the_ledger_entry_ids_prevent_duplicates(
    queues: Queues, address: Address, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Crash(Exception):
        pass

    async def crash(*_: object) -> None:
        raise Crash

    file = tmp_path / "people.ldif"
    file.write_bytes(people(BLOCK_RECORDS + 10, unique) + b"rubbish\n\n")
    with monkeypatch.context() as patch:
        patch.setattr(ImportLedger, "add", crash)
        with pytest.raises(Crash):
            await import_file(queues, file, unique)
    # Under another source the newest message tells nothing: here it is the server that recognises the ids.
    tally = await Importer(await QueueStore.open(queues)).run(find_inputs(str(file), source=f"{unique}-2"))
    assert (tally.added, tally.known, tally.broken) == (10, BLOCK_RECORDS, 1)
    assert names(address, unique) == expected(BLOCK_RECORDS, unique)
    assert names(address, f"{unique}-2") == expected(10, unique, first=BLOCK_RECORDS + 1)


async def test_broken_records_become_dead_letters_with_line_and_reason(
    queues: Queues, address: Address, unique: str, tmp_path: Path
) -> None:
    reported: list[BrokenRecord] = []
    file = tmp_path / "people.ldif"
    file.write_bytes(person(1, unique) + b"dn: cn=bad\r\ncn:: !\r\n\r\n" + b"rubbish\xff\0\n\n" * 2 + person(2, unique))
    importer = Importer(
        await QueueStore.open(queues), listener=ImportListener(on_broken=lambda _, broken: reported.append(broken))
    )
    tally = await importer.run(find_inputs(str(file), source=unique))
    assert (tally.added, tally.broken) == (2, 3)
    assert names(address, unique) == expected(2, unique)
    letters = parked(address, unique)
    assert [letter.details["line"] for letter in letters] == [6, 9, 11] == [broken.line for broken in reported]
    assert [letter.data for letter in letters] == [b"dn: cn=bad\r\ncn:: !", *[b"rubbish\xff\0"] * 2]
    assert "base64" in letters[0].reason
    assert (await import_file(queues, file, unique)).known == 5
    assert len(parked(address, unique)) == 3


async def test_a_record_too_large_for_a_message_becomes_a_truncated_dead_letter(
    own_server: OwnServer, tmp_path: Path
) -> None:
    server = own_server(ServerOptions(sync="2m", max_payload=20_000))
    file = tmp_path / "people.ldif"
    # The second grows above the limit as JSON only, the third is above it as it is.
    texts = [b"dn: cn=%d\ncn: " % number + b"\x01" * size for number, size in ((1, 1000), (2, 5000), (3, 90_000))]
    file.write_bytes(b"\n\n".join(texts) + b"\n\n" + person(4))
    async with connect(server.address) as queues:
        tally = await import_file(queues, file, "people")
        assert (tally.added, tally.broken) == (2, 2)
        assert [record["dn"] for record in stored(server.address, "people")] == ["cn=1", "uid=u4,ou=people"]
        small, large = parked(server.address, "people")
        assert "the server takes 20000" in small.reason
        assert small.data == texts[1]
        assert "larger than 20000" in large.reason
        assert texts[2].startswith(large.data)
        assert large.details["bytes"] == len(texts[2])
        assert large.details["cut_from_bytes"] == 20_000
        assert (await import_file(queues, file, "people")).known == 4


async def test_two_imports_of_one_file_at_once(queues: Queues, address: Address, unique: str, tmp_path: Path) -> None:
    file = tmp_path / "people.ldif"
    file.write_bytes(people(3 * BLOCK_RECORDS, unique))
    tallies = await asyncio.gather(*(import_file(queues, file, unique) for _ in range(3)))
    assert sum(tally.added for tally in tallies) == 3 * BLOCK_RECORDS
    assert names(address, unique) == expected(3 * BLOCK_RECORDS, unique)
    assert (await import_file(queues, file, unique)).added == 0


async def test_concurrent_ledger_entries_are_all_kept(queues: Queues, unique: str) -> None:
    ledger = await ImportLedger.open(queues, replicas=1)
    chain = RecordIdChain()
    links = [chain.append(item) for item in parse_ldif([people(10, unique)])]
    ids = [link.id for link in links]
    await asyncio.gather(*(ledger.add(Block(ids), [link]) for link in links))
    assert [await ledger.count_known(Block(ids[:count])) for count in range(1, 11)] == list(range(1, 11))


async def test_large_records_do_not_wait_for_a_block_to_fill(
    queues: Queues, address: Address, unique: str, tmp_path: Path
) -> None:
    """Memory is bounded by bytes, not only by the number of records; the block is still one in the ledger."""
    photo = b"x" * (1 << 20)
    file = tmp_path / "photos.ldif"
    file.write_bytes(
        b"".join(b"dn: uid=u%d,ou=%s\njpegPhoto: %s\n\n" % (n, unique.encode(), photo) for n in range(1, 21))
    )
    waited: list[int] = []

    class Counting(QueueStore):
        async def put(self, block: Block, subject: str) -> BlockResult:
            waited.append(block.waiting_bytes)
            return await super().put(block, subject)

    store = await Counting.open(queues)
    assert (await Importer(store).run(find_inputs(str(file), source=unique))).added == 20
    assert len(waited) == 3
    assert max(waited) < 10 << 20
    assert names(address, unique) == expected(20, unique)
    assert (await import_file(queues, file, unique)).known == 20


@pytest.mark.chaos
async def test_the_import_waits_for_an_unavailable_server(address: Address, unique: str, tmp_path: Path) -> None:
    count, outage = pick(8, 40) * BLOCK_RECORDS, pick(1.0, 30.0)
    file = tmp_path / "people.ldif"
    file.write_bytes(people(count, unique))
    with TcpProxy(*address.hosts()[0]) as proxy:
        async with connect(proxy.address(address), patience_seconds=2) as queues:
            store = await QueueStore.open(queues, wait_for_ever=True)
            importer = Importer(store)
            running = asyncio.ensure_future(importer.run(find_inputs(str(file), source=unique)))
            for share in (count // 4, count // 2):
                await until(partial(_has_added, importer, share))
                proxy.refuse()
                threading.Timer(outage, proxy.restore).start()
                await until(lambda: proxy.open > 0)
            tally = await running
    assert tally.added + tally.known == count
    assert names(address, unique) == expected(count, unique)


async def test_without_patience_an_unavailable_server_is_an_error_and_the_next_import_continues(
    address: Address, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "people.ldif"
    file.write_bytes(people(4 * BLOCK_RECORDS, unique))
    with TcpProxy(*address.hosts()[0]) as proxy:
        async with connect(proxy.address(address), patience_seconds=2) as queues:
            store = await QueueStore.open(queues)
            monkeypatch.setattr(store, "_patience_seconds", 0.2)
            put = store.put

            async def cut(*given: object) -> object:
                result = await put(*given)  # type: ignore[arg-type]
                proxy.refuse()
                return result

            monkeypatch.setattr(store, "put", cut)
            importer = Importer(store)
            with pytest.raises(ServerUnavailable):
                await importer.run(find_inputs(str(file), source=unique))
            assert importer.counts.added == BLOCK_RECORDS
    async with connect(address) as queues:
        assert (await import_file(queues, file, unique)).added == 3 * BLOCK_RECORDS
    assert names(address, unique) == expected(4 * BLOCK_RECORDS, unique)


@pytest.mark.parametrize("reached", [True, False], ids=["stored", "not stored"])
async def test_an_unknown_outcome_is_settled_by_the_newest_message(
    queues: Queues, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reached: bool
) -> None:
    """As after an outage during a batch that is longer than the deduplication window."""
    file = tmp_path / "people.ldif"
    file.write_bytes(people(5, unique))
    await import_file(queues, file, unique)
    failures = [OutcomeUnknown("away for long")]

    def publish(*given: Any) -> PublishReport:
        report = publish_many(*given) if reached or not failures else None
        if failures:
            raise failures.pop()
        assert report is not None
        return report

    monkeypatch.setattr("purveyor.sources.ldif.queue_store.publish_many", publish)
    file.write_bytes(people(9, unique))
    tally = await import_file(queues, file, unique)
    assert (tally.added, tally.known) == (4, 5)
    assert tally.position == (await queues.streams.get_last(LDIF.stream, f"ldif.{unique}")).sequence
    assert names(queues.address, unique) == expected(9, unique)


async def test_an_outcome_that_cannot_be_known_is_an_error(
    queues: Queues, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def publish(*_: object) -> None:
        raise OutcomeUnknown("away for long")

    file = tmp_path / "people.ldif"
    file.write_bytes(people(5, unique))
    monkeypatch.setattr("purveyor.sources.ldif.queue_store.publish_many", publish)
    with pytest.raises(OutcomeUnknown):
        await import_file(queues, file, unique)


async def test_a_directory_is_read_in_the_order_of_names(
    queues: Queues, address: Address, unique: str, tmp_path: Path
) -> None:
    for number in (3, 1, 2):
        (tmp_path / f"{number}.ldif").write_bytes(person(number, unique))
    (tmp_path / "0.txt").write_bytes(person(9, unique))
    (tmp_path / "4.ldif").mkdir()
    tally = await import_file(queues, tmp_path, unique)
    assert (tally.files, tally.added) == (3, 3)
    assert names(address, unique) == expected(3, unique)


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n\0\0", b"a line\n\n" * 300], ids=["binary", "text"])
async def test_a_file_that_is_not_ldif_is_refused_as_a_whole(
    queues: Queues, address: Address, unique: str, tmp_path: Path, content: bytes
) -> None:
    file = tmp_path / "photo.ldif"
    file.write_bytes(content)
    with pytest.raises(InvalidInput, match="does not look like LDIF"):
        await import_file(queues, file, unique)
    assert parked(address, unique) == []


def _has_added(importer: Importer, count: int) -> bool:
    return importer.counts.added + importer.counts.known >= count


class Following:
    """An import that follows a file."""

    def __init__(self, store: QueueStore, file: Path, source: str) -> None:
        self.marks: list[InputChange] = []
        self.file = file
        listener = ImportListener(on_change=self._mark)
        self.importer = Importer(store, follow=True, listener=listener)
        self._running = asyncio.ensure_future(self.importer.run(find_inputs(str(file), source=source)))

    def _mark(self, _given: Input, mark: InputChange) -> None:
        self.marks.append(mark)

    def append(self, text: bytes) -> None:
        with self.file.open("ab") as end:
            end.write(text)

    async def added(self, count: int) -> None:
        await until(lambda: self.importer.counts.added + self.importer.counts.broken >= count or self._running.done())

    async def stop(self) -> None:
        self.importer.stop()
        await self._running


async def test_a_growing_file_is_followed_record_by_record(
    queues: Queues, address: Address, unique: str, tmp_path: Path
) -> None:
    file = tmp_path / "log.ldif"
    file.write_bytes(people(2, unique))
    following = Following(await QueueStore.open(queues), file, unique)
    await following.added(2)
    following.append(person(3, unique)[:-1])  # complete but for its empty line: it could still go on
    following.append(b"mail: x\n\n" + person(4, unique)[:30])
    await following.added(3)
    assert following.importer.counts.added == 3
    following.append(person(4, unique)[30:] + people(BLOCK_RECORDS, unique, first=5))
    await following.added(4 + BLOCK_RECORDS)
    following.append(person(0, "half")[:-1])
    await following.stop()
    records = stored(address, unique)
    assert [record["dn"] for record in records] == expected(4 + BLOCK_RECORDS, unique)
    assert records[2]["attributes"]["mail"] == ["x"]
    assert (await import_file(queues, file, unique)).added == 1


async def test_a_followed_file_may_be_rotated_or_truncated(
    queues: Queues, address: Address, unique: str, tmp_path: Path
) -> None:
    file = tmp_path / "log.ldif"
    file.write_bytes(people(2, unique))
    following = Following(await QueueStore.open(queues), file, unique)
    await following.added(2)
    following.append(person(3, unique).rstrip())
    file.rename(tmp_path / "log.ldif.1")
    file.write_bytes(people(2, unique, first=4))
    await following.added(5)
    assert following.marks == [InputChange.ROTATED]
    following.append(b"dn: cn=half\n")
    file.write_bytes(b"")
    await until(lambda: len(following.marks) == 2)
    following.append(person(6, unique))
    before = following.importer.counts.broken
    await following.added(6 + before)
    assert following.marks == [InputChange.ROTATED, InputChange.TRUNCATED]
    await following.stop()
    assert names(address, unique) == expected(6, unique)


async def test_the_next_import_continues_after_a_stop(
    queues: Queues, address: Address, unique: str, tmp_path: Path
) -> None:
    file = tmp_path / "people.ldif"
    file.write_bytes(people(6 * BLOCK_RECORDS, unique))
    importer = Importer(await QueueStore.open(queues))
    running = asyncio.ensure_future(importer.run(find_inputs(str(file), source=unique)))
    await until(lambda: importer.counts.added > 0)
    importer.stop()
    tally = await running
    assert tally.stopped
    assert 0 < tally.added < 6 * BLOCK_RECORDS
    assert (await import_file(queues, file, unique)).known == tally.added
    assert names(address, unique) == expected(6 * BLOCK_RECORDS, unique)


async def test_records_without_an_answer_are_counted_when_the_import_is_stopped(
    address: Address, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "people.ldif"
    file.write_bytes(people(1, unique))
    with TcpProxy(*address.hosts()[0]) as proxy:
        async with connect(proxy.address(address)) as queues:
            store = await QueueStore.open(queues)
            put, sending = store.put, asyncio.Event()

            async def watched(*given: object) -> object:
                sending.set()
                return await put(*given)  # type: ignore[arg-type]

            monkeypatch.setattr(store, "put", watched)
            importer = Importer(store)
            proxy.refuse()
            running = asyncio.create_task(importer.run(find_inputs(str(file), source=unique)))
            await sending.wait()
            importer.stop()
            counts = await running
    assert (counts.added, counts.unanswered, counts.stopped) == (0, 1, True)

"""Every published message is archived, each position once, whatever is killed, retried, removed or malformed."""

import asyncio
import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the usual alias

from purveyor.jetstream.address import Address
from purveyor.model.errors import UnreadableRecord
from purveyor.pipeline.archive import maintenance, writer
from purveyor.pipeline.archive.layout import EVENTS, FORMAT, RANGES
from purveyor.pipeline.archive.range_store import RangeStore
from purveyor.pipeline.archive.reader import as_archived, events
from purveyor.pipeline.job_failures import park_once
from purveyor.queues.catalogue import DEAD_LETTERS
from purveyor.queues.client import connect
from purveyor.spark.checkpoint_files import committed_offset
from tests.support.archive import Archive, event
from tests.support.forgetting import forget_ids_now
from tests.support.waiting import PATIENCE_SECONDS, wait_until

DUPLICATE_WINDOW_NANOSECONDS = 120_000_000_000
"""The default of the server."""


class Crash(Exception):
    """Stands for a kill at a named step."""


def break_at(archive: Archive, monkeypatch: pytest.MonkeyPatch, step: str, error: Exception) -> None:
    """The store of queries that are started from here on fails after a step."""

    def fail(done: str) -> None:
        if done == step:
            raise error

    monkeypatch.setattr(writer, "RangeStore", lambda directory: RangeStore(directory, on_step=fail))


def test_every_message_is_archived_with_its_position_and_bytes(archive: Archive) -> None:
    archive.broker.add(archive.stream, [(archive.stream, event("a").encode(), {"Trace": "1"}, "id-1")])
    archive.publish(event("b", topic="groups/group"), "no JSON", b"\xff\xfe")
    archive.catch_up()
    rows = {row.position: row for row in archive.spark.read.parquet(str(archive.directory / EVENTS / "*")).collect()}
    assert [rows[n].kind for n in (1, 2, 3, 4)] == ["event", "event", "invalid", "invalid"]
    assert (rows[1].realm, rows[1].topic, rows[1].key, rows[1].id) == ("udm", "users/user", "a", "id-1")
    assert (rows[1].publisher_name, rows[1].operation, rows[1].headers["Trace"]) == ("test", "create", ["1"])
    assert bytes(rows[1].data) == event("a").encode()
    assert bytes(rows[4].data) == b"\xff\xfe"
    assert rows[3].realm is None


def test_ranges_join_and_other_programs_read_the_directory(archive: Archive) -> None:
    archive.publish(*(event(str(number)) for number in range(25)))
    archive.catch_up(max_offsets=10)
    assert archive.ranges() == [(1, 10), (11, 20), (21, 25)]
    assert archive.lying() == list(range(1, 26))


def test_positions_whose_messages_were_removed_are_covered(archive: Archive) -> None:
    archive.publish(*(event(str(number)) for number in range(30)))
    archive.broker.delete(archive.stream, 1, 2, 9, 10, *range(11, 21), 30)
    archive.catch_up(max_offsets=10)
    covered = [position for first, last in archive.ranges() for position in range(first, last + 1)]
    assert covered == list(range(1, 31))
    assert len(archive.ranges()) == 3
    assert archive.lying() == archive.positions() == [*range(3, 9), *range(21, 30)]


@pytest.mark.parametrize("step", ["drafted", "linked", f"renamed {RANGES}", f"renamed {EVENTS}"])
def test_a_batch_that_breaks_at_any_step_is_archived_once(
    archive: Archive, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    archive.publish(*(event(str(number)) for number in range(10)))
    with monkeypatch.context() as patch:
        break_at(archive, patch, step, Crash(step))
        with archive.running() as query, pytest.raises(StreamingQueryException, match="Crash"):
            query.awaitTermination(PATIENCE_SECONDS)
    archive.publish(event("more"))
    archive.catch_up()
    assert archive.lying() == archive.positions() == list(range(1, 12))
    assert archive.ranges() == [(1, 10), (11, 11)]


def test_a_full_disk_fails_the_batch_and_the_next_start_continues(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive.publish(event("a"))
    with monkeypatch.context() as patch:
        break_at(archive, patch, "drafted", OSError(errno.ENOSPC, "No space left on device"))
        with archive.running() as query, pytest.raises(StreamingQueryException, match="No space left"):
            query.awaitTermination(PATIENCE_SECONDS)
    assert list((archive.directory / RANGES).iterdir()) == []
    archive.catch_up()
    assert archive.lying() == [1]


def test_without_its_checkpoint_the_query_continues_behind_the_archive(archive: Archive) -> None:
    archive.publish(event("a"), event("b"))
    archive.catch_up()
    archive.publish(event("c"))
    archive.catch_up(checkpoint=archive.settings.checkpoint.with_name("another"))
    assert archive.ranges() == [(1, 2), (3, 3)]
    assert archive.lying() == [1, 2, 3]


def test_another_batch_limit_after_a_crash_makes_no_doubles(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    archive.publish(*(event(str(number)) for number in range(10)))
    with monkeypatch.context() as patch:
        break_at(archive, patch, f"renamed {RANGES}", Crash("now"))
        with archive.running(max_offsets=4) as query, pytest.raises(StreamingQueryException):
            query.awaitTermination(PATIENCE_SECONDS)
    archive.catch_up(max_offsets=7, checkpoint=archive.settings.checkpoint.with_name("another"))
    assert archive.lying() == archive.positions() == list(range(1, 11))


def test_two_writers_never_archive_a_position_twice(archive: Archive) -> None:
    archive.add(1, 2, event("a"), event("b"))
    with pytest.raises(Exception, match="another process has archived"):
        archive.add(1, 2, event("a"), event("b"))
    assert archive.lying() == [1, 2]


def test_a_message_of_five_megabytes_is_archived(archive: Archive) -> None:
    big = event("big", {"id": "big", "photo": "x" * 5_000_000})
    archive.publish(big)
    archive.catch_up()
    (row,) = archive.spark.read.parquet(str(archive.directory / EVENTS / "*")).collect()
    assert (row.kind, row.key, bytes(row.data)) == ("event", "big", big.encode())


def test_the_stream_is_released_when_the_hold_is_over_and_not_before(archive: Archive) -> None:
    archive.publish(*(event(str(number)) for number in range(5)))
    archive.catch_up(hold_seconds=3600.0)
    assert archive.broker.state(archive.stream)["messages"] == 5
    with archive.running():
        wait_until(lambda: archive.broker.state(archive.stream)["messages"] == 0)
    assert archive.positions() == [1, 2, 3, 4, 5]


def test_nothing_is_released_that_spark_may_run_again(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    archive.publish(event("a"))
    break_at(archive, monkeypatch, f"renamed {EVENTS}", Crash("archived, not noted"))
    with archive.running() as query, pytest.raises(StreamingQueryException):
        query.awaitTermination(PATIENCE_SECONDS)
    assert archive.until() == 1
    assert committed_offset(archive.settings.checkpoint) is None
    assert archive.broker.state(archive.stream)["messages"] == 1


def test_a_failed_compaction_does_not_stop_the_release(
    archive: Archive, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("Job aborted\nand a page of its stack trace")

    monkeypatch.setattr(maintenance, "compact", fail)
    monkeypatch.setattr(maintenance, "_COMPACTION_INTERVAL_SECONDS", 0.0)
    with archive.running():
        wait_until(lambda: "Job aborted" in caplog.text)
        archive.publish(event("a"), event("b"))
        wait_until(lambda: archive.broker.floor(archive.stream, archive.settings.durable) == 2)
    assert "stack trace" not in caplog.text


def test_spark_leaves_no_files_in_the_archive(archive: Archive) -> None:
    archive.publish(event("a"))
    archive.catch_up()
    names = {path.name for path in Path(archive.directory / EVENTS).rglob("*")}
    assert names == {f"{1:020}-{1:020}", "part-00000.parquet"}


@pytest.mark.parametrize("text", ['{"version": 2}', '{"version": 1, "zone": "eu"}', "no JSON"])
def test_an_archive_of_a_newer_program_is_left_as_it_is(archive: Archive, text: str) -> None:
    archive.add(1, 2, event("a"), event("b"))
    archive.publish(event("a"), event("b"), event("c"))
    current = (archive.directory / FORMAT).read_text()
    (archive.directory / FORMAT).write_text(text)
    before = sorted(archive.directory.rglob("*"))
    with pytest.raises(UnreadableRecord, match="upgrade"):
        archive.positions()
    with pytest.raises(UnreadableRecord, match="upgrade"), archive.running():
        pass
    with pytest.raises(UnreadableRecord, match="upgrade"):  # one that was opened before
        archive.store.clean_up(grace_seconds=0.0)
    assert sorted(archive.directory.rglob("*")) == before
    assert (archive.directory / FORMAT).read_text() == text

    (archive.directory / FORMAT).write_text(current)
    archive.catch_up()
    assert archive.positions() == archive.lying() == [1, 2, 3]


def test_an_archive_from_before_there_were_versions_is_read_and_gets_one(archive: Archive) -> None:
    archive.add(1, 2, event("a"), event("b"))
    (archive.directory / FORMAT).unlink()
    assert archive.positions() == [1, 2]
    archive.store.clean_up()
    assert json.loads((archive.directory / FORMAT).read_text()) == {"version": 1}


class Poisoned:
    """Makes the archive fail on a position: as an event, or in any form; in all attempts, or in some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, position: int, *, whole: bool = False, left: int = -1) -> None:
        self.left = left
        self._bad = F.col("sequence") == position
        if not whole:
            self._bad &= F.col("realm").isNotNull()
        monkeypatch.setattr(writer, "as_archived", self._as_archived)

    def _as_archived(self, incoming: DataFrame) -> DataFrame:
        if self.left and incoming.filter(self._bad).count():
            self.left -= 1
            failing = F.when(self._bad, F.raise_error(F.lit("poison")))
            incoming = incoming.withColumn("subject", F.coalesce(failing.cast("string"), "subject"))
        return as_archived(incoming)


def letters(archive: Archive) -> list[dict[str, list[str]]]:
    """The headers of the dead letters about messages of this archive."""
    found = [dict(row["headers"]) for row in archive.broker.rows(DEAD_LETTERS.stream)]
    return [headers for headers in found if headers["Purveyor-Subject"] == [archive.stream]]


@pytest.fixture
def dead_letters(archive: Archive) -> Iterator[None]:
    """Provide the queue of dead letters, empty, and restore its configuration: other tests use the same server."""

    async def ensure() -> None:
        async with connect(archive.broker.address) as queues:
            (await queues.ensure(DEAD_LETTERS)).require_ready()

    asyncio.run(ensure())
    archive.broker.purge(DEAD_LETTERS.stream)
    yield
    archive.broker.update(DEAD_LETTERS.stream, duplicate_window=DUPLICATE_WINDOW_NANOSECONDS)


def test_a_message_on_which_the_archive_fails_is_archived_unchanged(
    archive: Archive, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    archive.publish(*(event(str(number)) for number in range(5)))
    Poisoned(monkeypatch, 2)
    archive.catch_up()
    rows = {row.position: row for row in events(archive.spark, archive.source, 1, 5).collect()}
    assert [rows[position].kind for position in range(1, 6)] == ["event", "invalid", "event", "event", "event"]
    assert bytes(rows[2].data) == event("1").encode()
    assert archive.lying() == [1, 2, 3, 4, 5]
    assert "position 2 is archived unchanged" in caplog.text
    assert "cannot be archived at all" not in caplog.text


@pytest.mark.usefixtures("dead_letters")
def test_a_message_that_cannot_be_archived_at_all_is_parked_once_and_keeps_back_no_other(
    archive: Archive, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    archive.publish(event("a"), event("b"), event("c"))
    Poisoned(monkeypatch, 2, whole=True)

    def park_and_crash(address: Address, message: dict[str, Any], reason: str) -> None:
        assert park_once(address, message, reason)
        raise Crash("parked, not covered")

    with monkeypatch.context() as patch:
        patch.setattr(writer, "park_once", park_and_crash)
        with archive.running() as query, pytest.raises(StreamingQueryException, match="Crash"):
            query.awaitTermination(PATIENCE_SECONDS)
    assert archive.ranges() == [(1, 1)]
    forget_ids_now(archive.broker.address, DEAD_LETTERS.stream, "dead-letters.probe")
    archive.catch_up()
    assert archive.lying() == [1, 3]
    assert archive.until() == 3
    assert "position 2 cannot be archived at all" in caplog.text
    [letter] = letters(archive)
    assert (letter["Purveyor-Origin"], letter["Purveyor-Parked-Position"]) == (["incoming"], ["2"])
    assert letter["Purveyor-Reason"][0].startswith("the archive fails on this message, and goes on without it: ")


def test_a_message_that_fails_once_is_archived_as_an_event(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    archive.publish(event("a"))
    poisoned = Poisoned(monkeypatch, 1, left=1)
    archive.catch_up()
    assert poisoned.left == 0
    assert [row.kind for row in events(archive.spark, archive.source, 1, 1).collect()] == ["event"]

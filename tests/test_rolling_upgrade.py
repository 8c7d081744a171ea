"""A rolling upgrade: programs of two versions work beside each other, and meet what the newer one stored.

For each kind of stored record, one of a later version and one with a field that nobody here knows are written beside
current ones. The one thing that the record is about stops and says so, all else goes on, the record stays as it is, and
nothing is lost: when it is understood again (it is written as the current version), everything arrives in order, once.

What needs Spark, the API or a push worker is tested beside the part that it is about; `ELSEWHERE` names where.
"""

import importlib
import json
import pkgutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import purveyor
from purveyor.delivery.credentials import BUCKET as CREDENTIALS
from purveyor.delivery.credentials import Credentials, PasswordHasher, password_key, token_key
from purveyor.delivery.dead_letters.service import DeadLetterFilter, DeadLetters, open_dead_letters
from purveyor.delivery.pull import open_pull
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import Target, append_once
from purveyor.jetstream.config import Retention
from purveyor.jetstream.headers import POSITION
from purveyor.jetstream.key_value import Bucket, BucketConfig
from purveyor.jetstream.maintenance import BUCKET as MIGRATIONS
from purveyor.jetstream.maintenance import record_key
from purveyor.jetstream.server import EmbeddedServer
from purveyor.model.errors import AlreadyExists, UnreadableRecord
from purveyor.model.json_fields import Kind
from purveyor.model.registration import PrefillState, PrefillStatus
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.queues.catalogue import DEAD_LETTERS, LDIF, Queue, Reader
from purveyor.queues.client import Queues, connect
from purveyor.queues.dead_letters import letter as dead_letters
from purveyor.queues.dead_letters.letter import DeadLetter, park
from purveyor.queues.dead_letters.store import RESOLUTION_HEADER, DeadLetterStore, receipt_subject
from purveyor.queues.ensure import Action
from purveyor.queues.migration import snapshot_files as stream_archive
from purveyor.queues.migration.plan import Strategy
from purveyor.queues.migration.record import QueueStatus
from purveyor.queues.migration.record import Record as MigrationRecord
from purveyor.queues.permissions import TOPICS
from purveyor.queues.registry import ACKNOWLEDGED, SUBSCRIPTIONS, Registry
from purveyor.queues.sync_client import restore_queue
from purveyor.sources.ldif.ldif_parser import parse_ldif as read_ldif
from purveyor.sources.ldif.queue_store import BUCKET as IMPORTS
from purveyor.sources.ldif.queue_store import Block, ImportLedger, RecordIdChain
from purveyor.sources.schemas.registry import NewSchema, SchemaCache, SchemaRegistry
from purveyor.sources.schemas.schema import SchemaType, Topic
from tests.support.nats_servers import FAST

TESTS = Path(__file__).parent
HASHER = PasswordHasher()
UNKNOWN = pytest.mark.parametrize("unknown", [{"version": 2}, {"zone": "eu"}], ids=["version", "field"])
ELSEWHERE = {
    "control event": "pipeline/dispatch/test_upgrade.py::test_where_a_control_event_is_not_understood",
    "job": "pipeline/prefill/test_worker.py::test_a_job_of_a_newer_program_waits_for_an_upgrade",
    "dispatch state": "pipeline/dispatch/test_upgrade.py::test_a_dispatch_state_that_is_not_understood",
    "archive": "pipeline/archive/test_writer.py::test_an_archive_of_a_newer_program_is_left_as_it_is",
    "offset in the checkpoint": "pipeline/dispatch/test_upgrade.py::test_a_checkpoint_of_a_newer_program",
    "index of a map in the transform's checkpoint": "pipeline/transform/test_directory_pages.py::test_a_directory",
    "record of a live source in the transform's checkpoint": "pipeline/transform/test_sync_state.py::test_a_record_of",
    "state of a source": "sources/ldap/test_source_runner.py::test_a_state_of_a_newer_version_stops_this_source",
    "lease of a source": "sources/ldap/test_source_store.py::test_a_lease_of_a_newer_version_stops_its_source",
    "note of the synced batch": "spark/test_checkpoint_files.py::test_a_note_of_a_newer_version_stops_the_part",
    "list of blocked keys": "delivery/push/test_upgrade.py::test_blocked_keys_that_are_not_understood",
    "list of push attempts": "delivery/push/test_upgrade.py::test_attempts_that_are_not_understood",
    "record of push attempts": "delivery/push/test_attempt_history.py::test_a_log_of_a_newer_version_is_left_as_it_is",
    "push problem": "delivery/push/test_upgrade.py::test_a_problem_that_is_not_understood",
}
"""Tests of other files, by the kind of record that they are about."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A server of these tests alone: they leave records that others do not understand."""
    with EmbeddedServer(tmp_path_factory.mktemp("upgrade") / "store", FAST) as started:
        yield started


@pytest.fixture
def address(server: EmbeddedServer) -> Address:
    return server.address


@pytest.fixture
async def queues(address: Address) -> AsyncIterator[Queues]:
    async with connect(address, name="tests", patience_seconds=20) as connected:
        yield connected


@dataclass(frozen=True)
class RecordCase:
    """Two things of a kind. `use` uses one of them, and returns the result."""

    bucket: Bucket
    key: str
    """Of the record of the first."""
    use: Callable[[str], Awaitable[object]]
    one: str
    other: str
    expected: object
    """The result for the first, when its record is understood."""


Make = Callable[[Queues, str], Awaitable[RecordCase]]
MAKERS: dict[str, Make] = {}


def case(kind: str) -> Callable[[Make], Make]:
    """Register a case for records of a kind."""

    def take(make: Make) -> Make:
        MAKERS[kind] = make
        return make

    return take


def definition(name: str, *, prefill: bool = False) -> Subscription:
    return Subscription(name=name, realms_topics=(RealmTopic("udm", "users/user"),), request_prefill=prefill)


async def subscribe(queues: Queues, unique: str, *, prefill: bool = False) -> tuple[str, str]:
    """Two subscriptions whose queues hold three messages each."""
    names = f"{unique}-one", f"{unique}-other"
    for name in names:
        await Subscriptions(queues).add(definition(name, prefill=prefill))
        for number in (1, 2, 3):
            headers = {POSITION: str(1_000_000 + number)}
            await queues.publish(f"{name}.main", str(number).encode(), headers=headers)
    return names


async def drain(queues: Queues, name: str) -> list[str]:
    """What a consumer gets of a subscription, until nothing waits."""
    got = []
    async with open_pull(queues) as pull:
        while (message := await pull.next(name)) is not None:
            got.append(message.data.decode())
            await pull.acknowledge(name, message.sequence)
    return got


async def delivery(queues: Queues, unique: str, bucket: str, part: str, *, prefill: bool = False) -> RecordCase:
    one, other = await subscribe(queues, unique, prefill=prefill)
    if prefill:
        registry = await Registry.open(queues)
        for name in (one, other):
            found = await registry.get(name)
            done = PrefillState(incarnation=found.incarnation, status=PrefillStatus.DONE, position=1)
            await registry.put_prefill(name, done, found.prefill_revision)
    async with open_pull(queues) as pull:  # one message is acknowledged before
        message = await pull.next(one)
        assert message is not None
        await pull.acknowledge(one, message.sequence)
    key = f"{one}.{part}" if part else one
    return RecordCase(await queues.bucket(bucket), key, lambda name: drain(queues, name), one, other, ["2", "3"])


@case("subscription record")
async def _record(queues: Queues, unique: str) -> RecordCase:
    return await delivery(queues, unique, SUBSCRIPTIONS, "definition")


@case("prefill state")
async def _prefill(queues: Queues, unique: str) -> RecordCase:
    return await delivery(queues, unique, SUBSCRIPTIONS, "prefill", prefill=True)


@case("delivery state")
async def _delivery_state(queues: Queues, unique: str) -> RecordCase:
    return await delivery(queues, unique, ACKNOWLEDGED, "")


@case("waiting replay")
async def _waiting_replay(queues: Queues, unique: str) -> RecordCase:
    """A replay that waits is not forgotten, and no other is accepted. What the worker does is tested beside it."""
    subscriptions = Subscriptions(queues)
    one, other = await subscribe(queues, unique)
    job = await subscriptions.replay(one, 1)

    async def ask(name: str) -> str:
        try:
            await subscriptions.replay(name, 1)
        except AlreadyExists as error:
            return error.message
        return "accepted"

    refused = f"a replay of subscription {one!r} waits already, job {job.job}"
    return RecordCase(await queues.bucket(SUBSCRIPTIONS), f"{one}.replay", ask, one, other, refused)


@case("stored job")
async def _stored_job(queues: Queues, unique: str) -> RecordCase:
    """No other job is stored while it is unknown where the first is; that one is on the queue."""
    subscriptions = Subscriptions(queues)
    one, other = await subscribe(queues, unique, prefill=True)

    async def ask(name: str) -> int:
        return (await subscriptions.request_prefill(name)).attempt

    return RecordCase(await queues.bucket(SUBSCRIPTIONS), f"{one}.prefill-job", ask, one, other, 1)


@case("schema")
async def _schema(queues: Queues, unique: str) -> RecordCase:
    """An event that its schema refuses is refused, and not accepted unseen."""
    schemas = SchemaRegistry(queues)
    for name in ("one", "other"):
        await schemas.add(
            NewSchema(
                name=f"{unique}-{name}",
                type=SchemaType.JSON_SCHEMA,
                definition={"required": ["id"]},
                realms_topics=(RealmTopic(unique, name),),
            )
        )
    bucket = await queues.bucket(TOPICS)
    return RecordCase(
        bucket, f"schema.{unique}-one", lambda topic: accept(queues, unique, topic), "one", "other", "one"
    )


@case("topic")
async def _topic(queues: Queues, unique: str) -> RecordCase:
    schemas = SchemaRegistry(queues)
    topics = [Topic(realm=unique, topic=name, since=datetime.now(UTC), declared=True) for name in ("one", "other")]
    for topic in topics:
        await schemas.declare(topic)
    bucket = await queues.bucket(TOPICS)
    return RecordCase(bucket, topics[0].key, lambda topic: accept(queues, unique, topic), "one", "other", "one")


async def accept(queues: Queues, realm: str, topic: str) -> str:
    """An event, checked as the API does it."""
    about = {"publisher_name": "p", "ts": "2026-01-01T00:00:00Z", "realm": realm, "topic": topic}
    schema_cache = SchemaCache(queues)
    async with schema_cache.following():
        event, _ = schema_cache.validator.read({**about, "body": {"new": {"id": 1}}})
        return event.topic


@case("password")
async def _password(queues: Queues, unique: str) -> RecordCase:
    credentials = Credentials(queues, HASHER)
    for name in ("one", "other"):
        await credentials.set_first_password(f"{unique}-{name}", name, "secret")

    async def log_in(name: str) -> str | None:
        opened = await credentials.check_password(f"{unique}-{name}", "secret")
        return None if opened is None else opened.incarnation

    return RecordCase(await queues.bucket(CREDENTIALS), password_key(f"{unique}-one"), log_in, "one", "other", "one")


@case("token")
async def _token(queues: Queues, unique: str) -> RecordCase:
    credentials = Credentials(queues, HASHER)
    made = {name: await credentials.add_token(unique, name) for name in ("one", "other")}

    async def log_in(name: str) -> str | None:
        listed = {token.incarnation for token in await credentials.tokens(unique)}
        assert "other" in listed  # a list of all goes on as well
        found = await credentials.check_token(made[name][1])
        return None if found is None else found.incarnation

    return RecordCase(await queues.bucket(CREDENTIALS), token_key(made["one"][0].id), log_in, "one", "other", "one")


@case("record of a migration")
async def _migration(queues: Queues, unique: str) -> RecordCase:
    """A queue whose stream is gone in the middle of its migration must not be made as if it were new."""
    bucket = await queues.bucket(BucketConfig(name=MIGRATIONS))
    record = MigrationRecord(
        queue=f"{unique}-one",
        stream=f"stream:{unique}-one",
        strategy=Strategy.DRAIN,
        created="then",
        target={},
        durables=(),
        done=True,
    )
    await bucket.put(record_key(f"{unique}-one"), record.encode())

    async def ensure(name: str) -> QueueStatus:
        return (await queues.ensure(queue(f"{unique}-{name}"))).status

    return RecordCase(bucket, record_key(f"{unique}-one"), ensure, "one", "other", QueueStatus.READY)


def queue(name: str) -> Queue:
    return Queue(
        name=name,
        purpose="a test",
        subjects=(name,),
        retention=Retention.WORK_QUEUE,
        writer="test",
        readers=(Reader(durable="reader", used_by="test"),),
    )


@UNKNOWN
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
async def test_a_record_of_a_newer_program_stops_one_thing_and_is_left_as_it_is(
    queues: Queues, unique: str, make: Make, unknown: dict[str, Any]
) -> None:
    made = await make(queues, unique)
    understood = (await made.bucket.get(made.key)).value
    newer = json.dumps({**json.loads(understood), **unknown}).encode()
    revision = await made.bucket.put(made.key, newer)

    with pytest.raises(UnreadableRecord, match=r"version 2|'zone'") as refused:
        await made.use(made.one)
    assert "upgrade this program" in str(refused.value)
    await made.use(made.other)
    left = await made.bucket.get(made.key)
    assert (left.revision, left.value) == (revision, newer)

    await made.bucket.put(made.key, understood)
    assert await made.use(made.one) == made.expected


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
async def test_a_record_from_before_there_were_versions_is_understood(queues: Queues, unique: str, make: Make) -> None:
    made = await make(queues, unique)
    current = json.loads((await made.bucket.get(made.key)).value)
    assert current.pop("version") == 1
    await made.bucket.put(made.key, json.dumps(current).encode())
    assert await made.use(made.one) == made.expected


@UNKNOWN
@pytest.mark.parametrize("part", ["definition", "dispatch", "prefill"])
async def test_what_is_not_understood_of_a_subscription_is_listed_and_never_changed(
    queues: Queues, unique: str, part: str, unknown: dict[str, Any]
) -> None:
    subscriptions = Subscriptions(queues)
    one, other = await subscribe(queues, unique)
    bucket = await queues.bucket(SUBSCRIPTIONS)
    newer = await newer_part(queues, one, part, unknown)
    revision = await bucket.put(f"{one}.{part}", newer)

    found = await subscriptions.list()
    assert other in found.subscriptions
    assert found.unreadable[one].incarnation == json.loads(newer)["incarnation"]
    assert next(iter(unknown)) in found.unreadable[one].reason
    refused: list[Awaitable[object]] = [subscriptions.get(one), subscriptions.delete(one)]
    if part == "definition":
        refused += [subscriptions.pause(one), subscriptions.resume(one), subscriptions.replay(one, 1)]
        refused += [subscriptions.add(definition(one)), subscriptions.add(definition(one, prefill=True))]
    for work in refused:
        with pytest.raises(UnreadableRecord):
            await work
    if part == "dispatch":  # no concern of a consumer
        assert await drain(queues, one) == ["1", "2", "3"]
    assert (await bucket.get(f"{one}.{part}")).revision == revision


async def newer_part(queues: Queues, name: str, part: str, unknown: dict[str, Any]) -> bytes:
    """A part of a subscription as a newer program would write it."""
    incarnation = (await (await Registry.open(queues)).get(name, ())).incarnation
    current: dict[str, Any] = {
        "definition": json.loads((await (await queues.bucket(SUBSCRIPTIONS)).get(f"{name}.definition")).value),
        "dispatch": {"incarnation": incarnation, "next": 7, "suspended": None},
        "prefill": PrefillState(incarnation=incarnation, status=PrefillStatus.DONE, position=1).to_json(),
    }
    return json.dumps({**current[part], **unknown}).encode()


@pytest.mark.parametrize("damage", [None, b"no JSON", b'{"version": 2}'])
async def test_an_operator_can_delete_what_is_not_understood(queues: Queues, unique: str, damage: bytes | None) -> None:
    subscriptions = Subscriptions(queues)
    one, _ = await subscribe(queues, unique)
    await drain(queues, one)
    bucket, books = await queues.bucket(SUBSCRIPTIONS), await queues.bucket(ACKNOWLEDGED)
    await bucket.put(f"{one}.dispatch", await newer_part(queues, one, "dispatch", {"version": 2}))
    await bucket.put(f"{one}.replay", damage or b'{"version": 2}')
    await books.put(one, json.dumps({**json.loads((await books.get(one)).value), "version": 2}).encode())
    await bucket.put(f"{one}.definition", damage or await newer_part(queues, one, "definition", {"version": 2}))

    with pytest.raises(UnreadableRecord):
        await subscriptions.delete(one)
    await subscriptions.delete(one, force=True)

    assert one not in (await subscriptions.list()).unreadable
    assert f"stream:{one}" not in await queues.streams.names()
    assert [key for key in await bucket.keys(f"{one}.>") if not key.endswith(".sequence")] == []
    record, created = await subscriptions.add(definition(one))
    assert created
    assert record.begin is not None
    assert await drain(queues, one) == []


@UNKNOWN
async def test_a_writer_does_not_write_behind_a_delivery_state_that_is_not_understood(
    queues: Queues, address: Address, unique: str, unknown: dict[str, Any]
) -> None:
    """What was acknowledged is not in the queue any more: it would be written again. A field is no concern of it."""
    one, other = await subscribe(queues, unique)
    await drain(queues, one)
    books = await queues.bucket(ACKNOWLEDGED)
    understood = (await books.get(one)).value
    await books.put(one, json.dumps({**json.loads(understood), **unknown}).encode())
    rows = pa.table({"position": [1_000_003, 1_000_004], "data": [b"3", b"4"], "msg_id": ["a", "b"]})

    def write(name: str) -> Any:
        floor = f"$KV.{ACKNOWLEDGED}.{name}"
        target = Target(
            subject=f"{name}.main", stream=f"stream:{name}", floor_subject=floor, floor_stream=f"KV_{ACKNOWLEDGED}"
        )
        [outcome] = append_once(address, [(target, rows)])
        return outcome

    refused = write(one).refused
    assert write(other).refused is None
    if "version" in unknown:
        assert "upgrade this program" in refused.reason
        await books.put(one, understood)
        assert write(one).refused is None
    await books.put(one, understood)
    assert await drain(queues, one) == ["4"]


async def test_a_queue_is_not_made_again_where_it_is_not_understood_how_far_it_was(
    queues: Queues, address: Address, unique: str
) -> None:
    """Its sequences would begin anew, and count as acknowledged."""
    one, other = await subscribe(queues, unique)
    bucket, books = await queues.bucket(SUBSCRIPTIONS), await queues.bucket(ACKNOWLEDGED)
    await drain(queues, one)
    for name in (one, other):
        await queues.streams.remove(f"stream:{name}")
    book = json.loads((await books.get(one)).value)
    for where, key, newer, understood in (
        (bucket, f"{one}.sequence", b"v2 17", b"17"),
        (books, one, json.dumps({**book, "version": 2}).encode(), json.dumps(book).encode()),
    ):
        await where.put(key, newer)
        with pytest.raises(UnreadableRecord):
            restore_queue(address, one, "i")
        assert (await where.get(key)).value == newer
        await where.put(key, understood)
    restore_queue(address, other, "i")
    restore_queue(address, one, "i")
    assert ((await queues.streams.info(f"stream:{one}")).config.first_seq or 0) > 17


@pytest.fixture
async def letters(queues: Queues) -> AsyncIterator[DeadLetters]:
    async with open_dead_letters(queues) as opened:
        yield opened


def letter(text: str, unique: str) -> DeadLetter:
    now = datetime.now(UTC)
    subject = f"ldif.{unique[:50]}"
    return DeadLetter(
        reason="no good", origin=unique[:50], subject=subject, data=text.encode(), failed_first=now, failed_last=now
    )


async def test_a_dead_letter_of_a_newer_program_is_listed_and_stays(
    queues: Queues, letters: DeadLetters, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in (DEAD_LETTERS, LDIF):
        await queues.ensure(each)
    subject, data, headers = letter("newer", unique).to_message()
    newer = await queues.publish(subject, data, headers={**headers, "Purveyor-Letter-Version": "2"})
    current = await park(queues, letter("current", unique))
    choice = DeadLetterFilter(origin=unique[:50])

    listed = (await letters.list(DeadLetterFilter(ids=(newer.sequence, current.sequence)))).letters
    assert ["version 2" in each.reason for each in listed] == [True, False]
    for deal in (letters.retry, letters.discard):
        report = await deal(DeadLetterFilter(ids=(newer.sequence,)))
        assert (report.done, [each.id for each in report.failed]) == (0, [newer.sequence])
        assert "upgrade this program" in report.failed[0].message
    assert (await letters.retry(DeadLetterFilter(ids=(current.sequence,)))).done == 1

    monkeypatch.setattr(dead_letters, "LETTER", Kind("dead letter", version=2))  # this program is upgraded
    assert (await letters.retry(DeadLetterFilter(ids=(newer.sequence,)))).done == 1
    assert (await letters.list(choice)).letters == ()


async def test_what_a_newer_program_decided_about_a_dead_letter_stands(
    queues: Queues, letters: DeadLetters, unique: str
) -> None:
    await queues.ensure(DEAD_LETTERS)
    await queues.ensure(LDIF)
    parked = await DeadLetterStore(queues).find((await park(queues, letter("one", unique))).sequence)
    assert parked is not None
    await queues.publish(receipt_subject(parked), headers={RESOLUTION_HEADER: "postponed"})
    for deal in (letters.retry, letters.discard):
        report = await deal(DeadLetterFilter(ids=(parked.id,)))
        assert (report.done, [each.id for each in report.failed]) == (0, [parked.id])
        assert "postponed" in report.failed[0].message
    assert await DeadLetterStore(queues).find(parked.id) is not None


async def test_a_queue_that_a_newer_program_has_migrated_is_used_as_it_is(queues: Queues, unique: str) -> None:
    """One that is as declared needs no record; one that is not is left alone."""
    declared = queue(unique)
    await queues.ensure(declared)
    bucket = await queues.bucket(BucketConfig(name=MIGRATIONS))
    revision = await bucket.put(record_key(unique), b'{"version": 2}')
    found = await queues.ensure(declared)
    assert (found.status, found.action) == (QueueStatus.READY, Action.NOTHING)
    await queues.consumers.remove(declared.stream, "reader")
    with pytest.raises(UnreadableRecord):
        await queues.ensure(declared)
    assert (await bucket.get(record_key(unique))).revision == revision


@UNKNOWN
async def test_the_archive_of_a_stream_that_is_not_understood_is_not_replaced(
    queues: Queues, tmp_path: Path, unknown: dict[str, Any]
) -> None:
    path = tmp_path / "ox-then"
    path.mkdir()
    (path / "stream.tar.s2").write_bytes(b"data")
    fields = {
        "stream": "stream:ox",
        "created": "then",
        "config": {},
        "state": {},
        "bytes": 4,
        "sha256": "",
        "consumers": {},
    }
    (path / "manifest.json").write_text(json.dumps({**fields, **unknown}))
    with pytest.raises(UnreadableRecord, match="upgrade"):
        stream_archive.read_manifest(path)
    with pytest.raises(UnreadableRecord, match="upgrade"):
        await stream_archive.download_snapshot(queues.migrations._api, "stream:ox", path, {}, lambda _: None)
    stream_archive.remove_other_archives(tmp_path, "stream:ox", tmp_path / "other")
    assert (path / "stream.tar.s2").read_bytes() == b"data"
    (path / "manifest.json").write_text(json.dumps(fields))
    assert stream_archive.read_manifest(path) is not None


async def test_a_block_of_the_ledger_that_is_not_understood_is_not_imported_twice(queues: Queues, unique: str) -> None:
    ledger = await ImportLedger.open(queues, replicas=1)
    bucket = await queues.bucket(IMPORTS)
    blocks = [block(f"dn: cn={unique}-{number}\ncn: a\n\n") for number in (1, 2)]
    for each in blocks:
        await ledger.add(each, each.waiting)
    understood = (await bucket.get(blocks[0].key)).value
    revision = await bucket.put(blocks[0].key, b"v2" + understood)
    for work in (ledger.count_known(blocks[0]), ledger.add(blocks[0], blocks[0].waiting)):
        with pytest.raises(UnreadableRecord, match="upgrade"):
            await work
    assert (await bucket.get(blocks[0].key)).revision == revision
    assert await ledger.count_known(blocks[1]) == 1
    await bucket.put(blocks[0].key, understood)
    assert await ledger.count_known(blocks[0]) == 1


def block(ldif: str) -> Block:
    chain, made = RecordIdChain(), Block()
    for item in read_ldif([ldif.encode()]):
        made.append(chain.append(item))
    return made


def test_every_kind_of_stored_record_is_tested_here_or_elsewhere() -> None:
    kinds = {"dead letter", "manifest of a stream's archive", *MAKERS, *ELSEWHERE}
    assert {kind.what for kind in stored_kinds()} == kinds
    for place in ELSEWHERE.values():
        file, _, name = place.partition("::")
        assert f"def {name}" in (TESTS / file).read_text(), place


def stored_kinds() -> Iterator[Kind]:
    """All that the packages of Purveyor declare."""
    for module in pkgutil.walk_packages(purveyor.__path__, "purveyor."):
        if module.name.rpartition(".")[2] != "__main__":
            found = vars(importlib.import_module(module.name)).values()
            yield from (each for each in found if isinstance(each, Kind))

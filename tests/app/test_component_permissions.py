"""Each component works under its own NATS user, and is refused, with a clear error, what is not its work."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from purveyor.app.telemetry.queue_metrics import QueueMetrics, RegistrySnapshots
from purveyor.delivery.credentials import BUCKET as CREDENTIALS_BUCKET
from purveyor.delivery.credentials import Credentials, PasswordHasher
from purveyor.delivery.dead_letters.service import DeadLetterFilter, open_dead_letters
from purveyor.delivery.pull import open_pull
from purveyor.delivery.push.push_request import SecretCipher
from purveyor.delivery.push.push_worker import PushOptions, PushWorker
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream import ServerOptions, Target, append_once, publish_many, read_range
from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import outgoing
from purveyor.jetstream.config import ConsumerConfig
from purveyor.jetstream.headers import POSITION
from purveyor.jetstream.maintenance import BUCKET as MIGRATIONS_BUCKET
from purveyor.jetstream.server import EmbeddedServer, find_running_server
from purveyor.jetstream.streams import PageRequest, read_page
from purveyor.model.control_events import CatchUpJob
from purveyor.model.delivery_state import SubjectKind
from purveyor.model.errors import PermissionDenied
from purveyor.model.event import LDIF_SUBJECT, Event
from purveyor.model.registration import DispatchState
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.pipeline.dispatch.topic_prefill import begin_prefill
from purveyor.queues.catalogue import DEAD_LETTERS, LDIF, PREFILL, RECEIPTS, incoming, internal_queues
from purveyor.queues.client import Queues, connect
from purveyor.queues.dead_letters.store import DeadLetterStore
from purveyor.queues.permissions import (
    API,
    CREDENTIALS,
    IMPORTS,
    MIGRATIONS,
    PIPELINE,
    PUSH,
    SOURCES,
    STAGES,
    component_users,
    stages_user,
    subscription_user,
)
from purveyor.queues.registry import ACKNOWLEDGED
from purveyor.queues.status_board import read_notices, write_notice
from purveyor.queues.sync_client import put_job_once, read_subscriptions, restore_queue, update_dispatch
from purveyor.sources.http_events import EventPublisher, IncomingEvent
from purveyor.sources.ldif.queue_store import BUCKET as IMPORTS_BUCKET
from purveyor.sources.schemas.registry import SchemaCache
from purveyor.sources.schemas.schema import Topic
from purveyor.stages import Context, Retry, SqlStore, Stages, SubscriptionSource
from tests.support.delivery import definition
from tests.support.ldif_queue import import_file
from tests.support.ldif_text import people
from tests.support.nats_servers import FAST
from tests.support.waiting import until

EVENT = Event.decode(
    b'{"publisher_name": "t", "ts": "2026-01-01T00:00:00Z", "realm": "udm", "topic": "users/user",'
    b' "body": {"old": {}, "new": {"uuid": "u-1"}}}'
)
INCOMING = incoming().stream
Asked = Callable[[Queues], Awaitable[object]]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """One server with the users of all components, and of two subscriptions."""
    users = (*component_users(), subscription_user("ox"), subscription_user("other"), stages_user("ox"))
    options = ServerOptions(sync=FAST.sync, users=users)
    with EmbeddedServer(tmp_path / "nats", options) as started:
        yield started


@pytest.fixture
def as_user(server: EmbeddedServer) -> Callable[[str], Address]:
    def address(user: str) -> Address:
        found = find_running_server(server.directory, user)
        assert found is not None
        return found

    return address


@asynccontextmanager
async def connected(address: Address) -> AsyncIterator[Queues]:
    async with connect(address, patience_seconds=300) as queues:
        yield queues


async def refused(queues: Queues, *asked: Asked) -> None:
    """Each is denied, and none of them is waited for until patience ends."""
    for each in asked:
        with pytest.raises(PermissionDenied):
            await asyncio.wait_for(_done(each(queues)), 120)


def listens(subject: str, queues: Queues) -> Awaitable[object]:
    return queues.connection.subscribe(subject, confirm=True)


async def _done(work: Awaitable[object]) -> object:
    return await work


def row(position: int, data: bytes) -> pa.Table:
    headers = pa.array([[(POSITION, [str(position)])]], pa.map_(pa.string(), pa.list_(pa.string())))
    return pa.table({"position": [position], "msg_id": [f"p{position}"], "headers": headers, "data": [data]})


def target(name: str, incarnation: str) -> Target:
    """As dispatch makes it."""
    return Target(
        subject=f"{name}.main",
        stream=f"stream:{name}",
        floor=0,
        floor_subject=f"$KV.{ACKNOWLEDGED}.{name}",
        floor_stream=f"KV_{ACKNOWLEDGED}",
        floor_tag=incarnation,
    )


def test_the_buckets_are_those_of_their_owners() -> None:
    assert (CREDENTIALS, IMPORTS, MIGRATIONS) == (CREDENTIALS_BUCKET, IMPORTS_BUCKET, MIGRATIONS_BUCKET)


async def test_intake_imports_and_does_nothing_else(as_user: Callable[[str], Address], tmp_path: Path) -> None:
    file = tmp_path / "people.ldif"
    file.write_bytes(people(5, "components") + b"dn: broken\nno colon here\n\n")
    address = as_user(SOURCES)
    async with connected(address) as queues:
        tally = await import_file(queues, file, "components")
        assert (tally.added, tally.broken) == (5, 1)
        await refused(
            queues,
            lambda it: it.publish("incoming", b"{}", msg_id="x"),
            lambda it: it.streams.get(INCOMING, 1),
            lambda it: it.streams.purge(LDIF.stream),
            lambda it: it.streams.remove(LDIF.stream),
            lambda it: it.consumers.remove(LDIF.stream, "transformer"),
            lambda it: it.bucket(CREDENTIALS),
            lambda it: it.connection.subscribe("ldif.>", confirm=True),
            lambda it: it.connection.subscribe("_INBOX.>", confirm=True),
        )
    with pytest.raises(PermissionDenied, match="incoming"):
        publish_many(address, outgoing([("incoming", b"{}", None, "1")]))


def accepted(identity: str) -> IncomingEvent:
    return IncomingEvent(EVENT, identity, EVENT.encode())


def with_topic(topic: str) -> Callable[[Subscription], Subscription]:
    return lambda now: replace(now, realms_topics=(RealmTopic("udm", topic),))


async def test_the_api_serves_subscriptions_and_reads_no_internal_queue(as_user: Callable[[str], Address]) -> None:
    async with connected(as_user(API)) as queues, open_pull(queues) as pull:
        record, _ = await Subscriptions(queues).add(definition("served", prefill=False))
        publisher = EventPublisher(queues)
        assert (await publisher.publish(accepted("e-1"), "events")).sequence > 0
        assert (await publisher.publish_batch([accepted("e-2"), accepted("e-3")], "events")).stored == 2
        hasher = PasswordHasher()
        credentials = Credentials(queues, hasher)
        assert await credentials.set_first_password("served", record.incarnation, "secret")
        assert await credentials.check_password("served", "secret")
        hasher.close()
        schema_cache = SchemaCache(queues)
        async with schema_cache.following():
            topic = Topic(realm="udm", topic="users/user", since=datetime.now(UTC), declared=True)
            await schema_cache.registry.declare(topic)
            assert (await schema_cache.registry.list()).topics == {topic.key: topic}

        [outcome] = append_once(as_user(PIPELINE), [(target("served", record.incarnation), row(9, b'{"n": 1}'))])
        assert (outcome.stored, outcome.refused) == (1, None)
        [message] = await pull.lease("served", timeout=60)
        await pull.acknowledge("served", message.sequence)
        await refused(
            queues,
            lambda it: it.streams.get(INCOMING, 1),
            lambda it: read_page(it, INCOMING, PageRequest(subject="incoming")),
            lambda it: it.streams.remove(INCOMING),
            lambda it: it.streams.purge("KV_credentials"),
            lambda it: it.publish("incoming.ldif", b"{}", msg_id="x"),
            lambda it: it.publish("served.main", b"{}", msg_id="x"),
            lambda it: it.bucket(IMPORTS),
            *(partial(listens, subject) for subject in ("incoming.*", "_INBOX.*", "*.*", ">", "$JS.>", "$KV.>")),
        )
        for topic_name in ("users/.*", "groups/.*"):  # the second one reads which changes every dispatcher has passed
            await Subscriptions(queues).redefine("served", with_topic(topic_name), prefill_new_topics=True)
        await Subscriptions(queues).delete("served")
        publisher.close()


async def test_the_pipeline_writes_queues_and_sees_no_password(as_user: Callable[[str], Address]) -> None:
    address = as_user(PIPELINE)
    async with connected(as_user(API)) as api:
        record, _ = await Subscriptions(api).add(definition("piped", prefill=True))
        assert (await Subscriptions(api).request_prefill("piped")).attempt == 1  # its job is there
    found = read_subscriptions(address).subscriptions["piped"]
    update_dispatch(address, "piped", DispatchState(incarnation=record.incarnation, next=3), found.dispatch_revision)
    async with connected(address) as queues:
        for queue in internal_queues():
            (await queues.ensure(queue)).require_ready()
        await queues.streams.remove("stream:piped")
        restore_queue(address, "piped", record.incarnation)
        [outcome] = append_once(address, [(target("piped", record.incarnation), row(4, b"{}"))])
        assert (outcome.stored, outcome.refused) == (1, None)
        assert sum(batch.num_rows for batch in read_range(address, "stream:piped", 1, 10)) == 1
        [job] = await queues.fetch(PREFILL.stream, "prefill", 1, wait_seconds=60)
        await job.ack(confirm=True)
        async with connected(as_user(API)) as api:
            await Subscriptions(api).redefine("piped", with_topic("mail/.*"), prefill_new_topics=True)
        await begin_prefill(queues, "piped", record.incarnation, 100)
        [job] = await queues.fetch(PREFILL.stream, "prefill", 1, wait_seconds=60)
        await job.ack(confirm=True)
        await queues.publish("prefill-failures", b"{}", msg_id="f-1")
        catch_up = CatchUpJob(name="piped", incarnation=record.incarnation, job="j-1")
        assert put_job_once(address, catch_up) == put_job_once(address, catch_up)
        for subject in (*LDIF.subjects, *incoming().subjects):  # the signals that wake transform and dispatch
            await queues.connection.subscribe(subject, confirm=True)
        await refused(
            queues,
            lambda it: it.bucket(CREDENTIALS),
            lambda it: it.streams.get_last("KV_credentials", "$KV.credentials.>"),
            lambda it: it.consumers.add("KV_credentials", ConsumerConfig(durable_name="c")),
            lambda it: it.publish("incoming", b"{}", msg_id="x"),
            lambda it: it.streams.purge(INCOMING),
            lambda it: it.streams.remove("KV_subscriptions"),
            lambda it: it.connection.subscribe("piped.main", confirm=True),
        )


async def test_a_component_of_one_subscription_cannot_read_another_ones_queue(
    as_user: Callable[[str], Address],
) -> None:
    async with connected(as_user(API)) as api:
        incarnations = {
            name: (await Subscriptions(api).add(definition(name)))[0].incarnation for name in ("ox", "other")
        }
    work = [(target(name, incarnations[name]), row(4, name.encode())) for name in incarnations]
    assert [outcome.stored for outcome in append_once(as_user(PIPELINE), work)] == [1, 1]
    address = as_user("subscription-ox")
    async with connected(address) as queues, open_pull(queues) as pull:
        [message] = await pull.lease("ox", timeout=60)
        assert message.data == b"ox"
        with pytest.raises(PermissionDenied, match="stream:other"):
            await pull.lease("other", timeout=60)
        await pull.acknowledge("ox", message.sequence)
        assert await pull.lease("ox", timeout=0) == []
        await refused(
            queues,
            lambda it: it.streams.info("stream:other"),
            lambda it: it.streams.get("stream:other", 1),
            lambda it: it.streams.get_last("stream:other", "other.main"),
            lambda it: read_page(it, "stream:other", PageRequest(subject="other.main")),
            lambda it: it.streams.delete_message("stream:other", 1),
            lambda it: it.streams.purge("stream:other"),
            lambda it: it.consumers.add("stream:other", ConsumerConfig(durable_name="thief")),
            lambda it: it.consumers.add("stream:ox", ConsumerConfig(durable_name="c", deliver_subject="other.main")),
            lambda it: it.fetch("stream:other", "thief"),
            lambda it: it.streams.get_last("KV_credentials", "$KV.credentials.>"),
            lambda it: it.publish("other.main", b"{}", msg_id="x"),
            lambda it: it.publish(f"$KV.{ACKNOWLEDGED}.other", b"{}", msg_id="x"),
            *(
                partial(listens, subject)
                for subject in ("other.*", "other.main", "*.main", "ox.>", ">", "$JS.>", "$KV.>")
            ),
            *(partial(listens, subject) for subject in ("_INBOX.>", "_INBOX.*", "_INBOX.subscription-other.>")),
        )
    with pytest.raises(PermissionDenied, match="stream:other"):
        list(read_range(address, "stream:other", 1, 10))
    async with connected(as_user("subscription-other")) as queues, open_pull(queues) as pull:
        assert [each.data for each in await pull.lease("other", timeout=60)] == [b"other"]


async def test_a_rejected_message_is_parked_under_the_name_of_its_subscription(
    as_user: Callable[[str], Address],
) -> None:
    async with connected(as_user(PIPELINE)) as pipeline:
        (await pipeline.ensure(DEAD_LETTERS)).require_ready()
    async with connected(as_user(API)) as api:
        record, _ = await Subscriptions(api).add(definition("ox"))
    append_once(as_user(PIPELINE), [(target("ox", record.incarnation), row(50, b"{}"))])
    async with connected(as_user("subscription-ox")) as queues, open_pull(queues) as pull:
        [message] = await pull.lease("ox", timeout=60)
        await pull.reject("ox", message.sequence, "no good")
        await refused(
            queues,
            lambda it: it.publish("dead-letters.subscription-other", b"{}", msg_id="x"),
            lambda it: read_page(it, DEAD_LETTERS.stream, PageRequest(subject="dead-letters.>")),
            lambda it: it.streams.get(DEAD_LETTERS.stream, 1),
            lambda it: it.streams.delete_message(DEAD_LETTERS.stream, 1),
            lambda it: it.publish("ox.retry", b"{}", msg_id="x"),
        )
        async with connected(as_user(API)) as api, open_dead_letters(api) as letters:
            assert (await letters.retry(DeadLetterFilter(subscription="ox"))).done == 1
        [message] = await pull.lease("ox", timeout=60)
        assert (message.position, message.kind) == (50, SubjectKind.RETRY)
        await pull.acknowledge("ox", message.sequence)


async def test_stages_send_messages_publish_events_and_read_their_subscription(
    as_user: Callable[[str], Address], tmp_path: Path
) -> None:
    async with connected(as_user(PIPELINE)) as pipeline:
        for queue in internal_queues():
            (await pipeline.ensure(queue)).require_ready()
    async with connected(as_user(API)) as api:
        subscriptions = Subscriptions(api)
        await subscriptions.add(definition("other"))
        record, _ = await subscriptions.add(definition("ox"))
    append_once(as_user(PIPELINE), [(target("ox", record.incarnation), row(50, EVENT.encode()))])
    async with connected(as_user(STAGES)) as queues, open_pull(queues) as pull:
        stages = Stages(queues, store=SqlStore(f"sqlite:///{tmp_path / 'stages.db'}"), app="shop")
        accounts = stages.terminator("accounts", message=Event, source=SubscriptionSource(queues, "ox", pull))
        orders = stages.endpoint("orders", request=Event, reply=str)

        @accounts.last_stage(exactly_once=True)
        async def provision(ctx: Context[None], event: Event) -> None:
            ctx.send(orders, event)

        @orders.last_stage(exactly_once=True, retry=Retry.in_order())
        async def order(ctx: Context[None], event: Event) -> str:
            return await ctx.publish(event)

        async with stages:
            event_id = await stages.ask(orders, EVENT, timeout=120)
            assert len(event_id) == 32
            await until(lambda: has_events(queues, 2))
        assert await DeadLetterStore(queues).find_parked({"dead-letters.outbox": [{}]}) == set()
        await refused(
            queues,
            lambda it: it.publish("incoming.control", b"{}", msg_id="x"),
            lambda it: it.publish("ldif.x", b"{}", msg_id="x"),
            lambda it: it.publish("other.main", b"{}", msg_id="x"),
            lambda it: it.streams.get_last("KV_credentials", "$KV.credentials.>"),
            lambda it: it.streams.get(LDIF.stream, 1),
            lambda it: it.streams.purge(INCOMING),
            lambda it: it.streams.remove(INCOMING),
            lambda it: it.consumers.reset(INCOMING, "archive", 1),
            lambda it: it.consumers.remove(INCOMING, "archive"),
            lambda it: it.fetch(INCOMING, "archive"),
            partial(listens, "incoming"),
            partial(listens, "_INBOX.>"),
        )


async def has_events(queues: Queues, count: int) -> bool:
    return sum((await queues.streams.subjects(INCOMING, "incoming.outbox.*.*")).values()) >= count


async def test_the_api_knows_the_age_of_events_that_it_may_not_read(
    server: EmbeddedServer, as_user: Callable[[str], Address]
) -> None:
    """Also while the receipts of the transform keep an older one in the queue."""
    async with connect(server.address) as operator, connect(as_user(API)) as api:
        (await operator.ensure(incoming())).require_usable()
        metrics = QueueMetrics(api, RegistrySnapshots(api))

        async def age() -> float | None:
            metrics._found_at = float("-inf")
            found = {each.metric.name: each.values for each in await metrics.read()}
            return found["purveyor_queue_oldest_age_seconds"].get(("incoming", "internal"))

        assert await age() == 0
        await operator.publish(LDIF_SUBJECT, b"1")
        assert (await age() or 0) > 0
        for durable in {reader.durable for reader in incoming().readers} - {RECEIPTS}:
            (message,) = await operator.fetch(INCOMING, durable)
            await message.ack(confirm=True)
        assert await age() == 0
        await operator.publish(LDIF_SUBJECT, b"2")
        assert await age() is not None  # seen for the first time now
        await until(lambda: _is_positive(age))


async def _is_positive(age: Callable[[], Awaitable[float | None]]) -> bool:
    return (await age() or 0) > 0


async def test_a_push_worker_reports_on_the_status_board_and_replaces_the_reports_of_dead_ones(
    as_user: Callable[[str], Address], tmp_path: Path
) -> None:
    async with connect(as_user(PUSH)) as queues, connect(as_user(API)) as api:
        dead = {"pid": 2**22 + 1, "host": socket.gethostname()}
        await write_notice(queues, "push.dead", dead)
        await write_notice(queues, "push.elsewhere", {**dead, "host": "elsewhere"})
        stop = asyncio.Event()
        worker = PushWorker(queues, PushOptions(cipher=SecretCipher.from_directory(tmp_path)))
        running = asyncio.create_task(worker.run(stop))

        async def reported() -> dict[str, object]:
            return {str(each.value["host"]): each.value["pid"] for each in await read_notices(api, "push")}

        expected = {"elsewhere": dead["pid"], socket.gethostname(): os.getpid()}

        async def is_reported() -> bool:
            return await reported() == expected

        await until(is_reported)
        stop.set()
        await running
        assert await reported() == {"elsewhere": dead["pid"]}

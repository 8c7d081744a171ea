"""Whatever the edge accepts goes through every part and comes out the same; whatever it refuses is a 4xx with a reason.

One run of all parts takes many events: `serve pipeline` as a process (dispatch, archive, prefill), the API, a push
worker with an endpoint, a stage. `PURVEYOR_SEED` repeats a run.
"""

import asyncio
import base64
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pyarrow.parquet as pq
import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from purveyor.delivery.pull import open_pull
from purveyor.delivery.push.push_request import SecretCipher
from purveyor.delivery.push.push_worker import PushOptions, PushWorker
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.address import Address
from purveyor.model.delivery_policy import Delivery, OrderBy, Push, PushFormat
from purveyor.model.errors import InvalidInput
from purveyor.model.event import Event, check_event_id, encode_checked
from purveyor.model.name_rules import LONGEST_EXPRESSION_CHARACTERS
from purveyor.model.subscription import Filter, RealmTopic, Subscription, matches
from purveyor.pipeline.archive.layout import archived_until
from purveyor.queues.client import Queues, connect
from purveyor.stages import Context, Retry, SqlStore, Stages, SubscriptionSource
from tests.support.command_line import url_of
from tests.support.fuzzed import Fields, accepted, anything, drawn
from tests.support.nats_servers import OwnServer
from tests.support.pipeline_program import Pipeline
from tests.support.push import LOCAL, SWIFT, Site
from tests.support.running_api import PASSWORD, Consumer, RunningApi, problem
from tests.support.scale import chance, pick
from tests.support.stages import make_effects
from tests.support.waiting import until, wait_until

EVENTS = pick(60, 1000)
REFUSED = pick(150, 10_000)
PATIENCE_SECONDS = 900.0
"""Not a promise: a busy machine takes its time."""
JSON = {"Content-Type": "application/json"}
EVENT_FIELDS = ("publisher_name", "ts", "realm", "topic", "body", "key", "attributes")
PLAIN = re.compile(r"""[^\s.\[\]'"\\`$]+""")
"""A name that a filter can say."""


@dataclass(frozen=True)
class Sent:
    """An event that was accepted: as it must come out."""

    event: Event
    id: str
    position: int

    @property
    def body(self) -> Any:
        return json.loads(self.event.encode())

    @property
    def place(self) -> tuple[str, str]:
        return self.event.realm, self.event.topic


def verdict(fields: Any) -> Event | None:
    """What the edge function says of an event; None if it refuses it."""
    try:
        given = dict(fields)
        check_event_id(given.pop("id") if given.get("id") is not None else "-")
        event = Event.from_json(given)
        encode_checked(event)
    except InvalidInput:
        return None
    return event


@pytest.mark.chaos
def test_what_the_edge_refuses_is_a_4xx_with_the_reason_and_the_rest_is_stored(own_server: OwnServer) -> None:
    number = chance("edge").randrange(2**32)
    address = own_server().address
    with RunningApi(lambda: address) as api:
        client = api.when_ready().client("events", "events-secret")
        refused = 0
        for fields in drawn(anything(), REFUSED, number):
            answer = client.post("/v1/messages", content=json.dumps(fields), headers=JSON)
            if verdict(fields) is None:
                refused += 1
                problem(answer, 422)
            else:
                assert answer.status_code == 202, (fields, answer.text)
        assert refused > REFUSED / 4


class Run:
    """The parts of one run, and what was sent through them."""

    def __init__(self, address: Address, api: RunningApi, site: Site) -> None:
        self.address, self.api, self.site = address, api, site
        self.admin = api.client("admin", "admin-secret")
        self.events = api.client("events", "events-secret")
        self.sent: list[Sent] = []

    def subscribe(self, definition: Subscription) -> Consumer:
        given = {name: value for name, value in definition.to_json().items() if name != "push"}
        answer = self.admin.post("/v1/subscriptions", content=json.dumps(given | {"password": PASSWORD}), headers=JSON)
        assert answer.status_code == 201, answer.text
        return Consumer(self.api.client(definition.name, PASSWORD), definition.name)

    def publish(self, fields: Sequence[Fields]) -> None:
        """Some by themselves, some several at once."""
        for first in range(0, len(fields), 3):
            some = list(fields[first : first + 3])
            for body in [some] if first % 2 else some:
                key = f"request-{len(self.sent)}"
                headers = JSON | {"Idempotency-Key": key}
                answer = self.events.post("/v1/messages", content=json.dumps(body), headers=headers)
                assert answer.status_code == 202, (body, answer.text)
                self._note(body, key, answer.json()["position"])

    def _note(self, body: Fields | list[Fields], key: str, last: int) -> None:
        many = body if isinstance(body, list) else [body]
        for number, each in enumerate(many):
            event = verdict(each)
            assert event is not None
            stored = json.loads(event.encode())
            for name in ("realm", "topic", "publisher_name", "body", "key", "attributes"):
                assert json_text(stored.get(name) or None) == json_text(each.get(name) or None), name
            default = key if body is each else f"{key}:{number}"
            self.sent.append(Sent(event, each.get("id") or default, last - len(many) + 1 + number))

    def wanted_by(self, definition: Subscription) -> list[Sent]:
        return [each for each in self.sent if matches(definition, each.event)]


def json_text(value: Any) -> str:
    """Return a text that differs wherever the JSON differs: 1 is not 1.0, 0.0 is not -0.0, true is not 1."""
    return json.dumps(value, sort_keys=True)


def event_of(message: Fields) -> Any:
    """The event in a message, without what delivery adds."""
    return {name: value for name, value in message.items() if name in EVENT_FIELDS}


def take(consumer: Consumer, count: int, settle: Callable[[Fields], Fields]) -> list[Fields]:
    """So many messages, each settled by itself."""
    found: list[Fields] = []

    def lease() -> list[Fields]:
        messages: list[Fields] = consumer.post("messages/lease", json={"max": 100, "timeout": 10}).json()["messages"]
        return messages

    while len(found) < count:
        messages = wait_until(lease, seconds=PATIENCE_SECONDS)
        for message in messages:
            assert consumer.set_status(message["sequence_number"], **settle(message)).status_code == 200
        found += messages
    assert consumer.next() is None
    return found


def check_same(messages: Sequence[Fields], sent: Sequence[Sent]) -> None:
    """The same events, in their order, each at its position."""
    assert [message["position"] for message in messages] == [each.position for each in sent]
    for message, each in zip(messages, sent, strict=True):
        assert json_text(event_of(message)) == json_text(each.body)


def acknowledged(_message: Fields) -> Fields:
    return {"status": "ok"}


@pytest.fixture
def site() -> Iterator[Site]:
    found = Site()
    yield found
    found.stop()


@pytest.fixture
def run(own_server: OwnServer, site: Site) -> Iterator[Run]:
    address = own_server().address
    with RunningApi(lambda: address) as api:
        yield Run(address, api.when_ready(), site)


@pytest.mark.first
@pytest.mark.chaos
@pytest.mark.timeout(3600)
async def test_what_the_edge_accepts_comes_out_the_same_everywhere(run: Run, tmp_path: Path) -> None:
    random = chance("edge")
    fields = [each for each in drawn(accepted, EVENTS, random.randrange(2**32)) if verdict(each) is not None]
    assert len(fields) > EVENTS / 2
    for number, each in enumerate(fields):
        if "id" in each:
            each["id"] = f"{number:06}-{each['id']}"
    pipeline = Pipeline(tmp_path / "data", url=url_of(run.address))
    try:
        await _through_all(run, fields, tmp_path)
    finally:
        await asyncio.to_thread(pipeline.close)


async def _through_all(run: Run, fields: Sequence[Fields], tmp_path: Path) -> None:
    given = [event for each in fields if (event := verdict(each)) is not None]
    realms = tuple(dict.fromkeys(RealmTopic(event.realm, ".*") for event in given))
    exact = tuple(dict.fromkeys(RealmTopic(event.realm, spelled(event.topic)) for event in given))
    wide = Subscription(name="ordered", realms_topics=realms)
    named = Subscription(name="named", realms_topics=exact)
    by_key = replace(wide, name="by-key", delivery=Delivery.PARALLEL, order_by=OrderBy.KEY)
    rejecting = replace(wide, name="rejecting", delivery=Delivery.PARALLEL, order_by=None)
    staged = replace(wide, name="staged")
    filtered = [
        replace(wide, name=f"filtered-{number}", filter=wanted) for number, wanted in enumerate(filters_of(given))
    ]
    pushed = [
        replace(
            wide,
            name=f"push-{form.value}",
            delivery=Delivery.PUSH,
            order_by=None,
            retry=SWIFT,
            push=Push(endpoints=(run.site.url(f"/ok?for=push-{form.value}"),), format=form),
        )
        for form in PushFormat
    ]
    consumers = {each.name: run.subscribe(each) for each in (wide, named, by_key, rejecting, staged, *filtered)}
    async with connect(run.address) as queues:
        for each in pushed:
            await Subscriptions(queues).add(each)
        await asyncio.to_thread(run.publish, fields)
        sent = run.sent

        # Pull, in both orders, by expression, by exact topic and through filters.
        check_same(await asyncio.to_thread(take, consumers["ordered"], len(sent), acknowledged), sent)
        for each in (named, *filtered):
            wanted = run.wanted_by(each)
            check_same(await asyncio.to_thread(take, consumers[each.name], len(wanted), acknowledged), wanted)
        found = await asyncio.to_thread(take, consumers["by-key"], len(sent), acknowledged)
        check_same(sorted(found, key=lambda message: int(message["position"])), sent)
        check_order_of_keys(found, sent)

        await check_dead_letters(consumers["rejecting"], sent)
        await check_push(run, queues, tmp_path)
        await check_stage(queues, sent, tmp_path)

        # The archive, and what is made from it.
        archive = tmp_path / "data" / "archive"
        await until(lambda: archived_until(archive) >= sent[-1].position, seconds=PATIENCE_SECONDS)
        check_archive(archive, sent)
        prefilled = replace(wide, name="prefilled", request_prefill=True)
        filling = run.subscribe(prefilled)
        state = current_state(sent)
        messages = await asyncio.to_thread(take, filling, len(state), acknowledged)
        assert {message["position"]: json_text(event_of(message)) for message in messages} == {
            each.position: json_text(each.body | {"body": {"old": {}, "new": each.body["body"]["new"]}})
            for each in state
        }
        answer = consumers["ordered"].post("replay", json={"from": sent[0].position, "to": sent[-1].position})
        assert answer.status_code == 202, answer.text
        check_same(await asyncio.to_thread(take, consumers["ordered"], len(sent), acknowledged), sent)
        letters = run.admin.get("/v1/dead-letters").json()["dead_letters"]
        assert letters == []


def spelled(topic: str) -> str:
    """A topic that stands for itself; an expression for anything where that would be too long."""
    escaped = re.sub(r"[\\.^$*+?{}\[\]|()]", r"\\\g<0>", topic)
    return escaped if escaped == topic or len(escaped) <= LONGEST_EXPRESSION_CHARACTERS else ".*"


def filters_of(events: Sequence[Event]) -> list[Filter]:
    """What some of the events have, as filters: attributes, and fields with strings, numbers and truth."""
    found: list[Filter] = []
    attributes = [item for event in events for item in event.attributes.items()]
    found += [Filter(attributes={name: (value,)}) for name, value in attributes[:: max(len(attributes) // 3, 1)]]
    fields = [
        (name, value)
        for event in events
        for name, value in event.new.items()
        if PLAIN.fullmatch(name) and name not in ("new", "old") and isinstance(value, str | int | float)
    ]
    for kind in (str, bool, int, float):
        same = [(name, value) for name, value in fields if type(value) is kind]
        found += [Filter(fields={name: (value,)}) for name, value in same[:: max(len(same) // 2, 1)]]
    return found


def check_order_of_keys(found: Sequence[Fields], sent: Sequence[Sent]) -> None:
    keys = {each.position: each.event.object_key for each in sent}
    by_key: dict[str, list[int]] = defaultdict(list)
    for message in found:
        key = keys[message["position"]]
        if key is not None:
            by_key[key].append(message["position"])
    assert all(positions == sorted(positions) for positions in by_key.values())


async def check_dead_letters(consumer: Consumer, sent: Sequence[Sent]) -> None:
    """Rejected, they are dead letters; put back, they are delivered as they were."""
    reason = "no ✓ way"
    await asyncio.to_thread(take, consumer, len(sent), lambda _: {"status": "reject", "reason": reason})
    letters: list[Any] = []
    after: int | None = 0
    while after is not None:
        page = consumer.get("dead-letters", params={"limit": 50, "after": after}).json()
        letters += page["dead_letters"]
        after = page["next"]
    assert len(letters) == len(sent)
    for letter in letters[:: max(len(letters) // 20, 1)]:
        whole = consumer.get(f"dead-letters/{letter['id']}").json()
        [mine] = [each for each in sent if each.position == whole["details"]["position"]]
        assert (json_text(json.loads(whole["data"])), whole["reason"]) == (json_text(mine.body), reason)
    while letters:
        report = consumer.post("dead-letters", json={"all": True}).json()
        assert report["done"], report
        letters = letters[report["done"] :]
    back = await asyncio.to_thread(take, consumer, len(sent), acknowledged)
    check_same(sorted(back, key=lambda message: int(message["position"])), sent)


async def check_push(run: Run, queues: Queues, tmp_path: Path) -> None:
    """In each form the event, its id and its key."""
    worker = PushWorker(
        queues, PushOptions(cipher=SecretCipher.from_directory(tmp_path), allowed=LOCAL, grace_seconds=3)
    )
    stop = asyncio.Event()
    task = asyncio.create_task(worker.run(stop))
    expected = {f"{each.id}@{each.position}": (each.body, each.event.object_key) for each in run.sent}
    assert len(expected) == len(run.sent)
    try:
        for form in PushFormat:
            seen = await asyncio.to_thread(
                wait_until, partial(seen_all, run, f"push-{form.value}"), seconds=PATIENCE_SECONDS
            )
            read = (decode_request(form, request["headers"], request["body"].encode("latin-1")) for request in seen)
            assert {identity: (event, key) for identity, event, key in read} == expected
    finally:
        stop.set()
        await task


def seen_all(run: Run, name: str) -> list[Fields]:
    """What an endpoint has seen when it has seen as much as was sent."""
    seen = run.site.seen(name)
    return seen if len(seen) >= len(run.sent) else []


def decode_request(form: PushFormat, headers: dict[str, str], body: bytes) -> tuple[str, Any, str | None]:
    """What an endpoint reads out of a request: id, event and key."""
    if form is PushFormat.PUBSUB:
        message = json.loads(body)["message"]
        event = json.loads(base64.b64decode(message["data"]))
        assert (message["attributes"]["topic"], message["publishTime"]) == (
            event.get("attributes", {}).get("topic", event["topic"]),
            event["ts"],
        )
        return unquote(message["messageId"]), event, message.get("orderingKey")
    raw = form is PushFormat.RAW
    event = json.loads(body)
    if raw:
        assert unquote(headers["x-purveyor-topic"]) == event["topic"]
        for name, value in event.get("attributes", {}).items():
            assert unquote(headers[f"x-purveyor-attribute-{quote(name, safe='')}".lower()]) == value or len(
                {other.lower() for other in event["attributes"]}
            ) < len(event["attributes"])
    key = headers.get("x-purveyor-key" if raw else "ce-subject")
    return unquote(headers["x-purveyor-id" if raw else "ce-id"]), event, None if key is None else unquote(key)


async def check_stage(queues: Queues, sent: Sequence[Sent], tmp_path: Path) -> None:
    """Through a stage that is fed by a subscription, and by its outbox through another."""
    database = f"sqlite:///{tmp_path / 'stages.db'}"
    await make_effects(database)
    stages = Stages(queues, store=SqlStore(database), app="fuzz")
    first: list[Event] = []
    second: list[tuple[Event, str | None]] = []
    copies = stages.terminator("fuzz.copies", message=Event)

    @copies.last_stage(exactly_once=True, retry=Retry.in_order(first_delay=timedelta(milliseconds=10)))
    async def copy(ctx: Context[None], message: Event, db: AsyncSession) -> None:
        second.append((message, ctx.key))

    async with open_pull(queues) as pull:
        source = SubscriptionSource(queues, "staged", pull)
        entries = stages.terminator("fuzz.entries", message=Event, source=source)

        @entries.last_stage(exactly_once=True, retry=Retry.in_order(first_delay=timedelta(milliseconds=10)))
        async def enter(ctx: Context[None], message: Event, db: AsyncSession) -> None:
            first.append(message)
            ctx.send(copies, message)

        async with stages:
            await until(lambda: len(second) >= len(sent))
    events = [each.event for each in sent]
    for found in (first, [event for event, _ in second]):
        assert sorted(map(repr, found)) == sorted(map(repr, events))
        for key in {event.object_key for event in events} - {None}:
            mine = [event for event in events if event.object_key == key]
            assert [event for event in found if event.object_key == key] == mine, "the order of a key is kept"
    assert all(key == event.object_key for event, key in second)


def check_archive(archive: Path, sent: Sequence[Sent]) -> None:
    files = sorted((archive / "events").glob("*/*.parquet"))
    rows = {row["position"]: row for file in files for row in pq.read_table(file).to_pylist()}
    for each in sent:
        row, event = rows[each.position], each.event
        assert row["kind"] == "event"
        assert (row["realm"], row["topic"], row["key"], row["publisher_name"]) == (
            event.realm,
            event.topic,
            event.object_key,
            event.publisher_name,
        )
        assert (row["ts"].replace(tzinfo=UTC), row["operation"]) == (event.ts, event.operation.value)
        assert json_text(json.loads(row["data"])) == json_text(each.body)
        assert row["id"] == each.id


def current_state(sent: Sequence[Sent]) -> list[Sent]:
    """Of each object the last event, unless it is a deletion; what has no key is no object."""
    latest = {(each.place, each.event.object_key): each for each in sent if each.event.object_key is not None}
    return [each for each in latest.values() if each.event.new]

"""A trace goes through the system: the header survives every queue, and with a collector there are spans."""

import asyncio
import http.server
import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import purveyor
from purveyor.app.telemetry import traces
from purveyor.delivery.pull import open_pull
from purveyor.jetstream import bulk
from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk.arrow_columns import HEADERS_TYPE as HEADERS
from purveyor.jetstream.streams import StoredMessage
from purveyor.model import tracing
from purveyor.model.errors import SetupError
from purveyor.model.event import Event
from purveyor.pipeline.dispatch import subscriber_messages as dispatched
from purveyor.pipeline.dispatch.subscriber_messages import copy_headers
from purveyor.queues.client import Queues, connect
from purveyor.stages import Context, SqlStore, Stages, SubscriptionSource
from tests.support.running_api import PASSWORD, Consumer, RunningApi, begin_replay, event, fill, on_server, wanted

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"
OTHER = f"00-{'c' * 32}-{'d' * 16}-01"


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """The spans that a collector would have received, after `finished`."""
    exporter = InMemorySpanExporter()
    with traces.export_traces(None, "test", exporter):
        yield exporter


def finished(exporter: InMemorySpanExporter, name: str, **attributes: object) -> list[ReadableSpan]:
    tracing._tracer._tracer.span_processor.force_flush()  # type: ignore[union-attr]
    return [
        span
        for span in exporter.get_finished_spans()
        if span.name == name
        and all((span.attributes or {}).get(f"purveyor.{key}") == value for key, value in attributes.items())
    ]


def context_of(traceparent: str) -> tuple[str, str]:
    return tracing.trace_ids({"traceparent": traceparent})


def stored(address: Address, position: int) -> StoredMessage:
    return on_server(address, lambda queues: queues.streams.get("stream:incoming", position))


@pytest.mark.parametrize("where", ["header", "attribute", "many", "rubbish"])
def test_a_trace_is_carried_into_incoming(events: httpx.Client, address: Address, where: str) -> None:
    body: Any = event(1)
    headers = {"traceparent": PARENT, "tracestate": "a=1"}
    if where == "attribute":
        body, headers = event(1, attributes={"traceparent": PARENT}), {"traceparent": OTHER}
    elif where == "many":
        body = [event(1), event(2, attributes={"traceparent": OTHER})]
    elif where == "rubbish":
        headers = {"traceparent": f"00-{'0' * 32}-{'1' * 16}-01", "tracestate": "a=1"}
    answer = events.post("/v1/messages", json=body, headers=headers).json()
    found = [stored(address, answer["position"] - back).headers for back in ((1, 0) if where == "many" else (0,))]
    copy_headers = [(each.get("traceparent"), each.get("tracestate")) for each in found]
    assert (
        copy_headers
        == {
            "header": [((PARENT,), ("a=1",))],
            "attribute": [((PARENT,), None)],
            "many": [((PARENT,), ("a=1",)), ((OTHER,), None)],
            "rubbish": [(None, None)],
        }[where]
    )


def test_dispatch_carries_it_on_and_knows_the_traces_of_a_batch() -> None:
    rows = [[("Nats-Msg-Id", ["e-1"]), ("traceparent", [PARENT])], [("traceparent", ["rubbish"])], []]
    batch = pa.record_batch({"headers": pa.array(rows, HEADERS)})
    kept = copy_headers(batch.column("headers")).to_pylist()
    assert kept[0] == [("Purveyor-Id", ["e-1"]), ("traceparent", [PARENT])]
    assert dispatched.find_traces(batch.column("headers")) == {PARENT}


def test_a_consumer_gets_it(consumer: Consumer, address: Address) -> None:
    _fill(address, consumer.name, PARENT)
    answer = consumer.get("messages/next", params={"timeout": 0})
    assert answer.headers["traceparent"] == PARENT
    leased = consumer.post("messages/lease", json={"max": 5}).json()["messages"]
    assert [message.get("traceparent") for message in leased] == [PARENT]


async def test_the_python_client_passes_the_trace_on(api: RunningApi, consumer: Consumer, address: Address) -> None:
    _fill(address, consumer.name, PARENT)
    async with purveyor.Consumer(api.url, consumer.name, password=PASSWORD) as client:
        async for message in client:
            assert message.trace == {"traceparent": PARENT}
            await message.ack()
            break


def test_without_a_trace_there_is_no_header(consumer: Consumer, address: Address) -> None:
    fill(address, consumer.name, [1])
    assert "traceparent" not in consumer.get("messages/next", params={"timeout": 0}).headers
    assert "traceparent" not in consumer.post("messages/lease", json={"max": 5}).json()["messages"][0]


def test_with_a_collector_accepting_and_delivering_are_spans(
    spans: InMemorySpanExporter, events: httpx.Client, consumer: Consumer, address: Address
) -> None:
    answer = events.post("/v1/messages", json=event(7), headers={"traceparent": PARENT})
    (header,) = stored(address, answer.json()["position"]).headers["traceparent"]
    (accept,) = finished(spans, "accept")
    assert accept.context is not None
    assert context_of(header) == (TRACE, f"{accept.context.span_id:016x}")
    assert accept.parent is not None
    assert f"{accept.parent.span_id:016x}" == context_of(PARENT)[1]

    _fill(address, consumer.name, header)
    found = consumer.get("messages/next", params={"timeout": 0})
    (deliver,) = finished(spans, "deliver", subscription=consumer.name)
    assert deliver.parent is not None
    assert deliver.parent.span_id == accept.context.span_id
    handed = found.headers["traceparent"]
    assert context_of(handed)[0] == TRACE

    sequence = found.json()["sequence_number"]
    body = {"status": "ok"}
    done = consumer.patch(f"messages/{sequence}/status", json=body, headers={"traceparent": handed})
    assert done.status_code == 200
    (acknowledge,) = finished(spans, "acknowledge", subscription=consumer.name)
    assert acknowledge.context is not None
    assert f"{acknowledge.context.trace_id:032x}" == TRACE


@pytest.mark.parametrize("collector", [False, True])
def test_a_job_carries_the_trace_of_its_request(
    request: pytest.FixtureRequest, admin: httpx.Client, address: Address, unique: str, collector: bool
) -> None:
    """Another process executes a prefill or a replay."""
    spans = request.getfixturevalue("spans") if collector else None
    headers = {"traceparent": PARENT}
    body = {**wanted(unique), "request_prefill": True}
    assert admin.post("/v1/subscriptions", json=body, headers=headers).status_code == 201
    asked = admin.post(f"/v1/subscriptions/{unique}/replay", json={"from": 1}, headers=headers)
    assert asked.status_code == 202, asked.text
    begin_replay(address, unique, asked.json()["job"])
    assert admin.post(f"/v1/subscriptions/{unique}/replay", json={"from": 1}).status_code == 202

    async def jobs(queues: Queues) -> list[tuple[str, str | None]]:
        found = []
        async for batch in queues.read_range("stream:prefill", 1, 2**62):
            for row in batch.to_pylist():
                job = json.loads(row["data"])
                if job["name"] == unique:
                    trace = dict(row["headers"]).get("traceparent")
                    found.append((job["kind"], trace[0] if trace else None))
        return found

    prefill, replay, other = on_server(address, jobs)
    assert (prefill[0], replay[0], other[0]) == ("prefill", "replay", "replay")
    if spans is None:
        assert (prefill[1], replay[1], other[1]) == (PARENT, PARENT, None)
        return
    ids = [f"{span.context.span_id:016x}" for span in finished(spans, "ask", subscription=unique) if span.context]
    assert [context_of(trace or "") for _, trace in (prefill, replay)] == [(TRACE, ids[0]), (TRACE, ids[1])]
    assert context_of(other[1] or "")[1] == ids[2]


def test_a_batch_is_one_span_with_links(spans: InMemorySpanExporter) -> None:
    tracing.record("dispatch", 0.25, links=[{"traceparent": PARENT}, {"traceparent": OTHER}], first=1, last=9)
    (span,) = finished(spans, "dispatch")
    assert [f"{link.context.trace_id:032x}" for link in span.links] == [TRACE, "c" * 32]
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.end_time - span.start_time >= 250_000_000


@dataclass
class Ticket:
    number: int


async def test_a_stage_is_a_span_and_hands_the_trace_on(
    spans: InMemorySpanExporter, address: Address, unique: str, tmp_path: Path, admin: httpx.Client
) -> None:
    """A subscription feeds the first endpoint, which sends to the second: both belong to the trace of the event."""
    added = await asyncio.to_thread(admin.post, "/v1/subscriptions", json=wanted(unique))
    assert added.status_code == 201
    seen: dict[str, str] = {}
    done = asyncio.Event()
    async with connect(address) as queues, open_pull(queues) as pull:
        source = SubscriptionSource(queues, unique, pull)
        stages = Stages(queues, store=SqlStore(f"sqlite:///{tmp_path / 'db'}"), app=unique)
        first = stages.terminator(f"{unique}-one", message=Event, source=source)
        second = stages.terminator(f"{unique}-two", message=Ticket)

        @first.last_stage(exactly_once=True)
        async def one(ctx: Context[None], _message: Event) -> None:
            seen["one"] = ctx.trace["traceparent"]
            ctx.send(second, Ticket(1))

        @second.last_stage(exactly_once=True)
        async def two(ctx: Context[None], _message: Ticket) -> None:
            seen["two"] = ctx.trace["traceparent"]
            done.set()

        async with stages:
            _fill(address, unique, PARENT)
            await asyncio.wait_for(done.wait(), 120)
    assert {context_of(trace)[0] for trace in seen.values()} == {TRACE}
    spans_of = {number: finished(spans, "stage", stage=f"{unique}-{number}.0")[0] for number in ("one", "two")}
    assert spans_of["two"].parent is not None
    assert f"{spans_of['two'].parent.span_id:016x}" == context_of(seen["one"])[1]


def _fill(address: Address, name: str, traceparent: str) -> None:
    headers = {"Purveyor-Position": "1", "traceparent": traceparent}
    rows: list[bulk.Outgoing] = [(f"{name}.main", json.dumps(event(1)).encode(), headers, f"{name}-traced")]
    bulk.publish_many(address, bulk.outgoing(rows))


def test_spans_reach_a_collector_by_http() -> None:
    got: list[tuple[str, bytes]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        with traces.export_traces(endpoint, "api"), tracing.span("accept"):
            pass
    ((path, body),) = got
    assert path == "/v1/traces"
    assert b"purveyor-api" in body
    assert not tracing.is_enabled()


def test_without_a_collector_nothing_is_imported_or_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_TRACES_EXPORTER"):
        monkeypatch.delenv(name, raising=False)
    with traces.export_traces(None, "api"):
        assert not tracing.is_enabled()
    with tracing.span("deliver", {"traceparent": PARENT}) as onward:
        assert onward == {"traceparent": PARENT}
        assert tracing.current_carrier() == onward  # as it came: what is sent from here goes on with it
        tracing.link([onward])
    with tracing.span("deliver"):
        assert tracing.current_carrier() is None


def test_the_standard_variables_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    assert traces.is_enabled(None)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert not traces.is_enabled("http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    assert traces.is_enabled(None)
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert not traces.is_enabled("http://127.0.0.1:1")


def test_a_missing_exporter_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(SetupError, match="not installed"), traces.export_traces("http://127.0.0.1:1", "api"):
        pass


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        (PARENT, True),
        (f"01-{TRACE}-{'1' * 16}-00-more", True),
        (PARENT.upper(), False),
        (f"ff-{TRACE}-{'1' * 16}-00", False),
        (f"00-{TRACE}-{'0' * 16}-00", False),
        (f"{PARENT}-more", False),
        ("", False),
    ],
)
def test_what_a_traceparent_is(text: str, valid: bool) -> None:
    assert tracing.is_valid_traceparent(text) is valid
    assert tracing.read_carrier({"traceparent": text}.get) == ({"traceparent": text} if valid else {})

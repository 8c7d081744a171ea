"""Traces through prefill, replay and catch-up: jobs belong to their request, messages to their events."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from purveyor.app.telemetry.traces import export_traces
from purveyor.model import tracing
from purveyor.model.event import Event
from purveyor.pipeline.prefill import PrefillWorker, WorkerOptions
from purveyor.queues.catalogue import PREFILL
from tests.support.prefill_harness import PrefillHarness, definition, suspend
from tests.support.waiting import until

ASKED = f"00-{'a' * 32}-{'b' * 16}-01"
QUICK = WorkerOptions(first_pause_seconds=0.05, turn_seconds=0.5, progress_seconds=0.1)


def traceparent(number: int) -> str:
    return f"00-{number:032x}-{number:016x}-01"


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


async def publish(harness: PrefillHarness, topic: str, count: int) -> list[int]:
    """Objects, each by an event with a trace of its own; the positions."""
    about = Event(publisher_name="x", ts=datetime.now(UTC), realm=harness.realm, topic=topic)
    made = [(replace(about, new={"id": number}), traceparent(number)) for number in range(1, count + 1)]
    return [await harness.publish_bytes(event.encode(), traceparent=trace) for event, trace in made]


async def work_off(harness: PrefillHarness) -> None:
    async def idle() -> bool:
        return (await harness.queues.streams.info(PREFILL.stream)).state.messages == 0

    worker = PrefillWorker(harness.context.spark, harness.queues.address, harness.context.archive, QUICK)
    worker.start()
    try:
        await until(idle)
    finally:
        worker.stop()


def links(span: ReadableSpan) -> set[int]:
    return {link.context.trace_id for link in span.links}


async def test_jobs_are_spans_of_their_request_and_linked_to_the_traces_of_events(
    harness: PrefillHarness, unique: str, spans: InMemorySpanExporter
) -> None:
    positions = await publish(harness, "a/x", 3)
    with tracing.span(
        "ask", {"traceparent": ASKED}
    ):  # no exporter where the request is made, and yet the trace is passed on
        await harness.subscriptions.add(definition(harness, unique, prefill=True))
        await harness.subscriptions.replay(unique, positions[1], positions[2])
    with export_traces(None, "pipeline", spans):
        await work_off(harness)
    reported = {span.name: span for span in spans.get_finished_spans()}
    assert set(reported) == {"prefill", "replay"}
    for span in reported.values():
        assert span.parent is not None
        assert (f"{span.parent.trace_id:032x}", f"{span.parent.span_id:016x}") == ("a" * 32, "b" * 16)
        assert (span.attributes or {})["purveyor.subscription"] == unique
    assert links(reported["prefill"]) == {1, 2, 3}
    assert links(reported["replay"]) == {2, 3}
    assert (reported["replay"].attributes or {})["purveyor.last"] == positions[2]
    kept = [message.headers["traceparent"] for message in await harness.stored(unique)]
    assert kept == [traceparent(number) for number in (1, 2, 3, 2, 3)]


async def test_a_catch_up_is_a_span_too_and_many_events_are_not_all_linked(
    harness: PrefillHarness, unique: str, spans: InMemorySpanExporter
) -> None:
    record, _ = await harness.add(unique, "a/x", prefill=False)
    first, *_ = await publish(harness, "a/x", tracing.MOST_LINKS + 3)
    await suspend(harness, record, first)
    with tracing.span("ask", {"traceparent": ASKED}):
        await harness.subscriptions.resume(unique)
    with export_traces(None, "pipeline", spans):
        await work_off(harness)
    (span,) = spans.get_finished_spans()
    assert (span.name, len(span.links)) == ("catch-up", tracing.MOST_LINKS)
    assert span.parent is not None
    assert f"{span.parent.trace_id:032x}" == "a" * 32
    assert len(await harness.stored(unique, "main")) == tracing.MOST_LINKS + 3

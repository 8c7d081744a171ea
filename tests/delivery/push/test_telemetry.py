"""Metrics and traces of push: attempts, durations, windows, and the trace of the event."""

import json
from collections.abc import Awaitable, Callable

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from purveyor.app.telemetry.traces import export_traces
from purveyor.delivery.push.push_worker import PushWorker
from purveyor.model import metrics
from tests.support.push import PushSubscription

Work = Callable[..., Awaitable[PushWorker]]
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


async def test_attempts_are_counted_and_carry_the_trace_of_their_event(pushed: PushSubscription, work: Work) -> None:
    exporter = InMemorySpanExporter()
    body = {"realm": "udm", "topic": "t", "body": {"old": {}, "new": {"script": [500]}}}
    with export_traces(None, "push", exporter):
        await pushed.add("/script")
        headers = {"Purveyor-Position": "1", "traceparent": PARENT}
        await pushed.queues.publish(f"{pushed.name}.main", json.dumps(body).encode(), headers=headers)
        await work()
        await pushed.drained()
        assert metrics.PUSH_WINDOW.values()[pushed.name,] >= 1
    attempts = metrics.PUSH_ATTEMPTS.values()
    assert (attempts[pushed.name, "retry"], attempts[pushed.name, "acknowledge"]) == (1, 1)
    assert sum(metrics.PUSH_SECONDS.values()[pushed.name,].counts) == 2
    assert [request["headers"]["traceparent"] for request in pushed.seen()] == [PARENT, PARENT]
    spans = [span for span in exporter.get_finished_spans() if _is_push_of(span, pushed.name)]
    found = [dict(span.attributes or {}) for span in spans]
    assert [(each["purveyor.attempt"], each["purveyor.outcome"]) for each in found] == [
        (1, "retry"),
        (2, "acknowledge"),
    ]
    assert {f"{span.context.trace_id:032x}" for span in spans if span.context is not None} == {TRACE}


def _is_push_of(span: ReadableSpan, name: str) -> bool:
    """Return whether a span is of this subscription: other parts of the process may push as well."""
    return span.name == "push" and (span.attributes or {}).get("purveyor.subscription") == name

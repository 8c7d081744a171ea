"""The figures that parts keep of their own work, each declared once: the catalogue of `meters`.

Names follow Prometheus: `purveyor_`, base units, `_total` on what only goes up. Labels hold names of subscriptions,
queues, parts and stages, never keys, bodies or logins.
"""

from typing import Final

from purveyor.model.metric_types import Counter, Gauge, Histogram, Meter, Waits

_QUICK: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

PUBLISHED: Final = Counter(
    "purveyor_events_published_total",
    "Events that this process stored in incoming; duplicate: they were stored before",
    "result",
)
DISPATCHED: Final = Counter(
    "purveyor_messages_dispatched_total",
    "Messages that dispatch stored in the queue of a subscription",
    "subscription",
)
DELIVERED: Final = Counter(
    "purveyor_messages_delivered_total",
    "Messages handed to consumers of a subscription, each delivery counted",
    "subscription",
)
REDELIVERED: Final = Counter(
    "purveyor_messages_redelivered_total",
    "Of the messages delivered, those that had been delivered before",
    "subscription",
)
ACKNOWLEDGED: Final = Counter(
    "purveyor_messages_acknowledged_total",
    "Messages that consumers of a subscription acknowledged",
    "subscription",
)
RETURNED: Final = Counter(
    "purveyor_messages_returned_total",
    "Messages that consumers of a subscription gave back, to get them again",
    "subscription",
)
EXPIRED: Final = Counter(
    "purveyor_messages_expired_total",
    "Messages that nobody acknowledged within the retention of a subscription",
    "subscription",
)
DEAD_LETTERS: Final = Counter(
    "purveyor_dead_letters_parked_total",
    "Messages that this process gave up and parked, by the part or subscription that gave up",
    "origin",
)
PUSH_ATTEMPTS: Final = Counter(
    "purveyor_push_attempts_total",
    "Requests that push sent to the endpoint of a subscription, by what came of them",
    "subscription",
    "outcome",
)
PUSH_SECONDS: Final = Histogram(
    "purveyor_push_attempt_seconds",
    "How long the endpoint of a subscription took to answer",
    "subscription",
    bounds=_QUICK,
)
PUSH_WINDOW: Final = Gauge(
    "purveyor_push_window_messages",
    "How many messages push may have on their way to the endpoint of a subscription at once",
    "subscription",
)
PUSH_OUTSTANDING: Final = Gauge(
    "purveyor_push_outstanding_messages",
    "How many messages are on their way to the endpoint of a subscription",
    "subscription",
)
STAGE_MESSAGES: Final = Counter(
    "purveyor_stage_messages_total",
    "Messages of a stage: finished (acknowledged), again (failed, to be tried once more), dead_letter (given up)",
    "stage",
    "outcome",
)
STAGE_SECONDS: Final = Histogram(
    "purveyor_stage_group_seconds",
    "How long a group of messages took through a stage, from its transaction's begin to its end",
    "stage",
    bounds=_QUICK,
)
HTTP_REQUESTS: Final = Counter(
    "purveyor_http_requests_total",
    "Requests of the HTTP API, by route, method and status of the answer",
    "route",
    "method",
    "status",
)
BATCHES: Final = Counter("purveyor_pipeline_batches_total", "Batches that a part of the pipeline has done", "part")
BATCH_SECONDS: Final = Histogram(
    "purveyor_pipeline_batch_seconds",
    "How long a batch of a part took; looked at ten times a second, so of quick ones not each",
    "part",
    bounds=_QUICK,
)

MIGRATION_WAITS: Final = Waits()
"""Publishers of this process that wait for a queue which is sealed for its migration, by queue."""

METERS: Final[tuple[Meter, ...]] = (
    PUBLISHED,
    DISPATCHED,
    DELIVERED,
    REDELIVERED,
    ACKNOWLEDGED,
    RETURNED,
    EXPIRED,
    DEAD_LETTERS,
    PUSH_ATTEMPTS,
    PUSH_SECONDS,
    PUSH_WINDOW,
    PUSH_OUTSTANDING,
    STAGE_MESSAGES,
    STAGE_SECONDS,
    HTTP_REQUESTS,
    BATCHES,
    BATCH_SECONDS,
)

"""The catalogue of all metrics: those that the code counts (`model.metrics`), and those read at each scrape.

Tests compare the metrics page, its documentation, the dashboard and the alerts with this list.
"""

from typing import Final

from purveyor.model.metrics import INSTRUMENTS, MetricInfo, MetricKind

QUEUE_MESSAGES: Final = MetricInfo(
    "purveyor_queue_messages",
    MetricKind.GAUGE,
    "Messages in a queue; kind: subscription, stage or internal",
    ("queue", "kind"),
)
QUEUE_BYTES: Final = MetricInfo("purveyor_queue_bytes", MetricKind.GAUGE, "Size of a queue on disk", ("queue", "kind"))
QUEUE_AGE: Final = MetricInfo(
    "purveyor_queue_oldest_age_seconds",
    MetricKind.GAUGE,
    "Age of the oldest message in a queue that a reader has not processed; 0 if there is none",
    ("queue", "kind"),
)
QUEUE_WRITTEN: Final = MetricInfo(
    "purveyor_queue_written_total",
    MetricKind.COUNTER,
    "Messages ever written to a queue: its last sequence",
    ("queue", "kind"),
)
QUEUE_SEALED: Final = MetricInfo(
    "purveyor_queue_sealed", MetricKind.GAUGE, "1 while a queue is sealed for its migration", ("queue", "kind")
)
DEAD_LETTERS: Final = MetricInfo(
    "purveyor_dead_letters",
    MetricKind.GAUGE,
    "Parked dead letters by the part or subscription that gave up",
    ("origin",),
)
SUBSCRIPTIONS: Final = MetricInfo(
    "purveyor_subscriptions",
    MetricKind.GAUGE,
    "Subscriptions by state: active, paused, suspended, prefilling, prefill_failed, unreadable",
    ("state",),
)
SUSPENDED: Final = MetricInfo(
    "purveyor_subscription_suspended",
    MetricKind.GAUGE,
    "1 for each subscription whose queue gets no events: the queue refused, or a dispatcher cannot read the record",
    ("subscription",),
)
UNREADABLE: Final = MetricInfo(
    "purveyor_subscription_unreadable",
    MetricKind.GAUGE,
    "1 for each subscription whose record this process cannot read, because a newer version wrote it",
    ("subscription",),
)
PUSH_FAILING: Final = MetricInfo(
    "purveyor_push_failing_seconds",
    MetricKind.GAUGE,
    "For how long a subscription has not been pushed, for each with a push problem or without a push worker",
    ("subscription",),
)
PUSH_FAILED_ATTEMPTS: Final = MetricInfo(
    "purveyor_push_failed_attempts",
    MetricKind.GAUGE,
    "Failed attempts since a failing endpoint of a subscription accepted a message",
    ("subscription",),
)
PUSH_LAST_STATUS: Final = MetricInfo(
    "purveyor_push_last_status",
    MetricKind.GAUGE,
    "Status of the last answer of a failing endpoint of a subscription; 0 if there was no answer",
    ("subscription",),
)
PUSH_BREAKER_OPEN: Final = MetricInfo(
    "purveyor_push_breaker_open",
    MetricKind.GAUGE,
    "1 if the circuit breaker of a failing endpoint of a subscription is open or half open, else 0",
    ("subscription",),
)
PREFILL_FAILED: Final = MetricInfo(
    "purveyor_subscription_prefill_failed",
    MetricKind.GAUGE,
    "1 for each subscription whose prefill failed",
    ("subscription",),
)
SERVER_UP: Final = MetricInfo("purveyor_nats_up", MetricKind.GAUGE, "1 if the NATS server answers this process")
PROCESS_UP: Final = MetricInfo(
    "purveyor_process_up",
    MetricKind.GAUGE,
    "1 if a process whose metrics the API includes answers; 0 if it hangs, or died and was not started again",
    ("process",),
)
PART_UP: Final = MetricInfo(
    "purveyor_pipeline_part_up", MetricKind.GAUGE, "1 if a part of the pipeline runs and answers", ("part",)
)
PART_POSITION: Final = MetricInfo(
    "purveyor_pipeline_position", MetricKind.GAUGE, "The position that a part of the pipeline has reached", ("part",)
)
PART_LAG: Final = MetricInfo(
    "purveyor_pipeline_lag_messages",
    MetricKind.GAUGE,
    "Messages between a part of the pipeline and the newest one",
    ("part",),
)
PART_RATE: Final = MetricInfo(
    "purveyor_pipeline_rows_per_second", MetricKind.GAUGE, "Speed of the last batch of a part", ("part",)
)
PART_BATCH: Final = MetricInfo(
    "purveyor_pipeline_last_batch_seconds", MetricKind.GAUGE, "Duration of the last batch of a part", ("part",)
)
PART_RESTARTS: Final = MetricInfo(
    "purveyor_pipeline_restarts_total", MetricKind.COUNTER, "Restarts of a part after a failure", ("part",)
)
WAITING: Final = MetricInfo(
    "purveyor_publishers_waiting",
    MetricKind.GAUGE,
    "Publishers of this process that wait for the migration of a queue",
    ("queue",),
)
WAITED: Final = MetricInfo(
    "purveyor_publisher_waits_total",
    MetricKind.COUNTER,
    "Waits of publishers for the migration of a queue",
    ("queue",),
)
WAITED_SECONDS: Final = MetricInfo(
    "purveyor_publisher_wait_seconds_total",
    MetricKind.COUNTER,
    "Time that publishers waited for the migration of a queue, current waits included",
    ("queue",),
)
BUFFERED: Final = MetricInfo(
    "purveyor_publisher_buffered_messages",
    MetricKind.GAUGE,
    "Messages of publishers that wait for the migration of a queue",
    ("queue",),
)
OUTBOX: Final = MetricInfo(
    "purveyor_outbox_messages",
    MetricKind.GAUGE,
    "Messages in the outbox of an application: unsent, or held because no stage accepts them",
    ("app", "state"),
)
STAGE_FAILING: Final = MetricInfo(
    "purveyor_stage_failing_messages",
    MetricKind.GAUGE,
    "Failed messages that will be retried; counted up to 100",
    ("app",),
)
DATABASE_UP: Final = MetricInfo(
    "purveyor_database_up", MetricKind.GAUGE, "1 if the database of an application answers", ("app",)
)
SOURCE_UP: Final = MetricInfo(
    "purveyor_source_up",
    MetricKind.GAUGE,
    "1 if this process follows the directory of a source; 0 if it stands by or cannot",
    ("source",),
)
SOURCE_ENTRIES: Final = MetricInfo(
    "purveyor_source_entries", MetricKind.GAUGE, "Entries of the directory of a source, as far as known", ("source",)
)
SOURCE_RECORDS: Final = MetricInfo(
    "purveyor_source_records_total", MetricKind.COUNTER, "Records of a source that the queue has stored", ("source",)
)
SOURCE_LAG: Final = MetricInfo(
    "purveyor_source_lag_seconds",
    MetricKind.GAUGE,
    "How long the last change took from the directory into the queue, by the clocks of both",
    ("source",),
)
SOURCE_WAITING: Final = MetricInfo(
    "purveyor_source_waiting_records",
    MetricKind.GAUGE,
    "Records of a source that were read and are not stored yet",
    ("source",),
)
SOURCE_INFO: Final = MetricInfo(
    "purveyor_source_info",
    MetricKind.GAUGE,
    "Always 1; the directory of a source and how its changes are read are labels",
    ("source", "directory", "base", "mode"),
)
SOURCE_LAST_CHANGE: Final = MetricInfo(
    "purveyor_source_last_change_timestamp_seconds",
    MetricKind.GAUGE,
    "When the last change that was read happened in the directory",
    ("source",),
)
SOURCE_LAST_ERROR: Final = MetricInfo(
    "purveyor_source_last_error_timestamp_seconds", MetricKind.GAUGE, "When a source failed last", ("source",)
)
BUILD: Final = MetricInfo("purveyor_build_info", MetricKind.GAUGE, "Always 1; the version is the label", ("version",))

SCRAPED: Final = (
    BUILD,
    SERVER_UP,
    PROCESS_UP,
    QUEUE_MESSAGES,
    QUEUE_BYTES,
    QUEUE_AGE,
    QUEUE_WRITTEN,
    QUEUE_SEALED,
    DEAD_LETTERS,
    SUBSCRIPTIONS,
    SUSPENDED,
    UNREADABLE,
    PREFILL_FAILED,
    PUSH_FAILING,
    PUSH_FAILED_ATTEMPTS,
    PUSH_LAST_STATUS,
    PUSH_BREAKER_OPEN,
    PART_UP,
    PART_POSITION,
    PART_LAG,
    PART_RATE,
    PART_BATCH,
    PART_RESTARTS,
    WAITING,
    WAITED,
    WAITED_SECONDS,
    BUFFERED,
    OUTBOX,
    STAGE_FAILING,
    DATABASE_UP,
    SOURCE_UP,
    SOURCE_ENTRIES,
    SOURCE_RECORDS,
    SOURCE_LAG,
    SOURCE_WAITING,
    SOURCE_INFO,
    SOURCE_LAST_CHANGE,
    SOURCE_LAST_ERROR,
)


def all_metrics() -> tuple[MetricInfo, ...]:
    """Return all metrics, sorted by name."""
    return tuple(sorted((*SCRAPED, *(instrument.info for instrument in INSTRUMENTS)), key=lambda metric: metric.name))


def sample_names(metric: MetricInfo) -> tuple[str, ...]:
    """Return the names of the series of a metric.

    >>> sample_names(MetricInfo("a_seconds", MetricKind.HISTOGRAM, ""))
    ('a_seconds_bucket', 'a_seconds_sum', 'a_seconds_count')
    """
    if metric.kind is MetricKind.HISTOGRAM:
        return tuple(f"{metric.name}_{end}" for end in ("bucket", "sum", "count"))
    return (metric.name,)

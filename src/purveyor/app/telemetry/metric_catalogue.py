"""Every metric there is, by name: those that parts keep (`model.figures`), and those that are looked up when asked.

Prometheus' page, its documentation, the dashboard and the alerts are all held to this list.
"""

from typing import Final

from purveyor.model.metric_types import Figure, Kind
from purveyor.model.metrics import METERS

QUEUE_MESSAGES: Final = Figure(
    "purveyor_queue_messages",
    Kind.GAUGE,
    "Messages that wait in a queue; kind: subscription, stage or internal",
    ("queue", "kind"),
)
QUEUE_BYTES: Final = Figure("purveyor_queue_bytes", Kind.GAUGE, "What a queue takes on disk", ("queue", "kind"))
QUEUE_AGE: Final = Figure(
    "purveyor_queue_oldest_age_seconds",
    Kind.GAUGE,
    "How long the oldest message has been in a queue; 0 if it is empty",
    ("queue", "kind"),
)
QUEUE_WRITTEN: Final = Figure(
    "purveyor_queue_written_total",
    Kind.COUNTER,
    "How many messages were ever written to a queue: its last sequence",
    ("queue", "kind"),
)
QUEUE_SEALED: Final = Figure(
    "purveyor_queue_sealed", Kind.GAUGE, "1 while a queue is sealed for its migration", ("queue", "kind")
)
DEAD_LETTERS: Final = Figure(
    "purveyor_dead_letters", Kind.GAUGE, "Dead letters that are parked, by what gave them up", ("origin",)
)
SUBSCRIPTIONS: Final = Figure(
    "purveyor_subscriptions",
    Kind.GAUGE,
    "Subscriptions by what they do: active, paused, suspended, prefilling, prefill_failed, unreadable",
    ("state",),
)
SUSPENDED: Final = Figure(
    "purveyor_subscription_suspended",
    Kind.GAUGE,
    "1 for each subscription to whose queue nothing is written: it refused, or a dispatcher does not understand it",
    ("subscription",),
)
UNREADABLE: Final = Figure(
    "purveyor_subscription_unreadable",
    Kind.GAUGE,
    "1 for each subscription that this process does not understand, because a newer program wrote its record",
    ("subscription",),
)
PREFILL_FAILED: Final = Figure(
    "purveyor_subscription_prefill_failed",
    Kind.GAUGE,
    "1 for each subscription whose prefill failed",
    ("subscription",),
)
SERVER_UP: Final = Figure("purveyor_nats_up", Kind.GAUGE, "Whether the NATS server answers this process")
PART_UP: Final = Figure("purveyor_pipeline_part_up", Kind.GAUGE, "Whether a part of the pipeline runs", ("part",))
PART_POSITION: Final = Figure(
    "purveyor_pipeline_position", Kind.GAUGE, "The position up to which a part of the pipeline is", ("part",)
)
PART_LAG: Final = Figure(
    "purveyor_pipeline_lag_messages", Kind.GAUGE, "How many messages a part of the pipeline is behind", ("part",)
)
PART_RATE: Final = Figure(
    "purveyor_pipeline_rows_per_second", Kind.GAUGE, "How fast the last batch of a part went", ("part",)
)
PART_BATCH: Final = Figure(
    "purveyor_pipeline_last_batch_seconds", Kind.GAUGE, "How long the last batch of a part took", ("part",)
)
PART_RESTARTS: Final = Figure(
    "purveyor_pipeline_restarts_total", Kind.COUNTER, "How often a part was started again after it failed", ("part",)
)
WAITING: Final = Figure(
    "purveyor_publishers_waiting",
    Kind.GAUGE,
    "Publishers of this process that wait for a queue which is being migrated",
    ("queue",),
)
WAITED: Final = Figure(
    "purveyor_publisher_waits_total",
    Kind.COUNTER,
    "How often a publisher had to wait for a queue which was being migrated",
    ("queue",),
)
WAITED_SECONDS: Final = Figure(
    "purveyor_publisher_wait_seconds_total",
    Kind.COUNTER,
    "For how long publishers waited for a queue which was being migrated, the waits under way included",
    ("queue",),
)
BUFFERED: Final = Figure(
    "purveyor_publisher_buffered_messages",
    Kind.GAUGE,
    "Messages in the hands of publishers that wait for a queue which is being migrated",
    ("queue",),
)
OUTBOX: Final = Figure(
    "purveyor_outbox_messages",
    Kind.GAUGE,
    "Messages in the outbox of an application: unsent, or held because nobody takes them",
    ("app", "state"),
)
STAGE_FAILING: Final = Figure(
    "purveyor_stage_failing_messages",
    Kind.GAUGE,
    "Messages that failed and will be tried again; counted up to 100",
    ("app",),
)
DATABASE_UP: Final = Figure(
    "purveyor_database_up", Kind.GAUGE, "Whether the database of an application answers", ("app",)
)
BUILD: Final = Figure("purveyor_build_info", Kind.GAUGE, "Always 1; the version is the label", ("version",))

LOOKED_UP: Final = (
    BUILD,
    SERVER_UP,
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
)


def figures() -> tuple[Figure, ...]:
    """All of them, by name."""
    return tuple(sorted((*LOOKED_UP, *(meter.figure for meter in METERS)), key=lambda figure: figure.name))


def samples(figure: Figure) -> tuple[str, ...]:
    """The names of the series that a figure has on the page.

    >>> samples(Figure("a_seconds", Kind.HISTOGRAM, ""))
    ('a_seconds_bucket', 'a_seconds_sum', 'a_seconds_count')
    """
    if figure.kind is Kind.HISTOGRAM:
        return tuple(f"{figure.name}_{end}" for end in ("bucket", "sum", "count"))
    return (figure.name,)

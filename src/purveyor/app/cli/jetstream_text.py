"""Texts of streams and consumers, in the terms of the JetStream documentation. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import assert_never

from purveyor.app.cli.render import (
    Rows,
    format_block,
    format_duration,
    format_limit,
    format_size,
    format_time,
    format_value,
)
from purveyor.jetstream.config import (
    ConsumerConfig,
    ConsumerInfo,
    Deliver,
    SequencePair,
    Storage,
    StreamConfig,
    StreamInfo,
    overhead,
)


@dataclass(frozen=True, slots=True)
class Cost:
    """The average disk space of a message of a stream; `subject` is None if there are too many subjects to count."""

    message: float
    subject: float | None

    @property
    def overhead(self) -> float | None:
        """Return the bytes stored in addition to payload and headers."""
        return None if self.subject is None else overhead(0) + self.subject


def compute_cost(info: StreamInfo, subjects: Mapping[str, int]) -> Cost | None:
    """Compute the cost from the number of messages of each subject; None for memory storage or an empty stream."""
    if not info.state.messages or info.config.storage is not Storage.FILE:
        return None
    counted = sum(subjects.values())
    size = sum(len(name.encode()) * count for name, count in subjects.items())
    return Cost(info.state.bytes / info.state.messages, size / counted if counted else None)


def cost_json(found: Cost) -> dict[str, float | None]:
    """Return the cost for JSON."""
    return {
        "average_message_bytes": found.message,
        "average_subject_bytes": found.subject,
        "overhead_bytes": found.overhead,
    }


def cost_rows(found: Cost) -> Rows:
    """Return the cost and its parts as rows."""
    rows: list[tuple[str, object]] = [("Average Message", format_size(found.message))]
    if found.subject is not None and found.overhead is not None:
        parts = f"4 length + 8 sequence + 8 time + 2 subject length + {_number(found.subject)} subject + 8 hash"
        content = format_size(max(found.message - found.overhead, 0))
        rows += [
            ("Overhead", f"{format_size(found.overhead)} = {parts}"),
            ("Content", f"{content} of payload and headers (headers add 4 for their length)"),
        ]
    return rows


def stream_settings(config: StreamConfig) -> Rows:
    """Return the settings of a stream as rows."""
    rows: list[tuple[str, object]] = [
        ("Subjects", config.subjects),
        ("Retention", config.retention),
        ("Discard Policy", f"{config.discard.value}{', per subject' if config.discard_new_per_subject else ''}"),
        ("Storage", config.storage),
        ("Replicas", config.num_replicas),
        ("Maximum Messages", format_limit(config.max_msgs)),
        ("Maximum Per Subject", format_limit(config.max_msgs_per_subject)),
        ("Maximum Bytes", format_limit(config.max_bytes, size=True)),
        ("Maximum Age", format_duration(config.max_age) if config.max_age else "none"),
        ("Maximum Message Size", format_limit(config.max_msg_size, size=True)),
        ("Duplicate Window", config.duplicate_window),
        ("Acknowledgements", not config.no_ack),
        ("Direct Get", config.allow_direct),
        ("Atomic Batches", config.allow_atomic),
        ("Compression", config.compression),
    ]
    if config.description:
        rows.insert(0, ("Description", config.description))
    if config.sealed:
        rows.append(("Sealed", True))
    return rows


def stream_state(info: StreamInfo) -> Rows:
    """Return the state of a stream as rows."""
    state = info.state
    return [
        ("Messages", state.messages),
        ("Bytes", format_size(state.bytes)),
        ("FirstSeq", _at(state.first_seq, state.first_ts)),
        ("LastSeq", _at(state.last_seq, state.last_ts)),
        ("Active Consumers", state.consumer_count),
        ("Subjects", state.num_subjects),
        ("Deleted", state.num_deleted),
    ]


def stream_text(info: StreamInfo, subjects: Mapping[str, int]) -> str:
    """Format a stream: settings, state and cost."""
    parts = [
        f"Stream {format_value(info.config.name)}{_created(info.created)}",
        format_block("Settings", stream_settings(info.config)),
        format_block("State", stream_state(info)),
    ]
    found = compute_cost(info, subjects)
    return "\n\n".join([*parts, format_block("Storage", cost_rows(found))] if found else parts)


def start_text(config: ConsumerConfig) -> str:
    """Describe the start of a consumer."""
    match config.deliver_policy:
        case Deliver.BY_START_SEQUENCE:
            return f"from sequence {config.opt_start_seq}"
        case Deliver.BY_START_TIME:
            return f"from {format_value(config.opt_start_time)}"
        case Deliver.LAST_PER_SUBJECT:
            return "last of each subject"
        case Deliver.ALL | Deliver.LAST | Deliver.NEW:
            return str(config.deliver_policy.value)
        case never:
            assert_never(never)


def consumer_settings(config: ConsumerConfig) -> Rows:
    """Return the settings of a consumer as rows."""
    rows: list[tuple[str, object]] = [
        (
            "Kind",
            f"{'durable' if config.durable_name else 'ephemeral'}, {'push' if config.deliver_subject else 'pull'}",
        ),
        ("Filter Subjects", config.filters or "all"),
        ("Deliver Policy", start_text(config)),
        ("Ack Policy", config.ack_policy),
        ("Ack Wait", config.ack_wait),
        ("Replay Policy", config.replay_policy),
        ("Maximum Deliveries", format_limit(config.max_deliver)),
        ("Max Ack Pending", format_limit(config.max_ack_pending or -1)),
    ]
    optional: list[tuple[str, object]] = [
        ("Description", config.description),
        ("Backoff", config.backoff),
        ("Sampling Rate", (config.sample_freq or "").removesuffix("%") or None),
        ("Delivery Subject", config.deliver_subject),
        ("Headers Only", config.headers_only or None),
        ("Inactive Threshold", config.inactive_threshold),
    ]
    return [*rows, *((label, value) for label, value in optional if value not in (None, ()))]


def consumer_state(info: ConsumerInfo) -> Rows:
    """Return the state of a consumer as rows."""
    rows: list[tuple[str, object]] = [
        ("Last Delivered Message", _pair(info.delivered)),
        ("Acknowledgment floor", _pair(info.ack_floor)),
        ("Pending Messages", info.num_ack_pending),
        ("Redelivered Messages", info.num_redelivered),
        ("Waiting Pulls", info.num_waiting),
        ("Unprocessed Messages", info.num_pending),
    ]
    if info.config.deliver_subject:
        rows.append(("Active Subscriber", info.push_bound))
    if info.paused:
        rows.append(("Paused For", info.pause_remaining))
    return rows


def consumer_text(info: ConsumerInfo) -> str:
    """Format a consumer: settings and state."""
    head = f"Consumer {format_value(info.name)} of stream {format_value(info.stream_name)}{_created(info.created)}"
    return "\n\n".join(
        [head, format_block("Settings", consumer_settings(info.config)), format_block("State", consumer_state(info))]
    )


def _created(moment: datetime | None) -> str:
    return f", created {format_time(moment)}" if moment else ""


def _at(sequence: int, moment: datetime | None) -> str:
    return f"{sequence} at {format_time(moment)}" if moment else str(sequence)


def _pair(pair: SequencePair) -> str:
    return f"Consumer sequence: {pair.consumer_seq} Stream sequence: {pair.stream_seq}"


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")

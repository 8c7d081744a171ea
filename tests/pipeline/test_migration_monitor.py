"""The service reports migrations and advances them until every queue is ready."""

from purveyor.model.errors import ServerUnavailable
from purveyor.pipeline.migration_monitor import MigrationMonitor
from purveyor.queues.migration.events import EventListener, MigrationCompleted, StreamDraining


def test_it_polls_until_all_queues_are_ready_and_reports_each_event_once() -> None:
    reported: list[tuple[str, str]] = []
    calls = 0

    def ensure(listener: EventListener) -> bool:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ServerUnavailable("away")
        listener(StreamDraining("x", 5) if calls < 4 else MigrationCompleted("x"))
        return calls >= 4

    monitor = MigrationMonitor(ensure, lambda event, text: reported.append((event, text)))
    monitor.ensure()
    for _ in range(6):
        monitor._poll_at = 0.0  # a second has passed
        monitor.poll()
    assert calls == 4, "it polls again after an outage, and no more when all queues are ready"
    assert reported == [
        ("migration", "Stream 'x' sealed with 5 messages remaining to drain"),
        ("migration", "Migration completed for 'x'"),
        ("migration", "Stream migration completed, resuming normal operation"),
    ]


def test_it_reports_the_migration_that_a_query_has_completed() -> None:
    reported: list[str] = []
    answers = iter((False, True))

    def ensure(listener: EventListener) -> bool:
        is_ready = next(answers)
        if not is_ready:
            listener(StreamDraining("stream:x", 5))
        return is_ready

    monitor = MigrationMonitor(ensure, lambda _, text: reported.append(text))
    monitor.ensure()
    monitor.ensure()
    assert reported == [
        "Stream 'stream:x' sealed with 5 messages remaining to drain",
        "Sealed stream 'stream:x' is empty, completing migration",
        "Migration completed for 'stream:x'",
        "Stream migration completed, resuming normal operation",
    ]

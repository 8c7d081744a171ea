"""The service tells of migrations and brings them forward until every queue is ready."""

import logging

from purveyor.model.errors import ServerUnavailable
from purveyor.pipeline.migration_monitor import MigrationWatch

LOGGER = logging.getLogger("purveyor.migration")


def test_it_looks_until_all_is_ready_and_tells_each_thing_once() -> None:
    said: list[tuple[str, str]] = []
    looks = 0

    def ensure() -> bool:
        nonlocal looks
        looks += 1
        if looks == 2:
            raise ServerUnavailable("away")
        LOGGER.info("sealed with 5 messages remaining to drain" if looks < 4 else "Migration completed for 'x'")
        return looks >= 4

    level, propagate = LOGGER.level, LOGGER.propagate
    with MigrationWatch(ensure, lambda event, text: said.append((event, text))) as watch:
        watch.ensure()
        for _ in range(6):
            watch._look_at = 0.0  # a second has passed
            watch.look()
    assert looks == 4, "it looks on after an outage, and no more when all is ready"
    assert said == [
        ("migration", "sealed with 5 messages remaining to drain"),
        ("migration", "Migration completed for 'x'"),
        ("migration", "Stream migration completed, resuming normal operation"),
    ]
    assert (LOGGER.level, LOGGER.propagate, LOGGER.handlers) == (level, propagate, [])


def test_it_tells_what_a_query_has_completed() -> None:
    said: list[str] = []
    answers = iter((False, True))

    def ensure() -> bool:
        ready = next(answers)
        if not ready:
            LOGGER.info("Stream '%s' sealed with %d messages remaining to drain", "stream:x", 5)
        return ready

    with MigrationWatch(ensure, lambda _, text: said.append(text)) as watch:
        watch.ensure()
        watch.ensure()
    assert said == [
        "Stream 'stream:x' sealed with 5 messages remaining to drain",
        "Sealed stream 'stream:x' is empty, completing migration",
        "Migration completed for 'stream:x'",
        "Stream migration completed, resuming normal operation",
    ]

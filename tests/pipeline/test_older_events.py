"""Events beyond the limits, as older versions accepted them, are delivered and archived, or parked with the reason."""

import json
from typing import Any

import pytest

from tests.support.archive import Archive, archive
from tests.support.dispatch_harness import DispatchHarness, harness

__all__ = ["archive", "harness"]


def older(number: int, **more: Any) -> bytes:
    base = {"publisher_name": "p", "ts": "2026-01-01T00:00:00+00:00", "realm": "udm", "topic": "t"}
    new = {"id": number, **more.pop("new", {})}
    return json.dumps(base | {"body": {"old": {}, "new": new}} | more).encode()


def nested(levels: int) -> Any:
    found: Any = 1
    for _ in range(levels):
        found = [found]
    return found


DELIVERED: dict[str, dict[str, Any]] = {
    "half a character in the object": {"new": {"name": "\ud800", "\udfff": 1}},
    "half a character in an attribute": {"attributes": {"a\ud800": "\ud800"}},
    "a control character in the key": {"key": "a\nb"},
    "a long topic": {"topic": "t" * 8000},
    "a long key": {"key": "k" * 100_000},
    "a long publisher": {"publisher_name": "p" * 100_000},
    "a long name": {"new": {"n" * 60_000: 1}},
    "a huge number": {"new": {"n": 10**400, "m": [10**4000]}},
    "deep nesting": {"new": {"n": nested(400)}},
    "the first time": {"ts": "0001-01-01T00:00:00+14:00"},
    "an early time": {"ts": "0001-01-01T00:00:00+00:00"},
    "the last time": {"ts": "9999-12-31T23:59:59.999999-14:00"},
}
PARKED: dict[str, dict[str, Any]] = {
    "half a character in the realm": {"realm": "udm\ud800"},
    "half a character in the topic": {"topic": "t\ud800"},
    "half a character in the key": {"key": "\ud800"},
    "half a character in the publisher": {"publisher_name": "\ud800"},
    "half a character in the key of the object": {"new": {"uuid": "\ud800"}},
}


def test_older_events_are_dispatched_or_parked_and_stop_no_subscription(harness: DispatchHarness) -> None:
    harness.add("all", ".*")
    good, bad = list(DELIVERED.values()), list(PARKED.values())
    numbers = range(len(good) + len(bad))
    harness.publish([older(number, **dict(each)) for number, each in zip(numbers, [*good, *bad], strict=True)])
    harness.events(1000, 1001)
    harness.dispatch()
    assert harness.numbers("all") == [*range(len(good)), 1000, 1001]
    assert len(harness.letters()) == len(bad)


@pytest.mark.parametrize("kind", ["event", "invalid"])
def test_they_are_archived(archive: Archive, kind: str) -> None:
    given = DELIVERED if kind == "event" else PARKED
    archive.publish(*(older(number, **dict(each)) for number, each in enumerate(given.values())))
    archive.catch_up()
    frame = archive.spark.read.parquet(str(archive.directory / "events" / "*")).select("position", "kind", "data")
    rows = {row.position: row for row in frame.collect()}
    for position, (name, each) in enumerate(given.items(), start=1):
        assert rows[position].kind == kind, name
        assert bytes(rows[position].data) == older(position - 1, **dict(each)), name

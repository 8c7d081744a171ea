"""What must be true after the pipeline has drained, found out without it: the archive's files, the queues, plain rules.

The archive is read as it lies (Parquet, with Arrow alone), queues by ranges, and who gets what is decided by the
reference rule `model.subscription.matches`.
"""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from purveyor.jetstream.headers import POSITION
from purveyor.model.event import Event
from purveyor.model.subscription import Subscription, matches
from tests.pipeline.directory import Expected, looked_at
from tests.support.broker import Broker


@dataclass(frozen=True)
class Stored:
    """A message of `incoming`, from the archive."""

    position: int
    subject: str
    id: str | None
    data: bytes

    def event(self) -> Event:
        return Event.decode(self.data)


def log_of(archive: Path) -> list[Stored]:
    """Every message that `incoming` ever had, by position."""
    rows: list[Stored] = []
    for directory in sorted((archive / "events").iterdir()):
        if directory.name.startswith((".", "_")):
            continue
        table = pa.concat_tables([pq.read_table(file) for file in sorted(directory.glob("*.parquet"))])
        columns = (table.column(name).to_pylist() for name in ("position", "subject", "id", "data"))
        rows += [Stored(*row) for row in zip(*columns, strict=True)]
    return sorted(rows, key=lambda row: row.position)


def check_log(log: Sequence[Stored], last: int, directory: Sequence[Expected], direct: Sequence[str]) -> None:
    """Each position once; each change of the directory once, in order, with its true old; each direct event once."""
    assert [row.position for row in log] == list(range(1, last + 1))
    reported = [row.event() for row in log if row.subject == "incoming.ldif"]
    assert len(reported) == len(directory)
    for event, expected in zip(reported, directory, strict=True):
        found = Expected(event.topic, str(event.object_key), looked_at(dict(event.old)), looked_at(dict(event.new)))
        assert found == expected
    assert [row.id for row in log if row.subject == "incoming"] == list(direct)


def check_queue(broker: Broker, log: Sequence[Stored], subscription: Subscription) -> int:
    """The live part of a queue: the matching events behind its beginning, once, in order, unchanged."""
    begin = _begin(log, subscription.name)
    wanted = [row for row in _events(log) if row.position > begin and matches(subscription, row.event())]
    found = list(_queue(broker, f"{subscription.name}.main"))
    assert [position for position, _ in found] == [row.position for row in wanted], subscription.name
    assert [data for _, data in found] == [row.data for row in wanted], subscription.name
    return len(found)


def check_prefill(broker: Broker, log: Sequence[Stored], subscription: Subscription) -> int:
    """The prefill is the state of all objects at the beginning: each that exists once, in the order of the topics."""
    begin = _begin(log, subscription.name)
    latest: dict[tuple[str, str, str | None], tuple[int, Event]] = {}
    for row in _events(log):
        if row.position <= begin:
            event = row.event()
            latest[event.realm, event.topic, event.object_key] = (row.position, event)
    wanted = []
    for position, event in latest.values():
        sent = dataclasses.replace(event, old={}) if event.new else None
        if sent is not None and matches(subscription, sent):
            publisher = sent.publisher_name.replace("udm-listener", "udm-pre-fill")
            wanted.append((_rank(subscription, sent), position, sent.new, publisher))
    sent_events = [(at, json.loads(data)) for at, data in _queue(broker, f"{subscription.name}.prefill")]
    found = [(at, each["body"], each["publisher_name"]) for at, each in sent_events]
    expected = [
        (at, {"old": {}, "new": new}, publisher) for _, at, new, publisher in sorted(wanted, key=lambda each: each[:2])
    ]
    assert found == expected, subscription.name
    return len(found)


def _rank(subscription: Subscription, event: Event) -> int:
    return next(at for at, each in enumerate(subscription.realms_topics) if each.matches(event.realm, event.topic))


def _events(log: Sequence[Stored]) -> Iterator[Stored]:
    return (row for row in log if row.subject != "incoming.control")


def _begin(log: Sequence[Stored], name: str) -> int:
    """The position of the last control event that added the name."""
    controls = [(row.position, json.loads(row.data)) for row in log if row.subject == "incoming.control"]
    added = [at for at, reported in controls if (reported["name"], reported["control"]) == (name, "subscription.added")]
    return max(added)


def _queue(broker: Broker, subject: str) -> Iterator[tuple[int, bytes]]:
    for row in broker.rows(f"stream:{subject.split('.', maxsplit=1)[0]}"):
        if row["subject"] == subject:
            headers: dict[str, Any] = dict(row["headers"])
            yield int(headers[POSITION][0]), row["data"]

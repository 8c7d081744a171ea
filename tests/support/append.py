"""Tables, targets and results for tests of the bulk append."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import (
    Outcome,
    Target,
)
from purveyor.jetstream.bulk.append.chained_writes import WriteSpeed, WriteSpeeds
from purveyor.jetstream.headers import POSITION
from tests.support.bulk_messages import rows
from tests.support.bulk_servers import make_stream

CHAINED, BATCHED = "chained", "batched"


class FixedSpeeds(WriteSpeeds):
    """Write speeds that are set instead of measured."""

    def __init__(self, pace: WriteSpeed) -> None:
        super().__init__()
        self._pace = pace

    def of(self, urls: tuple[str, ...]) -> WriteSpeed:
        return self._pace


def choose_write_mode(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write rows in one of the two modes wherever both are possible."""
    pace = WriteSpeed.FAST if way == CHAINED else WriteSpeed.SLOW
    monkeypatch.setattr("purveyor.jetstream.bulk.append.chained_writes.WRITE_SPEEDS", FixedSpeeds(pace))


def limit_batch_rows(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Send the next rows of a chain only after the caller has the result of the rows before."""
    monkeypatch.setattr("purveyor.jetstream.bulk.append.chained_writes._MAX_ROWS_IN_FLIGHT", 1)
    monkeypatch.setattr("purveyor.jetstream.bulk.append.chained_writes._MAX_ROWS_PER_SEND", rows)
    monkeypatch.setattr("purveyor.jetstream.bulk.append.chained_writes._ROWS_PER_REPLY", rows)


def table(positions: Sequence[int], *, ids: bool = True, body: bytes = b"") -> pa.Table:
    """Return rows whose data is their position."""
    columns: dict[str, Any] = {
        "position": pa.array(positions, pa.int64()),
        "data": pa.array([b"%d" % position + body for position in positions], pa.binary()),
    }
    if ids:
        columns["msg_id"] = pa.array([str(position) for position in positions], pa.string())
    return pa.table(columns)


def make(address: Address, name: str, **config: Any) -> Target:
    make_stream(address, name, allow_atomic=True, **config)
    return Target(subject=f"{name}.main", stream=name)


def stored(address: Address, stream: str) -> list[int]:
    """Return the positions in the headers of a stream; assert that the data agrees."""
    found = rows(address, stream)
    positions = [int(dict(row["headers"])[POSITION][0]) for row in found]
    assert [int(row["data"].rstrip(b"\0")) for row in found] == positions
    return positions


def one(outcomes: list[Outcome]) -> Outcome:
    (outcome,) = outcomes
    return outcome

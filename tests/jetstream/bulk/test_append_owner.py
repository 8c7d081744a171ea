"""A queue that is deleted and created again for another owner gets no row of the first owner."""

from collections.abc import Callable
from typing import Any

import pytest

from purveyor.jetstream.address import Address
from purveyor.jetstream.bulk import (
    AppendOptions,
    Outcome,
    RefusalKind,
    Target,
    append_once,
    outgoing,
    publish_many,
)
from purveyor.jetstream.bulk.append.target_state import TargetState
from purveyor.jetstream.bulk.append.writer import Appender
from purveyor.jetstream.config import INCARNATION
from tests.support.append import BATCHED, CHAINED, choose_write_mode, one, stored, table
from tests.support.bulk_servers import make_stream, request_api, state


@pytest.fixture(params=[CHAINED, BATCHED], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    choose_write_mode(request.param, monkeypatch)


def make(address: Address, name: str, owner: str, **config: Any) -> Target:
    make_stream(address, name, allow_atomic=True, metadata={INCARNATION: owner}, **config)
    return Target(subject=f"{name}.main", stream=name, owner=owner)


def make_again(address: Address, name: str) -> None:
    """Create the stream again as for another subscription of that name: its sequences begin well after the old ones."""
    last = state(address, name)["last_seq"]
    request_api(address, f"STREAM.DELETE.{name}")
    make(address, name, "another", first_seq=last + 1000)


def before_writing(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None], *, times: int = 1) -> None:
    """Act after the last read and before the first write."""
    schedule_next = Appender._schedule_next
    left = times

    def acting(self: Appender, state: TargetState) -> None:
        nonlocal left
        if left:
            left -= 1
            act()
        schedule_next(self, state)

    monkeypatch.setattr(Appender, "_schedule_next", acting)


def test_a_queue_of_another_owner_is_refused(address: Address, name: str) -> None:
    target = make(address, name, "one")
    append_once(address, [(target, table([1, 2]))])
    make_again(address, name)
    refused = one(append_once(address, [(target, table([1, 2, 3]))])).refused
    assert refused is not None
    assert (refused.kind, refused.position) == (RefusalKind.REPLACED, 1)
    assert stored(address, name) == []


def test_a_queue_without_an_owner_takes_rows(address: Address, name: str) -> None:
    make_stream(address, name, allow_atomic=True)
    append_once(address, [(Target(subject=f"{name}.main", stream=name, owner="one"), table([1, 2]))])
    assert stored(address, name) == [1, 2]


@pytest.mark.parametrize("there", [0, 2])
@pytest.mark.parametrize("count", [1, 30, 1500])
def test_a_queue_that_changes_owner_between_read_and_write_gets_nothing(
    address: Address, name: str, monkeypatch: pytest.MonkeyPatch, there: int, count: int
) -> None:
    target = make(address, name, "one")
    append_once(address, [(target, table(range(1, there + 1)))])
    before_writing(monkeypatch, lambda: make_again(address, name))
    outcome = one(append_once(address, [(target, table(range(1, there + count + 1)))]))
    assert outcome.refused is not None
    assert outcome.refused.kind is RefusalKind.REPLACED
    assert stored(address, name) == []


def test_a_queue_that_changes_owner_between_rows_gets_none_of_the_rest(address: Address, name: str) -> None:
    target = make(address, name, "one")
    swapped: list[int] = []

    def swap(rows: int) -> None:
        if not swapped:
            swapped.append(rows)
            make_again(address, name)

    outcome = one(append_once(address, [(target, table(range(1, 4001)))], AppendOptions(on_progress=swap)))
    assert swapped
    assert outcome.refused is not None
    assert outcome.refused.kind in (RefusalKind.REPLACED, RefusalKind.MISSING_STREAM)
    assert stored(address, name) == []


def test_constant_writes_to_other_subjects_do_not_block_a_target(
    address: Address, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make(address, name, "one")

    def write() -> None:
        publish_many(address, outgoing([(f"{name}.prefill", b"x", None, None)]))

    before_writing(monkeypatch, write, times=1000)
    outcome = one(append_once(address, [(target, table(range(1, 20)))]))
    assert outcome == Outcome(target, 19, 0, 19)

"""The order in which a stage works on its messages."""

from datetime import UTC, datetime
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from purveyor.stages.runner import KeyScheduler
from purveyor.stages.source import Incoming


def incoming(number: int, key: str | None, *, interactive: bool = False) -> Incoming:
    return Incoming(
        id=str(number),
        subject="s",
        data=b"",
        headers={},
        sequence=number,
        deliveries=1,
        stored=datetime(2026, 1, 1, tzinfo=UTC),
        key=key,
        interactive=interactive,
    )


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4), st.booleans()), max_size=60), st.data())
def test_the_scheduler_keeps_the_order_of_each_key_and_loses_nothing(steps: list[Any], data: st.DataObject) -> None:
    scheduler = KeyScheduler(ordered=True)
    at_work: list[list[Incoming]] = []
    done: dict[str, list[int]] = {key: [] for key in "abc"}
    added: dict[str, list[int]] = {key: [] for key in "abc"}

    def finish(group: list[Incoming], *, fails: bool) -> None:
        if fails:
            scheduler.put_back(group)
        else:
            for message in group:
                done[message.key or ""].append(message.sequence)
        scheduler.release(message.key for message in group)

    for number, (key, limit, fails) in enumerate(steps):
        scheduler.add([incoming(number, key, interactive=number % 5 == 0)])
        added[key].append(number)
        if taken := scheduler.take(limit):
            busy = {message.key for group in at_work for message in group}
            assert not busy & {message.key for message in taken}
            at_work.append(taken)
        ends: bool = data.draw(st.booleans())
        if at_work and ends:
            finish(at_work.pop(0), fails=fails)
    for group in at_work:
        finish(group, fails=False)
    while taken := scheduler.take(3):
        finish(taken, fails=False)
    assert done == added


def test_in_parallel_interactive_messages_come_first() -> None:
    scheduler = KeyScheduler(ordered=False)
    scheduler.add([incoming(1, None), incoming(2, None), incoming(3, None, interactive=True)])
    assert [message.sequence for message in scheduler.take(2)] == [3, 1]
    scheduler.put_back([incoming(1, None)])
    assert [message.sequence for message in scheduler.drain()] == [1, 2]
    assert not scheduler.has_ready

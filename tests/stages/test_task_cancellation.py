"""Tasks end when they are cancelled, also if an error of a library replaces a cancellation."""

import asyncio

import pytest

from purveyor.stages import task_cancellation
from purveyor.stages.task_cancellation import end_tasks, run_together


@pytest.fixture(autouse=True)
def repeats_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_cancellation, "_REPEAT_SECONDS", 0.01)


async def ignore_cancellations(count: int) -> None:
    """Survive some cancellations, as a worker does whose database raises another error instead."""
    for _ in range(count):
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue
    await asyncio.sleep(3600)


async def fail() -> None:
    raise ValueError("on purpose")


async def test_an_error_ends_the_others_however_often_they_must_be_cancelled() -> None:
    with pytest.raises(ValueError, match="on purpose"):
        await run_together([ignore_cancellations(3), ignore_cancellations(0), fail()])
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_the_callers_cancellation_takes_effect_when_all_have_ended() -> None:
    running = asyncio.create_task(run_together([ignore_cancellations(3), ignore_cancellations(1)]))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_tasks_that_have_ended_need_nothing() -> None:
    ended = asyncio.create_task(fail())
    await asyncio.wait([ended])
    await end_tasks([ended])

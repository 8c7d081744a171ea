"""A test that waits in vain says for what, and what it saw last."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.support.waiting import until, wait_until

SHORT = 0.05


def counting() -> Iterator[int]:
    yield from range(100)


def test_the_first_true_value_is_returned() -> None:
    numbers = counting()
    assert wait_until(lambda: next(numbers)) == 1


async def test_a_condition_is_a_function_or_a_coroutine_function() -> None:
    numbers = counting()

    async def later() -> int:
        return next(numbers)

    assert await until(lambda: next(numbers)) == 1
    assert await until(later) == 2


def test_a_wait_that_fails_names_its_condition_and_the_last_value() -> None:
    with pytest.raises(AssertionError, match=r"waited 0\.05 s for the second message; last seen: \[\]"):
        wait_until(list, what="the second message", seconds=SHORT)
    with pytest.raises(AssertionError, match=r"the condition <lambda> in .*test_waiting\.py:\d+; last seen: 0"):
        wait_until(lambda: 0, seconds=SHORT)


async def test_asynchronous_as_well() -> None:
    with pytest.raises(AssertionError, match=r"for the second message; last seen: \[\]"):
        await until(list, what="the second message", seconds=SHORT)
    with pytest.raises(AssertionError, match=r"last seen: 'nothing: the condition has not returned'"):
        await until(asyncio.Event().wait, seconds=SHORT)


async def test_an_exception_ends_the_wait_unless_it_is_ignored() -> None:
    def fails() -> bool:
        raise ValueError("not yet")

    with pytest.raises(ValueError, match="not yet"):
        wait_until(fails, seconds=SHORT)
    with pytest.raises(ValueError, match="not yet"):
        await until(fails, seconds=SHORT)
    with pytest.raises(AssertionError, match=r"last seen: ValueError\('not yet'\)") as failed:
        wait_until(fails, seconds=SHORT, ignoring=(ValueError,))
    assert isinstance(failed.value.__cause__, ValueError)
    with pytest.raises(AssertionError, match=r"last seen: ValueError\('not yet'\)"):
        await until(fails, seconds=SHORT, ignoring=(ValueError,))


async def test_a_timeout_inside_the_condition_is_its_own() -> None:
    async def fails() -> bool:
        raise TimeoutError("of the server")

    with pytest.raises(TimeoutError, match="of the server"):
        await until(fails, seconds=SHORT)

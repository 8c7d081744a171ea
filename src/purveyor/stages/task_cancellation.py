"""Tasks that end when they are cancelled, also while the database ends their connections.

psycopg cancels the query of a cancelled task. If the connection is lost meanwhile, it raises the error of that, and the
cancellation is gone: a worker takes the error for a failure of its message and continues. A `TaskGroup` cancels a task
only once, and would wait for such a worker for ever. So these functions cancel again until the task has ended.
"""

import asyncio
from collections.abc import Collection, Coroutine
from typing import Any, Final

_REPEAT_SECONDS: Final = 2.0
"""Long enough for a task to roll back before it is cancelled again."""


async def run_together(coroutines: Collection[Coroutine[Any, Any, None]]) -> None:
    """Run coroutines until all have ended or one has failed; then end the others and raise its error."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        await end_tasks(tasks)


async def end_tasks(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks until they have ended. A cancellation of the caller takes effect after that."""
    was_cancelled = False
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        try:
            await asyncio.wait(pending, timeout=_REPEAT_SECONDS)
        except asyncio.CancelledError:
            was_cancelled = True
    for task in tasks:
        if not task.cancelled():
            task.exception()  # it has been raised, or comes from the end of the task: nothing more to report
    if was_cancelled:
        raise asyncio.CancelledError

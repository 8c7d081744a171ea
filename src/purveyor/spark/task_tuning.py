"""Tuning of tasks in Spark's Python workers: read ahead in a thread, and keep imports out of the garbage collector.

Spark sends Arrow batches through a socket of some hundred kilobytes. Without `read_ahead` the JVM and the worker take
turns: one waits while the other works.

PySpark makes a worker collect all garbage after every task, and the collector walks over everything that was imported.
A micro-batch is four small tasks in four workers, in which that costs more than the messages do. `freeze_imports` takes
the imports out of that.
"""

import gc
import queue
import threading
from collections.abc import Iterator
from itertools import count
from typing import Final, TypeVar

T = TypeVar("T")
_END_OF_ITEMS: Final = object()
_TASKS: Final = count(1)


def read_ahead(items: Iterator[T], *, waiting: int = 1) -> Iterator[T]:
    """Yield the same items; a thread prepares the next while `waiting` wait.

    An error is raised where it would have been.

    >>> list(read_ahead(iter("abc")))
    ['a', 'b', 'c']
    """
    made: queue.Queue[object] = queue.Queue(waiting)
    ended = threading.Event()

    def make() -> None:
        try:
            for item in items:
                if not _put(made, item, ended):
                    return
            _put(made, _END_OF_ITEMS, ended)
        except BaseException as error:  # noqa: BLE001 - the reading side raises it
            _put(made, _Raised(error), ended)

    threading.Thread(target=make, name="purveyor-read-ahead", daemon=True).start()
    try:
        while (item := made.get()) is not _END_OF_ITEMS:
            if isinstance(item, _Raised):
                raise item.error
            yield item  # type: ignore[misc]  # everything but the marks comes from `items`
    finally:
        ended.set()


class _Raised:
    def __init__(self, error: BaseException) -> None:
        self.error = error


def _put(made: "queue.Queue[object]", item: object, ended: threading.Event) -> bool:
    while not ended.is_set():
        try:
            made.put(item, timeout=1)
        except queue.Full:
            continue
        return True
    return False


def freeze_imports() -> None:
    """Keep the collector from visiting what was imported, which stays as long as the worker.

    Call it at the beginning of a task. It acts at the 1st, 2nd, 4th, 8th, ... call: a task imports modules when it
    needs them, so the second call covers the imports of the first task, and a worker may get other work later.
    """
    if next(_TASKS).bit_count() == 1:
        gc.collect()
        gc.freeze()

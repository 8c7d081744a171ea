"""Work on one batch while the next is made: what a task takes in or gives out, one step ahead of it.

Spark hands Arrow batches over a socket of some hundred kilobytes, so without this its side and ours take turns: one
waits while the other works.
"""

import queue
import threading
from collections.abc import Iterator
from typing import Final, TypeVar

T = TypeVar("T")
_END: Final = object()


def read_ahead(items: Iterator[T], *, most: int = 1) -> Iterator[T]:
    """The same items; `most` wait while one more is made, in a thread. An error comes where it would have come.

    >>> list(read_ahead(iter("abc")))
    ['a', 'b', 'c']
    """
    made: queue.Queue[object] = queue.Queue(most)
    ended = threading.Event()

    def make() -> None:
        try:
            for item in items:
                if not _put(made, item, ended):
                    return
            _put(made, _END, ended)
        except BaseException as error:  # noqa: BLE001 - raised again by the one who reads
            _put(made, _Raised(error), ended)

    threading.Thread(target=make, name="purveyor-read-ahead", daemon=True).start()
    try:
        while (item := made.get()) is not _END:
            if isinstance(item, _Raised):
                raise item.error
            yield item  # type: ignore[misc]  # what is no mark was made by `items`
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

"""What a Python worker of Spark does now and then.

PySpark has a worker collect its garbage after every task, all of it, and the collector walks over whatever was imported
to find none there. A micro-batch is four small tasks in four workers, which this costs more than the messages do.
"""

import gc
from itertools import count
from typing import Final

_TASKS: Final = count(1)


def spare_imports() -> None:
    """What was imported stays as long as the worker: the collector need not look at it after each task.

    Called at the beginning of a task, and done at the 1st, 2nd, 4th, 8th, ...: a task imports what it needs when it
    needs it, so what the first one brought is known at the second, and a worker may be given other work later.
    """
    if next(_TASKS).bit_count() == 1:
        gc.collect()
        gc.freeze()

"""What a Python worker of Spark does once in its life.

PySpark has a worker collect its garbage after every task, all of it, and the collector walks over whatever was imported
to find none there. A micro-batch is four small tasks in four workers, which this costs more than the messages do.
"""

import gc
from functools import cache


@cache
def spare_imports() -> None:
    """What was imported stays as long as the worker: the collector need not look at it after each task."""
    gc.collect()
    gc.freeze()

"""Python imports this module when a process of Spark's Python workers starts. It makes workers start fast and silent.

**Imports.** Spark starts a daemon for each kind of worker. The daemon forks the workers, and each worker would import
Arrow and the code of Purveyor: half a second of processor time each, a dozen times until the first batches
are done, and again whenever Spark has ended workers that were idle. So the daemon imports them once, before it forks.
Variables keep libraries from starting a thread when they are imported: a process with threads must not fork.

**Tracebacks.** Spark closes the connection of a worker that had nothing to do for a minute, and of every worker when it
stops. A worker of pyspark then reads the end of the connection, tries to report that as an error, and prints the
traceback of a broken pipe. Spark has no setting for that, and starts some workers with a fixed module, so this module
replaces the function with which the daemon of pyspark prints. Every other error is printed as before.

A process imports only one `sitecustomize`. So this one imports the next one on the path, if there is one.
"""

import contextlib
import gc
import importlib
import os
import sys
from pathlib import Path
from typing import Any

_DAEMON = "pyspark.daemon"
_NO_THREADS = {
    "OPENBLAS_NUM_THREADS": "1",  # numpy
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # the allocator of Arrow
}
_SOURCES = ("purveyor.pipeline.event_sources", "pyarrow.compute")
_TASKS = (
    "purveyor.pipeline.matching",
    "purveyor.pipeline.dispatch.write_task",
    "purveyor.pipeline.transform.state_processor",
    "purveyor.pipeline.transform.output_writer",
)
_OF_WORKERS = {
    "pyspark.worker": (*_SOURCES, *_TASKS),
    "pyspark.sql.streaming.transform_with_state_driver_worker": ("purveyor.pipeline.transform.state_processor",),
}
"""What the workers of a module import; those that plan a read import the sources."""


def _import_before_fork(module: str) -> None:
    """Import the module of the workers, and what they will need."""
    for name, value in _NO_THREADS.items():
        os.environ.setdefault(name, value)
    for each in (module, *_OF_WORKERS.get(module, _SOURCES)):
        with contextlib.suppress(Exception):  # the worker that needs it reports the error
            importlib.import_module(each)
    gc.collect()
    gc.freeze()


def _ignore_broken_pipes() -> None:
    import traceback  # noqa: PLC0415 - other Python processes need not pay for it

    print_exc = traceback.print_exc

    def print_other_errors(*args: Any, **options: Any) -> None:
        if not isinstance(sys.exc_info()[1], BrokenPipeError | ConnectionResetError):
            print_exc(*args, **options)

    traceback.print_exc = print_other_errors


def _import_next() -> None:
    here = str(Path(__file__).parent)
    kept = sys.path[:]
    sys.path[:] = [each for each in kept if each != here]
    own = sys.modules.pop(__name__, None)
    try:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module("sitecustomize")
    finally:
        if own is not None:
            sys.modules.setdefault(__name__, own)
        sys.path[:] = kept


if __name__ == "sitecustomize":
    if _DAEMON in sys.orig_argv:
        _ignore_broken_pipes()
        if sys.orig_argv[-1] != _DAEMON:
            _import_before_fork(sys.orig_argv[-1])
    _import_next()

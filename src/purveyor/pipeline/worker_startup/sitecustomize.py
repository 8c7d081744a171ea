"""Python imports this module when a process of Spark's Python workers starts. It removes tracebacks of normal life.

Spark closes the connection of a worker that had nothing to do for a minute, and of every worker when it stops. A worker
of pyspark then reads the end of the connection, tries to report that as an error, and prints the traceback of a broken
pipe. Spark has no setting for that, and starts some workers with a fixed module, so this module replaces the function
with which the daemon of pyspark prints. Every other error is printed as before.

A process imports only one `sitecustomize`. So this one imports the next one on the path, if there is one.
"""

import contextlib
import importlib
import sys
from pathlib import Path
from typing import Any


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
    if "pyspark.daemon" in sys.orig_argv:
        _ignore_broken_pipes()
    _import_next()

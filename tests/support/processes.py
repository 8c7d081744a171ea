"""Processes of Spark programs: their environment, and how a test finds and kills them."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

JVM_OPTIONS = "SPARK_SUBMIT_OPTS"


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a new shell, without the variables that a Spark session sets in this process."""
    ours = ("SPARK_", "PYSPARK_", "JAVA_HOME")
    theirs = {name: value for name, value in os.environ.items() if not name.startswith(ours) or name == JVM_OPTIONS}
    return theirs | more


def descendants(root: int, word: str) -> list[int]:
    """Return all processes below `root` whose command line contains the word."""
    parents, commands = _table()
    found = []
    for pid in commands:
        above, line = parents.get(pid), commands[pid]
        while above is not None and above != root:
            above = parents.get(above)
        if above == root and word in line:
            found.append(pid)
    return sorted(found)


def python_workers(root: int) -> list[int]:
    """Return the Python workers below `root` that run tasks (a worker is a fork of its daemon).

    Spark plans a batch with Python workers too, `pyspark.sql.worker.*`. It repeats a task whose worker is killed, and
    fails the query if a worker that plans is.
    """
    parents, _ = _table()
    daemons = set(descendants(root, "pyspark.daemon pyspark.worker"))
    return [pid for pid in daemons if parents.get(pid) in daemons]


def kill(pid: int) -> bool:
    """Kill a process with SIGKILL; return whether it existed."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def suspended(pid: int) -> Iterator[None]:
    """Suspend a process until the end of the block: it exists, and does not answer."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _table() -> tuple[dict[int, int], dict[int, str]]:
    parents: dict[int, int] = {}
    commands: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            status = (entry / "stat").read_text()
            commands[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        parents[int(entry.name)] = int(status.rpartition(")")[2].split()[1])
    return parents, commands

"""A standalone Spark cluster on this machine: a master, two workers, one spark-submit, and everything down again.

    python cluster.py job.py --servers nats://127.0.0.1:4222 --checkpoint /tmp/bills

All further arguments go to spark-submit unchanged. Needs `pip install 'purveyor[spark]'`.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pyspark

from purveyor.spark.java import find_java

SPARK = Path(pyspark.__file__).parent
HOST = "127.0.0.1"
START_SECONDS = 120


def main() -> int:
    """The exit code of the job."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        home = Path(scratch)
        environment = {
            **os.environ,
            "JAVA_HOME": str(find_java(home).home),
            "SPARK_HOME": str(SPARK),
            "SPARK_LOCAL_IP": HOST,
            "SPARK_LOCAL_DIRS": scratch,
            "SPARK_WORKER_DIR": scratch,
            "PYSPARK_PYTHON": sys.executable,
        }
        port, ui = free_port(), free_port()
        url = f"spark://{HOST}:{port}"
        master = ["master.Master", "--host", HOST, "--port", str(port), "--webui-port", str(ui)]
        worker = ["worker.Worker", "--host", HOST, "--webui-port", "0", "--cores", "1", "--memory", "1g", url]
        for program in (master, worker, worker):
            stack.enter_context(running(program, environment, home))
        wait_for_workers(ui, 2)
        submit = [str(SPARK / "bin" / "spark-submit"), "--master", url]  # the job sends the package to its executors
        return subprocess.run([*submit, *sys.argv[1:]], env=environment, check=False).returncode


@contextlib.contextmanager
def running(program: list[str], environment: dict[str, str], home: Path) -> Iterator[None]:
    """A part of the cluster, for as long as it is needed."""
    command = [str(SPARK / "bin" / "spark-class"), f"org.apache.spark.deploy.{program[0]}", *program[1:]]
    with (home / "cluster.log").open("ab") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def wait_for_workers(ui: int, count: int) -> None:
    """Until the master knows that many workers."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        # A master that is just coming up answers with a page that is no JSON.
        quiet = contextlib.suppress(OSError, ValueError, KeyError)
        with quiet, urllib.request.urlopen(f"http://{HOST}:{ui}/json", timeout=5) as answer:
            if json.load(answer)["aliveworkers"] >= count:
                return
        time.sleep(0.2)
    raise SystemExit(f"the cluster did not come up within {START_SECONDS} s")


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())

"""The workers of a session run the Python of its driver, or an error says what to set."""

import subprocess
import sys
from pathlib import Path

import pytest

from purveyor.model.errors import InvalidConfig
from purveyor.spark.java import find_java
from purveyor.spark.session import worker_python
from tests.support.broker import Broker
from tests.support.processes import environment

ROOT = Path(__file__).parents[2]


def run(
    broker: Broker, unique: str, directory: Path, master: str, **variables: str
) -> "subprocess.CompletedProcess[str]":
    """A program in this virtual environment, which is not activated: `python3` is another Python, without packages."""
    other = directory / "bin" / "python3"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\necho \"No module named 'purveyor'\" >&2\nexit 1\n")
    other.chmod(0o755)
    source, target = broker.make(f"{unique}-a"), broker.make(f"{unique}-b")
    broker.numbers(source, 1, 20)
    arguments = [broker.url, source, target, str(directory / "checkpoint"), master]
    given = environment(
        JAVA_HOME=str(find_java(directory / "java").home),
        PATH=f"{other.parent}:/usr/local/bin:/usr/bin:/bin",
        PYTHONPATH=str(ROOT / "src"),
        SPARK_LOCAL_IP="127.0.0.1",
        **variables,
    )
    given.pop("VIRTUAL_ENV", None)
    return subprocess.run(
        [sys.executable, "-m", "tests.spark.plain_session", *arguments],
        cwd=ROOT,
        env=given,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_a_local_session_of_a_virtual_environment_that_is_not_activated_works(
    broker: Broker, unique: str, tmp_path: Path
) -> None:
    done = run(broker, unique, tmp_path, "local[1]")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "read 20" in done.stdout
    assert [bytes(row["data"]) for row in broker.rows(f"{unique}-b")] == [b"%d" % number for number in range(1, 21)]


def test_the_users_python_wins() -> None:
    for local in (True, False):
        assert worker_python("/opt/python", "/opt/python", local=local, environment="/venv") == "/opt/python"
        assert worker_python("python3", "python3", local=local, environment="/venv") == "python3"
    assert worker_python("python3", "/opt/python", local=True, environment="/venv") == "/opt/python"


def test_a_local_session_gets_the_python_of_its_driver() -> None:
    for prefix in ("/venv", None):
        assert worker_python("python3", None, local=True, environment=prefix) == sys.executable


def test_on_a_cluster_a_virtual_environment_needs_pyspark_python() -> None:
    assert worker_python("python3", None, local=False, environment=None) == "python3"
    with pytest.raises(InvalidConfig, match="set PYSPARK_PYTHON"):
        worker_python("python3", None, local=False, environment="/venv")

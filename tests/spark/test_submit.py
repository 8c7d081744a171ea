"""The example job, as its reader would run it: with spark-submit, and on a standalone cluster of two workers."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

from purveyor.spark.java import find_java
from purveyor.spark.session import package_zip
from tests.support.broker import Broker
from tests.support.processes import environment

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "spark"
COUNTRIES = ("de", "fr", "it")


@pytest.fixture
def orders(broker: Broker) -> Iterator[Broker]:
    """The streams that the example names."""
    for stream, subjects in (("ORDERS", "orders.*"), ("BILLS", "bills.*")):
        broker.make(stream, subjects=[subjects])
    order(broker, 300)
    yield broker
    for stream in ("ORDERS", "BILLS"):
        broker.drop(stream)


def order(broker: Broker, count: int) -> None:
    broker.add(
        "",
        [
            (f"orders.{COUNTRIES[n % 3]}", b'{"customer": "c%d", "cents": %d}' % (n, 100 * (n % 10)), None, None)
            for n in range(count)
        ],
    )


def billed(broker: Broker) -> dict[str, list[int]]:
    """The orders billed, per subject, in the order of the bills."""
    found: dict[str, list[int]] = {}
    for row in broker.rows("BILLS"):
        order = int(dict(row["headers"])["Nats-Msg-Id"][0].removeprefix("ORDERS:"))
        found.setdefault(row["subject"], []).append(order)
    return found


def run(command: list[str | Path], directory: Path, **variables: str) -> str:
    done = subprocess.run(
        command,
        cwd=directory,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    reported = [line for line in done.stderr.splitlines() if " INFO " not in line and not line.startswith("\tat ")]
    assert done.returncode == 0, "\n".join(reported[-40:])
    return done.stdout


EXPECTED = {
    f"bills.{country}": [n + 1 for n in range(300) if n % 3 == place and n % 10]
    for place, country in enumerate(COUNTRIES)
}


@pytest.mark.long
@pytest.mark.chaos
def test_spark_submit_with_the_package_as_a_file(orders: Broker, tmp_path: Path) -> None:
    """The package is installed for the driver, and sent along for the workers."""
    arguments = ["--servers", orders.url, "--checkpoint", str(tmp_path / "cp")]
    submit = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    reported = run(
        [submit, "--master", "local[2]", "--py-files", str(package_zip()), EXAMPLES / "job.py", *arguments],
        tmp_path,
        JAVA_HOME=str(find_java(tmp_path / "java").home),
        PYSPARK_PYTHON=sys.executable,
        SPARK_LOCAL_IP="127.0.0.1",
        PYTHONPATH=str(ROOT / "src"),
    )
    assert "|bills.de|" in reported
    assert billed(orders) == EXPECTED


@pytest.mark.chaos
@pytest.mark.long
def test_a_standalone_cluster_of_two_workers(orders: Broker, tmp_path: Path) -> None:
    arguments = ["--servers", orders.url, "--checkpoint", str(tmp_path / "cp")]
    command: list[str | Path] = [sys.executable, EXAMPLES / "cluster.py", EXAMPLES / "job.py", *arguments]
    reported = run(command, tmp_path, PYTHONPATH=str(ROOT / "src"))
    assert "|bills.de|" in reported
    assert billed(orders) == EXPECTED

"""kill -9 of the whole program in the middle of archiving and compacting: each position is archived once."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.archive import Archive, event
from tests.support.processes import environment
from tests.support.scale import pick
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[3]
KILLS, BETWEEN = pick(1, 10), pick(100, 200)


def run_until(archive: Archive, position: int, directory: Path) -> None:
    """The job, killed with all its processes when it has archived so far."""
    job = {
        "servers": archive.broker.url,
        "stream": archive.stream,
        "directory": str(archive.directory),
        "checkpoint": str(archive.settings.checkpoint),
        "spark": {"spark.local.dir": str(directory), "spark.sql.warehouse.dir": str(directory / "warehouse")},
    }
    with (directory / "log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.pipeline.archive.archive_job", json.dumps(job)],
            cwd=directory,
            env=environment(PYTHONPATH=os.pathsep.join([str(ROOT / "src"), str(ROOT)])),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        wait_until(lambda: archive.until() >= position or process.poll() is not None, seconds=200)
        assert process.poll() is None, (directory / "log").read_text()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.chaos
@pytest.mark.first
def test_a_killed_archive_continues_and_has_each_position_once(archive: Archive, tmp_path: Path) -> None:
    count = BETWEEN * (KILLS + 1)
    archive.publish(*(event(str(number)) for number in range(count)))
    for number in range(1, KILLS + 1):
        run_until(archive, number * BETWEEN * 3 // 4, tmp_path)
        assert archive.positions() == list(range(1, count + 1))
    archive.catch_up()
    assert archive.positions() == archive.lying() == list(range(1, count + 1))

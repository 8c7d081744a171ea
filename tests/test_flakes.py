"""`make flakes` reports each test that fails, how often and with which seed; a run that breaks is no success."""

import json
import signal
import subprocess
import sys
from pathlib import Path

from scripts import flakes
from tests.support.killing import alive
from tests.support.processes import descendants
from tests.support.waiting import PATIENCE_SECONDS, wait_until

SOMETIMES = """
import pytest

seen = []

class TestOrder:
    @pytest.mark.parametrize("number", range(8))
    def test_is_the_first(self, number):
        seen.append(number)
        assert number != 0 or len(seen) == 1

def test_passes():
    seen.append(None)
"""


def command(tmp_path: Path, *arguments: str | Path) -> list[str]:
    """The arguments of `make flakes`, and at the end the file of tests."""
    *options, path = map(str, arguments)
    ours = ["--json", str(tmp_path / "report.json"), "--workers", "0", *options]
    theirs = ["-p", "tests.conftest", "-p", "no:cacheprovider", path]
    return [sys.executable, "-m", "scripts.flakes", *ours, "--", *theirs]


def run(tmp_path: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(tmp_path, *arguments), cwd=flakes.ROOT, capture_output=True, text=True, check=False)


def test_what_failed_is_reported_with_its_seeds(tmp_path: Path) -> None:
    path = tmp_path / "test_sometimes.py"
    path.write_text(SOMETIMES)
    done = run(tmp_path, "--load", "1", "--runs", "2", "--seed", "1", path)
    assert (done.returncode, done.stderr) == (1, ""), done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert [each["seed"] for each in report["runs"]] == [1, 2]
    ((name, seeds),) = report["failures"].items()
    assert name.endswith("test_sometimes.py::TestOrder::test_is_the_first[0]")
    assert f"{name}\n    {len(seeds)} of 2 runs, seeds {seeds}" in done.stdout


def test_ctrl_c_ends_the_run_and_the_load_and_reports_what_was_found(tmp_path: Path) -> None:
    path, pid = tmp_path / "test_long.py", tmp_path / "pid"
    path.write_text(f"""
import os, pathlib, time

def test_is_long():
    pathlib.Path({str(tmp_path / "new")!r}).write_text(str(os.getpid()))
    pathlib.Path({str(tmp_path / "new")!r}).rename({str(pid)!r})
    time.sleep(600)
""")
    with subprocess.Popen(command(tmp_path, "--load", "1", path), cwd=flakes.ROOT, stdout=subprocess.PIPE) as running:
        wait_until(pid.exists)
        below = [int(pid.read_text()), *descendants(running.pid, "")]
        running.send_signal(signal.SIGINT)
        out, _ = running.communicate(timeout=PATIENCE_SECONDS)
    assert running.returncode == 130
    assert b"interrupted" in out
    wait_until(lambda: not any(alive(each) for each in below))


def test_a_run_that_breaks_is_no_success(tmp_path: Path) -> None:
    path = tmp_path / "test_broken.py"
    path.write_text("import no_such_module")
    done = run(tmp_path, "--load", "0", "--runs", "1", path)
    assert done.returncode == 1
    assert "pytest ended with code 2" in done.stdout


def test_only_runs_in_which_each_test_passed_are_a_success() -> None:
    report = flakes.Report(0, ())
    assert not report.passed()
    report.runs.append(flakes.Run(7, 0, 1.0, "1 passed", (), "7.log"))
    assert report.passed()
    assert report.lines() == ["1 run, no failure"]
    report.runs.append(flakes.Run(8, 2, 1.0, "no summary", (), "8.log"))
    assert not report.passed()
    assert report.lines() == ["seed 8: pytest ended with code 2, see 8.log"]

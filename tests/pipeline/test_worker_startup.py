"""Spark's Python workers print no broken pipe of normal life, and every other error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from purveyor.pipeline import worker_startup

PRINTS = """
import traceback
for error in (BrokenPipeError("a closed connection"), ValueError("a defect")):
    try:
        raise error
    except Exception:
        traceback.print_exc()
"""


def printed(*path: Path, daemon: bool = True) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    words = ["pyspark.daemon"] if daemon else []
    done = subprocess.run(
        [sys.executable, "-c", PRINTS, *words], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout + done.stderr


def test_only_the_daemon_of_workers_leaves_out_broken_pipes(tmp_path: Path) -> None:
    startup = Path(worker_startup.__file__).parent
    worker = printed(startup)
    assert "a defect" in worker
    assert "a closed connection" not in worker
    assert "a closed connection" in printed(startup, daemon=False)
    assert "a closed connection" in printed()


def test_the_startup_module_of_the_user_runs_as_well(tmp_path: Path) -> None:
    startup = Path(worker_startup.__file__).parent
    (tmp_path / "sitecustomize.py").write_text("print('the one of the user')")
    worker = printed(startup, tmp_path)
    assert worker.count("the one of the user") == 1
    assert "a closed connection" not in worker


SHOWS = """
import gc, os, sys
wanted = ("pyarrow.compute", "purveyor.pipeline.event_sources", "purveyor.pipeline.dispatch.write_task", sys.argv[-1])
print([each in sys.modules for each in wanted], len(os.listdir("/proc/self/task")), gc.get_freeze_count() > 0)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
@pytest.mark.parametrize(
    ("module", "tasks"),
    [("pyspark.worker", True), ("pyspark.sql.worker.plan_data_source_read", False)],
)
def test_a_daemon_imports_what_its_workers_need_and_starts_no_thread(module: str, *, tasks: bool) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(worker_startup.__file__).parent)}
    command = [sys.executable, "-c", SHOWS, "pyspark.daemon", module]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{[True, True, tasks, True]} 1 True", done.stderr

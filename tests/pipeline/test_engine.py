"""The engine survives a failing task, and leaves the files of other engines alone."""

import subprocess
import sys
from pathlib import Path

from purveyor.model.file_lock import FileLock

_PROGRAM = """
import sys
from pathlib import Path
from purveyor.pipeline.engine import start_engine
from purveyor.pipeline.job_failures import data_fault, is_engine_working

engine = start_engine("local[1]", Path(sys.argv[1]))
text = "concat(repeat('a/', 200000), 'user', id)"
try:
    engine.spark.range(1).selectExpr(f"{text} rlike '^([a-z]+/)*user$'").collect()
except Exception as error:
    print(data_fault(error).partition("java.lang.")[2])
print(is_engine_working(engine.spark))
engine.stop()
"""


def test_a_stack_that_overflows_in_a_task_fails_the_job_and_not_the_engine(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=600, check=False
    )
    assert ran.stdout.splitlines() == ["StackOverflowError", "True"], ran.stderr


_SCRATCH_PROGRAM = """
import sys
from pathlib import Path
from purveyor.pipeline.engine import start_engine

engine = start_engine("local[1]", Path(sys.argv[1]))
print(engine.scratch.relative_to(sys.argv[1]))
engine.stop()
print(engine.scratch.exists())
"""


def test_an_engine_removes_only_its_own_files_for_shuffles(tmp_path: Path) -> None:
    """Another one may run on the same data: as a standby, or on another machine, where its process id means nothing."""
    left, other = tmp_path / "spark" / "pipeline-2" / "left", tmp_path / "spark" / "pipeline" / "blockmgr"
    for each in (left, other):
        each.mkdir(parents=True)
    (tmp_path / "logs").mkdir()
    living = FileLock(tmp_path / "logs" / "pipeline.lock")
    assert living.try_lock()
    ran = subprocess.run(
        [sys.executable, "-c", _SCRATCH_PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.stdout.splitlines() == ["spark/pipeline-2", "False"], ran.stderr
    assert other.exists()
    assert not left.exists()
    living.release()

"""The engine survives a failing task."""

import subprocess
import sys
from pathlib import Path

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

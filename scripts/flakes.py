"""Run the tests several times, in random order, while a load keeps all cores busy; report the failures.

A test that passes alone on an idle machine and fails here depends on time, on the order of the tests, or on the state
that another test left. Each run has its own seed for the order: `pytest --shuffle SEED` repeats it.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
REPORT = ROOT / "artifacts" / "flakes" / "report.json"
GRACE_SECONDS = 60
EXAMPLES = """examples:
  python -m scripts.flakes                          three runs of the whole suite, one busy process per core
  python -m scripts.flakes --runs 10 tests/queues   ten runs of one package
  python -m scripts.flakes --load 0 --runs 1 --seed 7 -- -n 0 -x tests/stages
                                                    the order of seed 7 again, without load, until the first failure
"""
_PASSED, _FAILED = 0, 1  # exit codes of pytest; any other means that the run itself failed


@dataclass(frozen=True)
class Run:
    """One run of the suite."""

    seed: int
    code: int
    seconds: float
    summary: str
    failed: tuple[str, ...]
    log: str

    @property
    def broken(self) -> bool:
        """Return whether pytest ended without a result: interrupted, crashed, or no tests found."""
        return self.code not in (_PASSED, _FAILED)


@dataclass
class Report:
    """The results of all runs so far."""

    load: int
    arguments: tuple[str, ...]
    runs: list[Run] = field(default_factory=list)

    @property
    def failures(self) -> dict[str, list[int]]:
        """Return the seeds with which each test failed; the test that failed most often first."""
        found: dict[str, list[int]] = {}
        for run in self.runs:
            for name in run.failed:
                found.setdefault(name, []).append(run.seed)
        return dict(sorted(found.items(), key=lambda each: (-len(each[1]), each[0])))

    def passed(self) -> bool:
        """Return whether each test passed in each run."""
        return bool(self.runs) and all(run.code == _PASSED for run in self.runs)

    def write(self, path: Path) -> None:
        """Store the report as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        stored = {**asdict(self), "passed": self.passed(), "failures": self.failures}
        path.write_text(json.dumps(stored, indent=2) + "\n")

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        count = len(self.runs)
        found = [f"{name}\n    {len(seeds)} of {count} runs, seeds {seeds}" for name, seeds in self.failures.items()]
        found += [
            f"seed {run.seed}: pytest ended with code {run.code}, see {run.log}" for run in self.runs if run.broken
        ]
        return found or [f"{count} run{'s' * (count != 1)}, no failure"]


def failed_tests(junit: Path) -> tuple[str, ...]:
    """Return the names of the tests that failed in one run, from the XML report of pytest."""
    if not junit.exists():
        return ()
    found = []
    for case in ET.parse(junit).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            file, words = case.get("file", ""), case.get("classname", "").split(".")
            classes = words[len(Path(file).parts) :]
            found.append("::".join([file, *classes, case.get("name", "")]))
    return tuple(dict.fromkeys(found))


def run_once(seed: int, arguments: Sequence[str], directory: Path) -> Run:
    """Run pytest once in the order of a seed; write its output to a log in the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    log, junit = directory / f"{seed}.log", directory / f"{seed}.xml"
    junit.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "--shuffle", str(seed), "--junitxml", str(junit)]
    command += ["-o", "junit_family=xunit1", *arguments]
    began = time.monotonic()
    with (
        log.open("wb") as output,
        # In a new session: Ctrl-C in a terminal reaches pytest once, from here.
        subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True) as pytest,
    ):
        try:
            code = pytest.wait()
        except KeyboardInterrupt:
            pytest.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                pytest.wait(GRACE_SECONDS)
            pytest.kill()
            raise
    last = [
        line for line in log.read_text(errors="replace").splitlines() if re.search(r"\b(passed|failed|error)", line)
    ]
    summary = last[-1].strip("= ") if last else "no summary"
    seconds = round(time.monotonic() - began, 1)
    return Run(seed, code, seconds, summary, failed_tests(junit), str(log))


def _spin(parent: int) -> None:
    while os.getppid() == parent:  # also when the parent was killed
        sum(range(1_000_000))


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep `count` cores busy during a block."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_spin, args=(os.getpid(),), daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.flakes",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="how many runs (default 3)")
    parser.add_argument("--load", type=int, default=os.cpu_count() or 1, metavar="N", help="busy processes (all cores)")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the first run; the next has the next number")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="pytest workers (default 2)")
    parser.add_argument("--json", type=Path, default=REPORT, metavar="FILE", help="the report; logs are beside it")
    parser.add_argument(
        "arguments", nargs="*", metavar="ARGUMENT", help="for pytest; after -- if it begins with a dash"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run, report after each run, and return the exit code: 0 if each test passed in each run."""
    given = parse(argv)
    first = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    arguments = ("-n", str(given.workers), "--dist", "worksteal", *given.arguments)
    report = Report(given.load, arguments)
    try:
        with busy(given.load):
            for number in range(given.runs):
                print(f"run {number + 1} of {given.runs}: --shuffle {first + number}, load {given.load}", flush=True)
                run = run_once(first + number, arguments, given.json.parent.absolute())
                report.runs.append(run)
                report.write(given.json)
                print(f"  {run.summary} ({run.seconds} s); {run.log}", *run.failed, sep="\n  ", flush=True)
    except KeyboardInterrupt:
        print("interrupted")
        print(*report.lines(), sep="\n")
        return 130
    print(*report.lines(), f"report: {given.json}", sep="\n")
    return 0 if report.passed() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Run the tests on each supported Python that this machine has: those on PATH, and those of pyenv.

Each interpreter has its own virtual environment (`.venv-3.13`) with the locked dependencies. Without an option the
script runs the tests that need no Spark on all of them.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROJECT = ROOT / "pyproject.toml"
LOCKED = ROOT / "requirements" / "dev.txt"
EXAMPLES = """examples:
  python -m scripts.pythons                         the part without Spark, on each interpreter
  python -m scripts.pythons --all --only 3.13       the whole suite on one of them
  python -m scripts.pythons --newest                what `make check` runs
  python -m scripts.pythons -- -x tests/stages      arguments for pytest
"""
Version = tuple[int, int]


@dataclass(frozen=True)
class Interpreter:
    """A Python of this machine."""

    version: Version
    path: Path

    @property
    def name(self) -> str:
        """As in `3.13`."""
        return ".".join(map(str, self.version))


def supported(project: Path = PROJECT) -> list[Version]:
    """The versions that the project names, oldest first."""
    classifiers = tomllib.loads(project.read_text())["project"]["classifiers"]
    found = (re.fullmatch(r"Programming Language :: Python :: (\d+)\.(\d+)", each) for each in classifiers)
    return sorted((int(match[1]), int(match[2])) for match in found if match)


def candidates(version: Version, pyenv: Path) -> Iterator[Path]:
    """Where an interpreter of a version may be, the best place first."""
    name = "python{}.{}".format(*version)
    if (on_path := shutil.which(name)) is not None:
        yield Path(on_path)
    releases = (pyenv / "versions").glob("{}.{}.*".format(*version))
    yield from (each / "bin" / "python" for each in sorted(releases, key=_release, reverse=True))


def _release(path: Path) -> tuple[int, ...]:
    return tuple(int(word) for word in re.findall(r"\d+", path.name))


def works(path: Path, version: Version) -> bool:
    """Whether it runs, is of this version, and can make virtual environments (a shim of pyenv may not)."""
    code = "import ensurepip, sys, venv; print(*sys.version_info[:2])"
    try:
        done = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and done.stdout.split() == [str(number) for number in version]


def find(versions: Iterable[Version], pyenv: Path) -> list[Interpreter]:
    """The interpreters of these versions, oldest first."""
    found = []
    for version in sorted(versions):
        if version == sys.version_info[:2]:
            found.append(Interpreter(version, Path(sys.executable)))
            continue
        usable = (path for path in candidates(version, pyenv) if works(path, version))
        if (path := next(usable, None)) is not None:
            found.append(Interpreter(version, path))
    return found


def prepare(interpreter: Interpreter) -> Path:
    """The Python of its virtual environment, made or brought up to date."""
    if interpreter.version == sys.version_info[:2]:
        return interpreter.path
    home = ROOT / f".venv-{interpreter.name}"
    python, ready = home / "bin" / "python", home / ".ready"
    if ready.exists() and ready.stat().st_mtime > max(LOCKED.stat().st_mtime, PROJECT.stat().st_mtime):
        return python
    print(f"== Python {interpreter.name}: virtual environment in {home.name}", flush=True)
    subprocess.run([interpreter.path, "-m", "venv", home], check=True)
    pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--require-hashes", "-r", LOCKED], check=True)
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--editable", ROOT], check=True)
    ready.touch()
    return python


def run(interpreter: Interpreter, arguments: Sequence[str]) -> int:
    """Run pytest on it; its exit code."""
    python = prepare(interpreter)
    print(f"== Python {interpreter.name}: pytest {' '.join(arguments)}", flush=True)
    began = time.monotonic()
    code = subprocess.run([python, "-m", "pytest", *arguments], cwd=ROOT, check=False).returncode
    verdict = "passed" if code == 0 else f"failed with code {code}"
    print(f"== Python {interpreter.name}: {verdict} in {time.monotonic() - began:.0f} s", flush=True)
    return code


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.pythons",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", metavar="VERSION", help="one version, such as 3.13")
    parser.add_argument("--newest", action="store_true", help="only the newest that is not the one running this script")
    parser.add_argument("--all", action="store_true", help="with Spark")
    parser.add_argument("--list", action="store_true", help="say which there are, and run nothing")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="pytest workers (default 2)")
    parser.add_argument(
        "arguments", nargs="*", metavar="ARGUMENT", help="for pytest; behind -- if it starts with a dash"
    )
    return parser.parse_args(argv)


def pytest_arguments(given: argparse.Namespace) -> list[str]:
    """What pytest is asked to run."""
    chosen = [] if given.all else ["-m", "not spark"]
    return ["-n", str(given.workers), "--dist", "worksteal", *chosen, *given.arguments]


def choose(found: list[Interpreter], given: argparse.Namespace) -> list[Interpreter]:
    """Those that were asked for."""
    if given.newest:
        return [each for each in found if each.version != sys.version_info[:2]][-1:]
    return [each for each in found if given.only in (None, each.name)]


def main(argv: Sequence[str]) -> int:
    """Run the tests on each interpreter that was asked for; 1 if one of them failed."""
    given = parse(argv)
    versions = supported()
    found = find(versions, Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv"))
    if given.list:
        print(*(f"{each.name} {each.path}" for each in found), sep="\n")
        return 0
    chosen = choose(found, given)
    if not chosen:
        names = ", ".join("{}.{}".format(*version) for version in versions)
        print(f"== no other Python of {names} on this machine: nothing more to run")
        return 1 if given.only else 0
    return max(int(run(each, pytest_arguments(given)) != 0) for each in chosen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The wheel of this tree, installed by pip into new virtual environments that see only what an extra brings.

pip resolves the requirements without an index: it finds the locked packages of the environment that runs the tests,
which are linked into the new one. So a requirement that is missing in pyproject.toml is missing in the new environment
too, and nothing is downloaded or copied.
"""

import importlib.metadata
import os
import subprocess
import sys
import tomllib
import venv
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_OURS = ("PURVEYOR_", "PYTHON", "PYSPARK_", "SPARK_HOME", "PIP_", "VIRTUAL_ENV", "XDG_", "COVERAGE")


@dataclass(frozen=True)
class Installation:
    """A virtual environment with Purveyor, and a home directory for a person who uses it."""

    path: Path
    home: Path

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a new shell in which the environment is active; nothing of this process is left in it."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
        cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))  # has the archive of Spark's classes
        path = f"{self.path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return kept | {"PATH": path, "HOME": str(self.home), "XDG_CACHE_HOME": cache}

    def run(self, *command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, such as `purveyor` or `python`."""
        program = self.path / "bin" / command[0]
        return subprocess.run(
            [program, *command[1:]],
            cwd=cwd or self.home,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )


def build_wheel(directory: Path) -> Path:
    """Build the wheel of this tree."""
    _pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(directory), str(ROOT))
    (wheel,) = directory.glob("purveyor-*.whl")
    return wheel


def install(wheel: Path, home: Path, *extras: str) -> Installation:
    """Make a virtual environment with the packages of the extras, and let pip install the wheel with them."""
    path = home / "venv"
    venv.create(path, with_pip=False, symlinks=True)
    for name in sorted(closure(*extras)):
        _link(importlib.metadata.distribution(name), path)
    wanted = f"purveyor[{','.join(extras)}] @ {wheel.as_uri()}" if extras else f"purveyor @ {wheel.as_uri()}"
    _pip("--python", str(path / "bin" / "python"), "install", "--no-index", "--no-compile", wanted)
    user = home / "home"
    user.mkdir()
    return Installation(path, user)


def closure(*extras: str) -> set[str]:
    """Return the names of the packages that pip installs for the extras on this machine, recursively."""
    found: set[tuple[str, frozenset[str]]] = set()
    waiting = [("purveyor", frozenset(extras))]
    while waiting:
        name, chosen = waiting.pop()
        if (name, chosen) in found:
            continue
        found.add((name, chosen))
        optional = PROJECT["optional-dependencies"]
        lines = (
            [*PROJECT["dependencies"], *(line for extra in chosen for line in optional[extra])]
            if name == "purveyor"
            else importlib.metadata.requires(name) or []
        )
        for wanted in map(Requirement, lines):
            environments = [{"extra": extra} for extra in ("", *chosen)]
            if wanted.marker is None or any(wanted.marker.evaluate(each) for each in environments):
                waiting.append((canonicalize_name(wanted.name), frozenset(wanted.extras)))
    return {name for name, _ in found} - {"purveyor"}


def _link(package: importlib.metadata.Distribution, environment: Path) -> None:
    """Link the files of an installed package into an environment; of a namespace package only its own part."""
    (site,) = environment.glob("lib/python*/site-packages")
    installed_at = Path(str(package.locate_file("")))
    for file in package.files or []:
        parts = file.parts
        if "__pycache__" in parts:
            continue
        depth = next(
            (n for n in range(1, len(parts)) if (installed_at.joinpath(*parts[:n], "__init__.py")).exists()), len(parts)
        )
        source = installed_at.joinpath(*parts[:depth])
        target = Path(os.path.normpath(site.joinpath(*parts[:depth])))
        if source.exists() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(Path(os.path.normpath(source)))


def _pip(*arguments: str) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--isolated", "--quiet", "--disable-pip-version-check", *arguments],
        env=environment | {"PIP_CONFIG_FILE": os.devnull},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr

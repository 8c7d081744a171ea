"""The steps of the Dockerfile work with its files; the tests start no container."""

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.deployment import DEPLOY, check_command, check_setting

ROOT = DEPLOY.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_PIN = re.compile(
    r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^ ;]+)(?: ; ([^\\\n]+?))? \\\n((?: +--hash=\S+(?: \\)?\n)+)", re.MULTILINE
)
_ENVIRONMENT = {"python_version": "3.12", "python_full_version": "3.12.9", "sys_platform": "linux", "extra": ""}

Pins = dict[tuple[str, str], frozenset[str]]


def instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile with their arguments; continued lines are joined."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    parted = (line.partition(" ") for line in text.replace("\\\n", "").splitlines() if line)
    return [(word, rest) for word, _, rest in parted]


def copied() -> list[str]:
    """Return the files of the repository that the image copies."""
    given = [rest.split() for word, rest in instructions() if word == "COPY"]
    return [source for words in given if not words[0].startswith("--from") for source in words[:-1]]


def pins(name: str) -> Pins:
    """Return the hashes of a lock file by name and version."""
    text = (ROOT / "requirements" / name).read_text()
    found = {(one[1], one[2]): frozenset(re.findall(r"sha256:\w+", one[4])) for one in _PIN.finditer(text)}
    assert len(found) == len(re.findall(r"^\S+==", text, re.MULTILINE))
    return found


def test_what_is_copied_is_there_and_not_kept_out() -> None:
    kept_out = (ROOT / ".dockerignore").read_text().split()
    assert len(copied()) >= 5
    for source in copied():
        assert (ROOT / source).exists(), source
        assert not any(fnmatch.fnmatch(source.partition("/")[0], pattern) for pattern in kept_out), source


def test_the_lock_of_the_image_is_that_of_the_tests_without_their_tools() -> None:
    ours, all_ = pins("image.txt"), pins("dev.txt")
    assert ours.items() <= all_.items()
    assert not {"pytest", "ruff", "playwright"} & {name for name, _ in ours}


def test_the_lock_of_the_image_has_all_that_any_part_needs() -> None:
    """Follow the requirements recursively, as pip does, for the Python of the image."""
    locked = {canonicalize_name(name) for name, _ in pins("image.txt")}
    extras = PROJECT["optional-dependencies"]
    waiting = [Requirement(line) for lines in (PROJECT["dependencies"], *extras.values()) for line in lines]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        wanted = waiting.pop()
        name, chosen = canonicalize_name(wanted.name), frozenset(wanted.extras)
        if name == PROJECT["name"] or (name, chosen) in seen:
            continue
        seen.add((name, chosen))
        assert name in locked, wanted
        for line in requires(name) or ():
            needed = Requirement(line)
            environments = [_ENVIRONMENT | {"extra": extra} for extra in ("", *chosen)]
            if needed.marker is None or any(needed.marker.evaluate(each) for each in environments):
                waiting.append(needed)
    assert len(seen) > 50


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the package from the files that the image copies, and install it."""
    home = tmp_path_factory.mktemp("image")
    source, target = home / "src", home / "target"
    for name in copied():
        place = source / (name if (ROOT / name).is_dir() else Path(name).name)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            source.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, place)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(home), str(source)]
    done = subprocess.run([*pip, *build], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = home.glob("purveyor-*.whl")
    with zipfile.ZipFile(wheel) as files:
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in files.namelist())
    put = ["install", "--no-deps", "--no-index", "--no-compile", "--target", str(target), str(wheel)]
    done = subprocess.run([*pip, *put], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def test_the_wheel_has_every_file_of_the_package(installed: Path) -> None:
    def files(root: Path) -> set[str]:
        found = (path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        return {str(path.relative_to(root)) for path in found}

    assert files(installed / "purveyor") == files(ROOT / "src" / "purveyor")


def test_the_command_of_the_image_starts_what_was_installed(installed: Path, tmp_path: Path) -> None:
    words = {word: json.loads(rest) for word, rest in instructions() if word in ("ENTRYPOINT", "CMD")}
    keeper, _, program = words["ENTRYPOINT"]
    assert program in PROJECT["scripts"]
    assert any(keeper in rest.split() for word, rest in instructions() if word == "RUN" and "apt-get install" in rest)
    check_command(words["CMD"], "Dockerfile")
    asked = [sys.executable, installed / "bin" / program, *words["CMD"], "--help"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PURVEYOR_")}
    environment["PYTHONPATH"] = str(installed)
    done = subprocess.run(asked, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"{program} {words['CMD'][0]}" in done.stdout
    where = subprocess.run(
        [sys.executable, "-c", "import purveyor.app.cli.up; print(purveyor.app.cli.up.__file__)"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert where.stdout.startswith(str(installed))  # and not the tree that the tests run in


def test_the_settings_of_the_image_are_settings() -> None:
    for name in re.findall(r"(PURVEYOR_[A-Z_]+)=", (DEPLOY / "Dockerfile").read_text()):
        check_setting(name, "Dockerfile")

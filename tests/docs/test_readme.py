"""The README in an empty directory, with the installed wheel; in `make chaos` in a clone, with make and pip."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from purveyor.jetstream.server.server_checks import free_port
from tests.docs.markdown import Step, blocks, matches, steps
from tests.docs.runner import Background
from tests.support.wheel import ROOT, Installation, build_wheel, install

README = ROOT / "README.md"
_UP = "make up"
_ACTIVATE = ". .venv/bin/activate"


def readme_steps() -> list[Step]:
    """Return the commands of the README that show their output."""
    found = blocks(README.read_text(encoding="utf-8"))
    return [step for block in found if block.language == "console" for step in steps(block)]


def follow(directory: Path, environment: dict[str, str], up: str) -> list[str]:
    """Type the commands of the README, `up` in a terminal of its own; return their outputs."""
    outputs = []
    running: list[Background] = []
    try:
        for step in readme_steps():
            if step.command == _UP:
                running.append(Background(up, directory, environment))
                output = running[-1].expect(step.expected)
            elif step.command == _ACTIVATE:
                output = ""  # the environment is active
            else:
                done = subprocess.run(
                    ["/bin/sh", "-c", step.command],
                    cwd=directory,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    timeout=120,
                    check=False,
                )
                assert done.returncode == 0, done.stdout
                output = done.stdout
            assert matches(step.expected, output), f"README.md:{step.line}: {step.command}\n{output}"
            outputs.append(output)
    finally:
        for each in running:
            each.stop()
    return outputs


def ports() -> dict[str, str]:
    return {"PURVEYOR_API_PORT": str(free_port("127.0.0.1")), "PYTHONUNBUFFERED": "1"}


def test_the_make_commands_of_the_readme_are_those_of_the_program() -> None:
    named = set(re.findall(r"^make (\w+)", README.read_text(), re.MULTILINE)) | {_UP.split()[1]}
    assert named == {"demo", "test", "up"}
    environment = {
        name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}
    }
    for target, program in {"demo": "purveyor demo", "up": "purveyor up", "test": "pytest"}.items():
        # Without MAKEFLAGS: under another make (`make check`) this one would print the names of directories as well.
        shown = subprocess.run(
            ["make", "--no-print-directory", "-n", target],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        ).stdout
        assert program in shown.splitlines()[-1]
    assert readme_steps()[0].command == _UP
    assert readme_steps()[-1].command.startswith("purveyor next ")


@pytest.mark.spark
@pytest.mark.first
def test_the_readme_from_an_empty_directory_with_the_wheel(tmp_path: Path) -> None:
    """`make up` is `purveyor up` of a new environment, into which pip installed `purveyor[all]` from the wheel."""
    installed: Installation = install(build_wheel(tmp_path), tmp_path, "all")
    directory = tmp_path / "empty"
    directory.mkdir()
    shutil.copytree(ROOT / "examples", directory / "examples")
    printed = follow(directory, installed.environment | ports(), "purveyor up")
    assert '"lastname": "Lovelace"' in printed[-1]
    where = installed.run("python", "-c", "import purveyor; print(purveyor.__file__)", cwd=directory).stdout
    assert where.startswith(str(installed.path))  # and not the tree of the tests


@pytest.mark.spark
@pytest.mark.chaos
@pytest.mark.long
def test_the_readme_in_a_clone_with_make(tmp_path: Path) -> None:
    """Everything as a reader does it: a clone, `make demo`, `make up`. pip needs its index or cache."""
    clone = tmp_path / "purveyor"
    subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
    home = Installation(clone / ".venv", tmp_path)
    environment = home.environment | {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    subprocess.run(["make", "demo"], cwd=clone, env=environment, check=True)
    assert '"lastname": "Lovelace"' in follow(clone, environment | ports(), "make up")[-1]


@pytest.mark.chaos
@pytest.mark.long
def test_pip_installs_the_locked_requirements_and_the_wheel(tmp_path: Path) -> None:
    """As the image does: every package from the lock, with its hash, then the wheel with all extras and no other."""
    subprocess.run(["python3", "-m", "venv", tmp_path / "venv"], check=True)
    pip = [str(tmp_path / "venv" / "bin" / "python"), "-m", "pip", "--quiet", "install"]
    subprocess.run([*pip, "--require-hashes", "-r", str(ROOT / "requirements" / "image.txt")], check=True)
    wheel = build_wheel(tmp_path)
    subprocess.run([*pip, "--no-index", f"purveyor[all] @ {wheel.as_uri()}"], check=True)
    shown = Installation(tmp_path / "venv", tmp_path).run("purveyor", "--json", "doctor")
    assert shown.returncode == 0, shown.stderr

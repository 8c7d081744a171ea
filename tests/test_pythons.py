"""`make pythons` finds the interpreters of the machine, and is content with one."""

import sys
from pathlib import Path

import pytest

from scripts import pythons

HERE = sys.version_info[:2]
OTHER = (3, 99)


def fake(path: Path, version: tuple[int, int]) -> Path:
    """Something that says that it is a Python of a version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {version[0]} {version[1]}\n")
    path.chmod(0o755)
    return path


def test_the_versions_are_those_of_the_project() -> None:
    versions = pythons.supported()
    assert versions == sorted(versions)
    assert HERE in versions


def test_interpreters_are_found_on_path_and_in_pyenv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyenv = tmp_path / "pyenv"
    old, new = (fake(pyenv / "versions" / f"3.99.{patch}" / "bin" / "python", OTHER) for patch in (9, 10))
    assert [each.path for each in pythons.find([OTHER, HERE], pyenv)] == [Path(sys.executable), new]
    new.write_text("#!/bin/sh\nexit 127\n")  # as a shim of pyenv whose version is gone
    assert [each.path for each in pythons.find([OTHER], pyenv)] == [old]
    on_path = fake(tmp_path / "bin" / "python3.99", OTHER)
    monkeypatch.setenv("PATH", str(on_path.parent))
    assert [each.path for each in pythons.find([OTHER], pyenv)] == [on_path]
    fake(on_path, (3, 98))
    old.unlink()
    assert pythons.find([OTHER], pyenv) == []


def test_a_machine_with_one_python_has_nothing_more_to_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert pythons.main(["--newest"]) == 0
    assert capsys.readouterr().out.startswith("== no other Python of 3.11, ")
    assert pythons.main(["--only", "3.99"]) == 1


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], ["-n", "2", "--dist", "worksteal", "-m", "not spark"]),
        (["--all", "--", "-x"], ["-n", "2", "--dist", "worksteal", "-x"]),
    ],
)
def test_what_runs(argv: list[str], expected: list[str]) -> None:
    assert pythons.pytest_arguments(pythons.parse(argv)) == expected


def test_the_newest_is_another_than_this_one() -> None:
    mine, other = pythons.Interpreter(HERE, Path(sys.executable)), pythons.Interpreter(OTHER, Path("python3.99"))
    assert pythons.choose([mine, other], pythons.parse(["--newest"])) == [other]
    assert pythons.choose([mine], pythons.parse(["--newest"])) == []
    assert pythons.choose([mine, other], pythons.parse([])) == [mine, other]

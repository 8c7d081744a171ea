"""The files that say which parts run on a data directory, and where they listen."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

from purveyor.app.running_parts import DIRECTORY, announce, known_parts, running_api, running_parts

ANNOUNCE = (
    "import sys, time; from pathlib import Path; from purveyor.app.running_parts import announce\n"
    "with announce(Path(sys.argv[1]), sys.argv[2], url=sys.argv[3]):\n"
    "    print('ready', flush=True); time.sleep(600)"
)


def start(data: Path, part: str, url: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", ANNOUNCE, str(data), part, url], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_part_is_found_while_it_runs_and_its_file_is_private(tmp_path: Path) -> None:
    assert running_api(tmp_path) is None
    with announce(tmp_path, "api", url="http://127.0.0.1:1"), announce(tmp_path, "push", metrics_url="http://[::1]:2"):
        api = running_api(tmp_path)
        assert api is not None
        assert (api.url, api.pid, api.is_alive) == ("http://127.0.0.1:1", os.getpid(), True)
        assert [each.metrics_url for each in running_parts(tmp_path, "push")] == ["http://[::1]:2"]
        assert {each.part for each in running_parts(tmp_path)} == {"api", "push"}
        directory = tmp_path / DIRECTORY
        modes = {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()}
        assert (stat.S_IMODE(directory.stat().st_mode), modes) == (0o700, {0o600})
    assert list((tmp_path / DIRECTORY).iterdir()) == []


def test_a_process_that_was_killed_is_known_but_does_not_run_until_the_next_one_replaces_it(tmp_path: Path) -> None:
    with start(tmp_path, "api", "http://127.0.0.1:1") as first, start(tmp_path, "api", "http://127.0.0.1:2") as second:
        assert {each.pid for each in running_parts(tmp_path)} == {first.pid, second.pid}
        first.send_signal(signal.SIGSTOP)  # a frozen process still runs
        assert {each.pid for each in running_parts(tmp_path)} == {first.pid, second.pid}
        second.kill()
        second.wait()
        assert {each.pid: each.is_alive for each in known_parts(tmp_path)} == {first.pid: True, second.pid: False}
        api = running_api(tmp_path)
        assert api is not None
        assert api.pid == first.pid
        first.kill()
    assert running_api(tmp_path) is None
    with announce(tmp_path, "api", url="http://127.0.0.1:3"):
        assert [each.url for each in known_parts(tmp_path)] == ["http://127.0.0.1:3"]


def test_rubbish_in_the_directory_and_files_of_a_newer_version_are_skipped(tmp_path: Path) -> None:
    directory = tmp_path / DIRECTORY
    directory.mkdir()
    (directory / "api-1-a.json").write_text("half")
    (directory / "api-2-b.json").write_text('{"version": 2}')
    (directory / "api-3-c.json").write_text('{"version": 1, "part": "api", "pid": "x"}')
    (directory / "api-4-d.json").mkdir()
    assert known_parts(tmp_path) == []


def test_a_part_that_cannot_write_its_file_runs_without_it(tmp_path: Path) -> None:
    (tmp_path / DIRECTORY).touch()
    with announce(tmp_path, "api", url="http://127.0.0.1:1"):
        assert running_api(tmp_path) is None

"""Programs that tests need are found or installed; else a listing says which tests are left out."""

import subprocess
from pathlib import Path

import pytest

from scripts import apt, slapd


def test_a_named_slapd_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PURVEYOR_TEST_SLAPD", "/opt/slapd")
    assert slapd.find_slapd() == "/opt/slapd"


def test_the_tests_without_slapd_are_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(slapd, "is_ready", lambda: False)
    monkeypatch.setattr(apt, "may_install", lambda: False)
    slapd.main()
    printed = capsys.readouterr().out
    assert "sources/ldap/test_follow_slapd.py::test_each_kind_of_change_arrives_as_it_happens" in printed


def test_two_installations_share_one_update_and_start_no_service(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(apt, "may_install", lambda: True)
    monkeypatch.setattr(apt, "_UPDATED", tmp_path / "updated")
    monkeypatch.setattr(subprocess, "run", run)
    assert apt.install_packages("browser", ["chromium"])
    assert apt.install_packages("slapd", slapd.PACKAGES, start_services=False)
    assert [command[1] for command in ran] == ["update", "install", "install"]
    assert not any("DPkg::Path" in word for word in ran[1])
    assert any(word.startswith("DPkg::Path=") for word in ran[2])
    assert ran[2][-2:] == ["slapd", "ldap-utils"]

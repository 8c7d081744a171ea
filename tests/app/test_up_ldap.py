"""`purveyor up` with the settings of a directory."""

import signal
from pathlib import Path

import httpx
import pytest

from tests.support.command_line import invoke
from tests.support.slapd import READER_DN, READER_PASSWORD, SUFFIX, Slapd, require_slapd
from tests.support.up_program import Up
from tests.support.waiting import wait_until

require_slapd_once = pytest.fixture(scope="module", autouse=True)(require_slapd)


def test_a_directory_in_the_settings_is_followed_and_its_metrics_are_on_the_page_of_the_api(tmp_path: Path) -> None:
    environment = {
        "PURVEYOR_LDAP_BASE": SUFFIX,
        "PURVEYOR_LDAP_BIND_DN": READER_DN,
        "PURVEYOR_LDAP_PASSWORD": READER_PASSWORD,
        "PURVEYOR_LDAP_SOURCE": "people",
    }
    data = tmp_path / "data"
    with Slapd(tmp_path / "slapd") as slapd:
        slapd.add_base()
        up = Up(data, "--master", "local[2]", environment=environment | {"PURVEYOR_LDAP_URI": slapd.uri})
        try:
            up.wait_for("following", "LDAP")
            up.wait_for("up", "everything")
            assert "LDAP" in up.parts_with("ready")
            shown = wait_until(
                lambda: next(
                    (each for each in invoke("--data-dir", str(data), "source", "list", "--json").ok().json), None
                )
            )
            assert (shown["source"], shown["entries"]) == ("people", 3)
            page = httpx.get(f"{up.wait_for('ready', 'API')['url']}/metrics", timeout=60).text
            assert 'purveyor_source_entries{process="ldap",source="people"} 3' in page
            assert f'base="{SUFFIX}",directory="{slapd.uri}",mode="syncrepl",process="ldap",source="people"' in page
            assert "purveyor_source_last_change_timestamp_seconds" in page
            assert "LDAP" not in up.parts_with("problem")
            assert up.stop(signal.SIGTERM) == 0
        finally:
            up.close()
    assert READER_PASSWORD not in str(up.events)


def test_settings_that_contradict_each_other_stop_up_before_any_part_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PURVEYOR_LDAP_URI", "ldap://localhost")
    invoke("up").refused("ldap_uri without ldap_base")

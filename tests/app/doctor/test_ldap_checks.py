from collections.abc import Iterator

import pytest

from purveyor.app.doctor.ldap_checks import check_directories
from purveyor.app.doctor.machine_checks import Finding, Weight
from purveyor.app.settings import load
from tests.support.command_line import invoke
from tests.support.slapd import (
    LIMITED_DN,
    LIMITED_PASSWORD,
    READER_DN,
    READER_PASSWORD,
    SUFFIX,
    Slapd,
    SlapdOptions,
    require_slapd,
)

require_slapd_once = pytest.fixture(scope="module", autouse=True)(require_slapd)


@pytest.fixture(scope="module")
def slapd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slapd]:
    with Slapd(tmp_path_factory.mktemp("slapd"), SlapdOptions(size_limit=2)) as server:
        server.add_base()
        yield server


async def check(slapd: Slapd, monkeypatch: pytest.MonkeyPatch, **settings: str) -> list[Finding]:
    given = {"uri": slapd.uri, "base": SUFFIX, "bind_dn": READER_DN, "password": READER_PASSWORD} | settings
    for key, value in given.items():
        monkeypatch.setenv(f"PURVEYOR_LDAP_{key.upper()}", value)
    return [finding async for finding in check_directories(load({}))]


def texts(findings: list[Finding], weight: Weight) -> str:
    return "; ".join(f"{each.text} ({each.fix})" for each in findings if each.weight is weight)


async def test_a_directory_that_can_be_followed_has_nothing_wrong(
    slapd: Slapd, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = await check(slapd, monkeypatch)
    assert texts(found, Weight.WRONG) + texts(found, Weight.WARNING) == ""
    assert "syncprov sends 3 entries" in texts(found, Weight.OK)
    assert "a limit of 500, slapd's default, would not show yet" in texts(found, Weight.OK)
    assert "ahead of the clock of this machine" in texts(found, Weight.OK)
    assert "followed by syncrepl" in texts(found, Weight.NOTE)


def test_doctor_checks_the_directories_of_the_settings(slapd: Slapd, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"uri": slapd.uri, "base": SUFFIX, "bind_dn": READER_DN, "password": READER_PASSWORD, "source": "people"}
    for key, value in given.items():
        monkeypatch.setenv(f"PURVEYOR_LDAP_{key.upper()}", value)
    findings = invoke("doctor", "--json").json["findings"]
    assert {"ok", "note"} == {each["weight"] for each in findings if each["about"] == "ldap people"}


async def test_an_account_with_a_size_limit_is_wrong(slapd: Slapd, monkeypatch: pytest.MonkeyPatch) -> None:
    found = await check(slapd, monkeypatch, bind_dn=LIMITED_DN, password=LIMITED_PASSWORD)
    assert "`limits`" in texts(found, Weight.WRONG)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"password": "other"}, "check the bind DN and the password"),
        ({"base": f"ou=none,{SUFFIX}"}, "check the base"),
        ({"mode": "accesslog"}, "the accesslog cn=accesslog cannot be followed"),
        ({"uri": "ldap://127.0.0.1:1"}, "can this machine reach it"),
    ],
)
async def test_what_is_wrong_has_a_fix(
    slapd: Slapd, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], words: str
) -> None:
    assert words in texts(await check(slapd, monkeypatch, **settings), Weight.WRONG)


async def test_a_server_without_syncprov_is_wrong(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Slapd(tmp_path_factory.mktemp("plain"), SlapdOptions(syncprov=False)) as slapd:
        slapd.add_base()
        assert "syncprov" in texts(await check(slapd, monkeypatch), Weight.WRONG)


async def test_settings_that_contradict_each_other_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PURVEYOR_LDAP_URI", "ldap://localhost")
    found = [finding async for finding in check_directories(load({}))]
    assert "ldap_uri without ldap_base" in texts(found, Weight.WRONG)

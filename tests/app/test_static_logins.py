from pathlib import Path
from typing import Any

import pytest

from purveyor.app.http.authentication import Role
from purveyor.app.settings import load
from purveyor.app.static_logins import FILE_NAME, load_logins
from purveyor.model.errors import InvalidConfig, SetupError

ALL = {f"{role}_password": f"{role}-secret" for role in ("admin", "events", "prefill")}


def settings(tmp_path: Path, **more: Any) -> Any:
    return load({"data_dir": tmp_path / "data", **more})


def test_passwords_that_are_set_nowhere_are_generated_once_for_their_owner_alone(tmp_path: Path) -> None:
    first = load_logins(settings(tmp_path))
    file = tmp_path / "data" / FILE_NAME
    assert first.file == file
    assert file.stat().st_mode & 0o777 == 0o600
    assert load_logins(settings(tmp_path)) == first
    passwords = [login.password for login in first.logins]
    assert len(set(passwords)) == 3
    assert all(len(password) > 24 for password in passwords)
    assert not any(password in repr(first) for password in passwords)


def test_only_those_that_are_missing_are_generated(tmp_path: Path) -> None:
    found = load_logins(settings(tmp_path, admin_password="chosen"))
    assert found.logins[0].password == "chosen"
    text = (tmp_path / "data" / FILE_NAME).read_text()
    assert "admin_password" not in text
    later = load_logins(settings(tmp_path))
    assert [login.password for login in later.logins[1:]] == [login.password for login in found.logins[1:]]
    assert later.logins[0].password not in ("chosen", "")


def test_without_a_missing_one_there_is_no_file(tmp_path: Path) -> None:
    assert load_logins(settings(tmp_path, **ALL)).file is None
    assert not (tmp_path / "data").exists()


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    load_logins(settings(tmp_path))
    (tmp_path / "data" / FILE_NAME).chmod(0o644)
    with pytest.raises(SetupError, match="other users can read"):
        load_logins(settings(tmp_path))


def test_where_others_can_reach_it_every_password_must_be_set(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "api.example.org"):
        with pytest.raises(InvalidConfig, match="PURVEYOR_EVENTS_PASSWORD, PURVEYOR_PREFILL_PASSWORD"):
            load_logins(settings(tmp_path, api_host=host, admin_password="chosen"))
        assert len(load_logins(settings(tmp_path, api_host=host, **ALL)).logins) == 3
    assert not (tmp_path / "data").exists()


def test_more_publishers_have_their_realms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("purveyor.toml").write_text(
        '[[publishers]]\nusername = "shop"\npassword = "s"\nrealms = ["shop"]\n'
        '[[publishers]]\nusername = "hr"\npassword_env = "HR_PASSWORD"\nrealms = ["udm", "hr"]\n'
    )
    with pytest.raises(InvalidConfig, match="set HR_PASSWORD"):
        load_logins(settings(tmp_path, **ALL))
    monkeypatch.setenv("HR_PASSWORD", "h")
    found = {login.username: login for login in load_logins(settings(tmp_path, **ALL)).logins}
    assert (found["shop"].role, found["shop"].realms) == (Role.EVENTS, frozenset({"shop"}))
    assert found["hr"].password == "h"
    assert found["events"].realms is None


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ('[[publishers]]\nusername = "a"\nrealms = ["x"]', "no password, or two"),
        ('[[publishers]]\nusername = "a"\npassword = "p"\npassword_env = "E"\nrealms = ["x"]', "no password, or two"),
        ('[[publishers]]\nusername = "admin"\npassword = "p"\nrealms = ["x"]', "two logins have the name 'admin'"),
        ('[[publishers]]\nusername = "a"\npassword = "p"\nrealms = []', r"publishers\.0\.realms"),
        ('[[publishers]]\nusername = "a:b"\npassword = "p"\nrealms = ["x"]', r"publishers\.0\.username"),
        ('[[publishers]]\nusername = "a"\npasword = "hidden"\nrealms = ["x"]', r"publishers\.0\.pasword"),
        ('events_username = "admin"', "two logins"),
        ('admin_pasword = "hidden"', "did you mean 'admin_password'"),
        ("admin_password = 7", "admin_password"),
    ],
)
def test_a_mistake_is_reported_without_a_secret(tmp_path: Path, file: str, words: str) -> None:
    Path("purveyor.toml").write_text(file)
    with pytest.raises(InvalidConfig, match=words) as error:
        load_logins(settings(tmp_path))
    assert "hidden" not in str(error.value)

from pathlib import Path

import pytest

from purveyor.app.ldap_settings import find_directories, has_directories
from purveyor.app.settings import load
from purveyor.model.errors import InvalidConfig
from purveyor.sources.ldap.directory import Mode

ONE = {"PURVEYOR_LDAP_URI": "ldap://ldap.example:1389", "PURVEYOR_LDAP_BASE": "dc=example,dc=org"}
TWO = """
[[ldap]]
uri = "ldap://one"
base = "dc=one"
source = "one"

[[ldap]]
uri = "ldaps://two"
base = "dc=two"
source = "two"
bind_dn = "cn=reader,dc=two"
password_env = "TWO_PASSWORD"
mode = "syncrepl"
"""


def set_environment(monkeypatch: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_without_ldap_settings_there_is_no_directory() -> None:
    assert not has_directories(load({}))
    assert find_directories(load({})) == ()


def test_the_environment_names_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(
        monkeypatch, ONE | {"PURVEYOR_LDAP_BIND_DN": "cn=reader", "PURVEYOR_LDAP_PASSWORD": "hidden", "TWO": ""}
    )
    settings = load({})
    (directory,) = find_directories(settings)
    assert (directory.source, directory.mode, directory.filter) == ("ldap", Mode.AUTO, "(objectClass=*)")
    assert (directory.subject, directory.address.host_and_port()) == ("ldif.ldap", ("ldap", "ldap.example", 1389))
    assert directory.password == "hidden"
    assert "hidden" not in repr(directory) + repr(settings)


def test_the_password_is_read_from_the_first_line_of_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("of-a-file\nsecond line\n")
    set_environment(monkeypatch, ONE | {"PURVEYOR_LDAP_BIND_DN": "cn=reader"})
    (directory,) = find_directories(load({"ldap_password_file": file}))
    assert directory.password == "of-a-file"


def test_tables_of_the_file_name_several_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("purveyor.toml").write_text(TWO)
    set_environment(monkeypatch, ONE | {"TWO_PASSWORD": "hidden"})
    found = find_directories(load({}))
    assert [each.source for each in found] == ["ldap", "one", "two"]
    assert (found[2].password, found[2].mode, found[2].address.host_and_port()[2]) == ("hidden", Mode.SYNCREPL, 636)


@pytest.mark.parametrize(
    ("environment", "file", "words"),
    [
        ({"PURVEYOR_LDAP_URI": "ldap://x"}, "", ["ldap_uri without ldap_base", "PURVEYOR_LDAP_BASE"]),
        ({"PURVEYOR_LDAP_BASE": "dc=x"}, "", ["ldap_base without ldap_uri", "PURVEYOR_LDAP_URI"]),
        ({"PURVEYOR_LDAP_URI": "http://x"}, "", ["ldap_uri", "PURVEYOR_LDAP_URI", "ldaps://host:port"]),
        ({"PURVEYOR_LDAP_URI": "ldap://a:secret@x"}, "", ["ldap_uri", "leave the user out"]),
        (ONE | {"PURVEYOR_LDAP_BASE": "example"}, "", ["ldap_base", "'example'", "dc=example,dc=org"]),
        (ONE | {"PURVEYOR_LDAP_FILTER": "uid=a"}, "", ["ldap_filter", "in parentheses"]),
        (ONE | {"PURVEYOR_LDAP_FILTER": "(&(uid=a)(b))"}, "", ["ldap_filter", "near"]),
        (ONE | {"PURVEYOR_LDAP_SOURCE": "a.b"}, "", ["ldap_source", "letters, digits"]),
        (ONE | {"PURVEYOR_LDAP_MODE": "fast"}, "", ["ldap_mode", "'fast'", "accesslog"]),
        (ONE | {"PURVEYOR_LDAP_PASSWORD": "secret"}, "", ["a password without a bind DN"]),
        (ONE | {"PURVEYOR_LDAP_BIND_DN": "cn=a"}, "", ["a bind DN without a password"]),
        (
            ONE | {"PURVEYOR_LDAP_URI": "ldaps://x", "PURVEYOR_LDAP_STARTTLS": "true"},
            "",
            ["StartTLS on ldaps://", "without it"],
        ),
        (
            ONE
            | {
                "PURVEYOR_LDAP_BIND_DN": "cn=a",
                "PURVEYOR_LDAP_PASSWORD": "secret",
                "PURVEYOR_LDAP_PASSWORD_FILE": "/none",
            },
            "",
            ["password and password_file are set", "set one of them"],
        ),
        (
            ONE | {"PURVEYOR_LDAP_BIND_DN": "cn=a", "PURVEYOR_LDAP_PASSWORD_FILE": "/none"},
            "",
            ["no password can be read from /none"],
        ),
        ({}, '[[ldap]]\nuri = "ldap://x"\n', ["no 'base'", "[[ldap]] table 1", "purveyor.toml"]),
        ({}, '[[ldap]]\nuri = "ldap://x"\nbas = "secret"\nbase = "dc=x"\n', ["unknown key 'bas'", "'base'"]),
        ({}, '[[ldap]]\nuri = "x"\nbase = "dc=x"\n', ["invalid uri in [[ldap]] table 1", "ldap://host:port"]),
        ({}, TWO, ["TWO_PASSWORD is not set", "'two'"]),
        (
            ONE,
            '[[ldap]]\nuri = "ldap://x"\nbase = "dc=x"\n',
            ["2 directories have the source name 'ldap'", "`source`"],
        ),
    ],
)
def test_an_error_says_what_is_wrong_and_shows_no_secret(
    environment: dict[str, str], file: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_environment(monkeypatch, environment)
    Path("purveyor.toml").write_text(file)
    with pytest.raises(InvalidConfig) as error:
        find_directories(load({}))
    text = f"{error.value.message} {error.value.fix}"
    assert [word for word in words if word not in text] == []
    assert "secret" not in text

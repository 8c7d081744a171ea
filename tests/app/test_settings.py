from pathlib import Path

import pytest

from purveyor.app.settings import load, refuse_secret_database, refuse_secret_flag
from purveyor.jetstream.server import default_data_dir
from purveyor.model.errors import InvalidConfig, InvalidInput


def error_text(error: pytest.ExceptionInfo[InvalidConfig]) -> str:
    return str(error.value)


def test_a_flag_overrides_the_environment_which_overrides_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Path("purveyor.toml").write_text('replicas = 3\nsync = "2m"\ndata_dir = "from-file"\n')
    monkeypatch.setenv("PURVEYOR_REPLICAS", "5")
    monkeypatch.setenv("PURVEYOR_DATA_DIR", "from-environment")
    settings = load({"data_dir": Path("from-flag"), "sync": None})
    assert (settings.data_dir, settings.replicas, settings.sync) == (Path("from-flag"), 5, "2m")


def test_the_mapping_is_a_name_or_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load({}).mapping == "udm"
    monkeypatch.setenv("PURVEYOR_MAPPING", "plain")
    assert load({}).mapping == "plain"
    monkeypatch.setenv("HOME", "/home/ada")
    assert load({"mapping": "~/school.toml"}).mapping == "/home/ada/school.toml"


def test_the_default_data_directory_is_in_the_data_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load({}).data_dir == tmp_path / "xdg" / "purveyor"
    monkeypatch.setenv("XDG_DATA_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_data_dir() == tmp_path / ".local" / "share" / "purveyor"


def test_a_settings_file_can_be_named(tmp_path: Path) -> None:
    named = tmp_path / "other.toml"
    named.write_text("replicas = 3\n")
    assert load({}, config=named).replicas == 3


def test_a_named_settings_file_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"nowhere\.toml does not exist"):
        load({}, config=tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("flags", "environment", "file", "words"),
    [
        ({"sync": "soon"}, {}, "", ["sync", "'soon'", "flag --sync"]),
        ({}, {"PURVEYOR_SYNC": "soon"}, "", ["sync", "'soon'", "environment variable PURVEYOR_SYNC"]),
        ({}, {}, 'sync = "soon"', ["sync", "'soon'", "purveyor.toml"]),
        ({}, {"PURVEYOR_REPLICAS": "nine"}, "", ["replicas", "'nine'", "PURVEYOR_REPLICAS"]),
        ({}, {}, "replicas = 9", ["replicas", "9", "purveyor.toml", "less than or equal to 5"]),
        ({}, {}, "replica = 3", ["unknown key 'replica'", "3", "purveyor.toml", "did you mean 'replicas'"]),
        ({}, {}, "xyzzy = 1", ["unknown key 'xyzzy'", "purveyor.toml", "the keys are data_dir"]),
        ({}, {}, 'transform_mapping = "my.toml"', ["'transform_mapping'", "purveyor.toml", "new name", "'mapping'"]),
        ({}, {"PURVEYOR_TRANSFORM_MAPPING": "my.toml"}, "", ["PURVEYOR_TRANSFORM_MAPPING", "use PURVEYOR_MAPPING"]),
        ({}, {}, "replicas = = 1", ["purveyor.toml is not valid TOML", "line 1"]),
        ({}, {"PURVEYOR_NATS_URL": "http://x"}, "", ["nats_url", "PURVEYOR_NATS_URL", "nats://host:4222"]),
        ({"database_url": "oracle://x"}, {}, "", ["database_url", "flag --database", "postgresql://user@host/name"]),
        ({}, {}, 'database_url = "shop.db"', ["database_url", "purveyor.toml", "sqlite:///file"]),
    ],
)
def test_an_error_names_key_value_and_origin(
    flags: dict[str, object],
    environment: dict[str, str],
    file: str,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if file:
        Path("purveyor.toml").write_text(file)
    with pytest.raises(InvalidConfig) as error:
        load(flags)
    for word in words:
        assert word in error_text(error)


@pytest.mark.parametrize("name", ["PURVEYOR_NATS_URL", "PURVEYOR_DATABASE_URL"])
def test_an_invalid_address_is_reported_without_its_password(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "http://ada:s3cret@host")
    with pytest.raises(InvalidConfig) as error:
        load({})
    assert "s3cret" not in error_text(error)


def test_an_address_with_a_password_does_not_show_in_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PURVEYOR_NATS_URL", "nats://ada:s3cret@host")
    assert "s3cret" not in repr(load({}))
    assert load({}).nats_url == "nats://ada:s3cret@host"


def test_the_database_of_stages_does_not_show_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PURVEYOR_DATABASE_URL", "postgresql+psycopg://ada:s3cret@host/shop")
    assert "s3cret" not in repr(load({}))
    assert load({}).database_url == "postgresql+psycopg://ada:s3cret@host/shop"
    refuse_secret_database("postgresql://ada@host/shop")
    refuse_secret_database("sqlite:///shop.db")
    with pytest.raises(InvalidInput, match="PURVEYOR_DATABASE_URL") as error:
        refuse_secret_database("postgresql://ada:s3cret@host/shop")
    assert "s3cret" not in str(error.value)


def test_an_empty_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PURVEYOR_NATS_URL", "")
    assert load({}).nats_url is None


@pytest.mark.parametrize("url", ["nats://ada:s3cret@host", "nats://token@host", "ada:s3cret@host"])
def test_a_secret_in_a_flag_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput) as error:
        refuse_secret_flag(url)
    assert "PURVEYOR_NATS_URL" in str(error.value)
    assert "s3cret" not in str(error.value)
    refuse_secret_flag("nats://host:4222")

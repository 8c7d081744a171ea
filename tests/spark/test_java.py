"""The user's options for the JVM take precedence."""

from pathlib import Path

import pytest

from purveyor.spark.java import FastStart, gc_option

CHOICES = ("SPARK_SUBMIT_OPTS", "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS", "SPARK_CONF_DIR")


@pytest.fixture(autouse=True)
def no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CHOICES:
        monkeypatch.delenv(name, raising=False)


def test_the_parallel_collector_is_chosen(tmp_path: Path) -> None:
    assert gc_option() == "-XX:+UseParallelGC"
    assert FastStart(tmp_path, tmp_path / "none.jsa").java_options() == "-XX:+UseParallelGC"
    archive = tmp_path / "classes.jsa"
    archive.touch()
    assert FastStart(tmp_path, archive).java_options().startswith(f"-XX:+UseParallelGC -XX:SharedArchiveFile={archive}")


@pytest.mark.parametrize("name", CHOICES[:-1])
def test_the_users_option_wins(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "-Dx=y -XX:+UseZGC")
    assert not gc_option()
    monkeypatch.setenv(name, "-XX:+UseStringDeduplication")
    assert gc_option()


def test_an_option_in_the_defaults_of_spark_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    assert gc_option()
    (tmp_path / "spark-defaults.conf").write_text("spark.driver.defaultJavaOptions  -XX:+UseG1GC\n")
    assert not gc_option()

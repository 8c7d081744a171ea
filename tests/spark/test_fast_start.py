"""What is chosen for the JVM gives way to what the user has chosen."""

from pathlib import Path

import pytest

from purveyor.spark.fast_start import QuickStart, collector

CHOICES = ("SPARK_SUBMIT_OPTS", "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "_JAVA_OPTIONS", "SPARK_CONF_DIR")


@pytest.fixture(autouse=True)
def no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CHOICES:
        monkeypatch.delenv(name, raising=False)


def test_the_parallel_collector_is_chosen(tmp_path: Path) -> None:
    assert collector() == "-XX:+UseParallelGC"
    assert QuickStart(tmp_path, tmp_path / "none.jsa").java_options() == "-XX:+UseParallelGC"
    archive = tmp_path / "classes.jsa"
    archive.touch()
    assert (
        QuickStart(tmp_path, archive).java_options().startswith(f"-XX:+UseParallelGC -XX:SharedArchiveFile={archive}")
    )


@pytest.mark.parametrize("name", CHOICES[:-1])
def test_a_choice_of_the_user_stands(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "-Dx=y -XX:+UseZGC")
    assert not collector()
    monkeypatch.setenv(name, "-XX:+UseStringDeduplication")
    assert collector()


def test_a_choice_in_the_defaults_of_spark_stands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    assert collector()
    (tmp_path / "spark-defaults.conf").write_text("spark.driver.defaultJavaOptions  -XX:+UseG1GC\n")
    assert not collector()

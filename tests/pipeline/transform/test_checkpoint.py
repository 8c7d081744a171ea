"""The directories survive a power cut, and the transform never continues with directories of another time."""

import shutil
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from purveyor.model.errors import DataLost
from purveyor.spark import checkpoint_files
from tests.pipeline.transform.flow import Flow
from tests.pipeline.transform.memory import body, modify, person
from tests.support.nats_servers import OwnServer

ADA = "uid=ada,dc=e"


@pytest.fixture
def flow(own_server: OwnServer, spark: SparkSession, tmp_path: Path) -> Flow:
    return Flow(own_server().address, spark, tmp_path)


def titles(flow: Flow) -> list[tuple[str | None, str]]:
    """The old and the new title of each event."""
    bodies = [each["body"] for each in flow.events()]
    return [
        (each["old"]["properties"]["title"] if each["old"] else None, each["new"]["properties"]["title"])
        for each in bodies
    ]


def change(flow: Flow, *titles: str) -> None:
    flow.send(*(modify(ADA, ("replace", "title", [title])) for title in titles))


def test_after_a_power_cut_the_batches_that_were_not_on_the_disk_run_again(
    flow: Flow, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flow.send(body(ADA, "content", attributes=person("ada", title=["0"])))
    flow.run()
    change(flow, "1", "2")
    flow.run(max_offsets_per_trigger=1, hold_seconds=3600)
    files = [path for path in flow.checkpoint.rglob("*") if path.is_file()]
    lost = [path for path in files if path.name in {"1", "2", "2.changelog", "3.changelog"}]
    assert len(lost) >= 6
    for path in lost:
        path.write_bytes(b"")
    monkeypatch.setattr(checkpoint_files, "boot_id", lambda: "another boot")
    change(flow, "3")
    flow.run()
    assert titles(flow) == [(None, "0"), ("0", "1"), ("1", "2"), ("2", "3")]
    assert "batches [1, 2]" in caplog.text
    assert not flow.letters()


def test_an_older_checkpoint_continues_while_the_stream_holds_the_messages(flow: Flow, tmp_path: Path) -> None:
    flow.send(body(ADA, "content", attributes=person("ada", title=["0"])))
    flow.run()
    shutil.copytree(flow.checkpoint, tmp_path / "older")
    change(flow, "1")
    flow.run(hold_seconds=3600)
    shutil.rmtree(flow.checkpoint)
    shutil.copytree(tmp_path / "older", flow.checkpoint)
    change(flow, "2")
    flow.run()
    assert titles(flow) == [(None, "0"), ("0", "1"), ("1", "2")]

    shutil.rmtree(flow.checkpoint)
    shutil.move(tmp_path / "older", flow.checkpoint)
    with pytest.raises(DataLost, match="messages 2 to 3 of stream:ldif are gone") as raised:
        flow.start()
    assert f"move {flow.checkpoint} away" in str(raised.value.fix)


def test_a_lost_checkpoint_begins_with_empty_directories_and_a_warning(
    flow: Flow, caplog: pytest.LogCaptureFixture
) -> None:
    flow.send(body(ADA, "content", attributes=person("ada", title=["0"])))
    flow.run()
    shutil.rmtree(flow.checkpoint)
    change(flow, "1")
    flow.run()
    assert "Import each directory again" in caplog.text
    assert [letter["Purveyor-Reason"] for letter in flow.letters()] == ["modify: there is no such entry"]
    flow.send(body(ADA, "content", attributes=person("ada", title=["1"])))
    flow.run()
    assert titles(flow)[-1] == (None, "1")

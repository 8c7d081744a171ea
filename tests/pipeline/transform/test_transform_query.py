"""The transform end to end, on a real server and a real Spark: in order, exactly once, with the true old objects."""

import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from purveyor.pipeline.transform import transform_query
from tests.pipeline.transform.flow import Flow, summary
from tests.pipeline.transform.memory import body, modify, person
from tests.support.forgetting import forget_ids_now
from tests.support.nats_servers import OwnServer
from tests.support.spark_session import failure
from tests.support.waiting import wait_until

ADA = "uid=ada,ou=people,dc=e"
OU = {"objectClass": ["organizationalUnit"], "ou": ["people"]}


@pytest.fixture
def flow(own_server: OwnServer, spark: SparkSession, tmp_path: Path) -> Flow:
    return Flow(own_server().address, spark, tmp_path)


def test_records_become_events_with_old_and_new_over_restarts(flow: Flow) -> None:
    flow.send(
        body("ou=people,dc=e", "content", attributes=OU),
        body(ADA, "content", attributes=person("ada", mail=["a@e"], userPassword=["s3cret"])),
    )
    flow.run()
    flow.send(modify(ADA, ("add", "mail", ["b@e"])), "no record", body("uid=eve,dc=e", "delete"))
    flow.send(body(ADA, "content", attributes=person("ada", mail=["x@e"])), source="other")
    flow.send(body("ou=people,dc=e", "modrdn", new_rdn="ou=staff", delete_old_rdn=True))
    flow.send(body("ou=staff,dc=e", "delete"))
    flow.run(max_offsets_per_trigger=2)
    events = flow.events()
    new_ada = "uid=ada,ou=staff,dc=e"
    assert summary(events) == [
        ("container/ou", None, "ou=people,dc=e"),
        ("users/user", None, ADA),
        ("users/user", ADA, ADA),
        ("users/user", None, ADA),
        ("container/ou", "ou=people,dc=e", "ou=staff,dc=e"),
        ("users/user", ADA, new_ada),
        ("users/user", new_ada, None),
        ("container/ou", "ou=staff,dc=e", None),
    ]
    first, changed = events[1], events[2]
    assert first["realm"] == "udm"
    assert first["publisher_name"] == "udm-listener"
    assert first["key"] == first["body"]["new"]["uuid"] == changed["key"] == events[5]["key"] != events[3]["key"]
    assert first["ts"].endswith("+00:00")
    assert changed["body"]["old"] == first["body"]["new"]
    properties = {**first["body"]["new"]["properties"], "e-mail": ["a@e", "b@e"]}
    assert changed["body"]["new"] == {**first["body"]["new"], "properties": properties}
    assert "s3cret" not in str(events)
    letters = flow.letters()
    assert [letter["data"] for letter in letters] == [b"no record", body("uid=eve,dc=e", "delete")]
    assert [letter["Purveyor-Position"] for letter in letters] == ["4", "5"]
    assert letters[1]["Purveyor-Reason"] == "delete: there is no such entry"
    assert flow.broker.state("stream:ldif")["messages"] == 0


def test_a_batch_that_was_half_written_is_finished_without_duplicate_loss_or_false_old(flow: Flow) -> None:
    """The server refuses in mid-batch; by the next try every reader has passed what was written, and its window too."""
    count = 1500
    dns = [f"uid=u{number},dc=e" for number in range(count)]
    flow.send(*(body(dn, "content", attributes=person("x", title=["old"])) for dn in dns))
    flow.run()
    assert len(flow.events()) == count
    flow.consume("dispatcher", "archive")
    flow.send(*(modify(dn, ("replace", "title", ["new"])) for dn in dns))
    flow.broker.update("stream:incoming", max_msgs=1200, discard="new")
    assert "stream:incoming refused position" in failure(flow.start())
    written = flow.rows()[1:]  # the first is the receipt of the batch before
    assert 0 < len(written) < count
    flow.broker.update("stream:incoming", max_msgs=-1)
    flow.consume("dispatcher", "archive")
    forget_ids_now(flow.broker.address, "stream:incoming", "incoming.probe")
    flow.run()
    kept = {row["sequence"] for row in written}
    written += [row for row in flow.rows() if row["sequence"] not in kept]
    events = [json.loads(row["data"]) for row in written]
    old = [each["body"]["old"] for each in events]
    assert [(each["dn"], each["properties"]["title"]) for each in old] == [(dn, "old") for dn in dns]
    assert {each["body"]["new"]["properties"]["title"] for each in events} == {"new"}


def test_a_crash_between_writing_and_committing_writes_nothing_twice(
    flow: Flow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow.broker.durable("stream:ldif", "reads-them-later")
    people = [body(f"uid=u{number},dc=e", "content", attributes=person("x")) for number in range(5)]
    flow.send("no record", *people)

    def crash(address: object) -> None:
        raise RuntimeError("a crash, as it were")

    with monkeypatch.context() as patch:
        patch.setattr(transform_query, "advance_receipts", crash)
        assert "a crash, as it were" in failure(flow.start())
    assert len(flow.rows()) == 5
    flow.consume("dispatcher", "archive")
    probes = forget_ids_now(flow.broker.address, "stream:incoming", "incoming.probe")
    flow.run()
    assert flow.broker.state("stream:incoming")["last_seq"] == 5 + probes
    assert len(flow.letters()) == 1
    # Only the newest event is kept for the receipts, and nothing of anybody else.
    flow.broker.add("incoming", ["an event of somebody else"])
    flow.consume("dispatcher", "archive")
    wait_until(lambda: flow.broker.sequences("stream:incoming") == [5])
    # A checkpoint that is behind what was written is refused rather than taken as done.
    words = failure(flow.start(checkpoint=str(tmp_path / "another"), max_offsets_per_trigger=2))
    assert "incoming.ldif was written up to message 6 of stream:ldif, and this checkpoint is at 2" in words

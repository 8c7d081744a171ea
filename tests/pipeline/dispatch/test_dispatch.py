"""Every event reaches the queue of each matching subscription, in order, once."""

import pytest

from purveyor.model.subscription import Filter
from purveyor.pipeline.dispatch import batch_job, dispatch_query
from purveyor.pipeline.dispatch.write_task import WriteTask
from purveyor.spark.pyspark_internals import ArrowTask
from tests.support.dispatch_harness import DispatchHarness, event


def test_events_right_after_the_answer_to_the_adding_are_delivered(harness: DispatchHarness) -> None:
    """The dispatcher runs without knowing the subscription, and its beginning is not in the registry either."""
    harness.add("early")
    harness.events(1, 3)
    harness.start()
    harness.wait()
    for number in range(6):
        harness.add(f"new-{number}", noted=number % 2 == 0)
        harness.events(100 * number, 100 * number + 20)
        if number > 1:  # the next one comes right after the dispatcher has looked
            harness.wait()
    harness.wait()
    assert harness.numbers("early")[:3] == [1, 2, 3]
    for number in range(6):
        expected = [each for later in range(number, 6) for each in range(100 * later, 100 * later + 21)]
        assert harness.numbers(f"new-{number}") == expected
        assert harness.found(f"new-{number}").record.begin is not None


def test_a_message_carries_position_id_and_its_own_headers_and_body(harness: DispatchHarness) -> None:
    harness.add("ox")
    body = event(1, new={"text": "ä\x00 \r\n"})
    harness.broker.add("incoming", [("incoming", body, {"Trace": ["a", "b"], "Nats-Expected-Stream": "stream:incoming",
                                                      "Purveyor-Position": "77"}, "id-1")])  # fmt: skip
    harness.dispatch()
    [first] = harness.broker.rows("stream:ox")
    assert first["subject"] == "ox.main"
    assert first["data"] == body
    headers = dict(first["headers"])
    assert {name: headers[name] for name in headers if not name.startswith("Nats-")} == {
        "Trace": ["a", "b"], "Purveyor-Position": ["2"], "Purveyor-Id": ["id-1"],
    }  # fmt: skip
    assert headers["Nats-Msg-Id"] == ["2"]


def test_regular_expressions_and_exact_topics(harness: DispatchHarness) -> None:
    """Known topics are looked up, unknown ones tried, with the same outcome."""
    harness.add("all", ".*")
    harness.add("groups", "groups/.*")
    harness.add("both", "groups/group", "groups/.*", "users/user")
    harness.start()
    for start in (0, 10):
        harness.publish(
            [event(start, "groups/group"), event(start + 1), event(start + 2, "groups/"), event(start + 3, "x")]
        )
        harness.wait()
    assert harness.numbers("all") == [0, 1, 2, 3, 10, 11, 12, 13]
    assert harness.numbers("groups") == [0, 2, 10, 12]
    assert harness.numbers("both") == [0, 1, 2, 10, 11, 12]


def test_filters(harness: DispatchHarness) -> None:
    harness.add("sales", wanted=Filter(fields={"department": ("sales", "shop")}))
    harness.add("german", ".*", wanted=Filter(attributes={"lang": ("de",)}))
    harness.publish([
        event(1, new={"department": "sales"}), event(2, new={"department": ["x", "shop"]}, attributes={"lang": "de"}),
        event(3, attributes={"lang": "en"}), event(4, "other", attributes={"lang": "de"}),
    ])  # fmt: skip
    harness.dispatch()
    assert harness.numbers("sales") == [1, 2]
    assert harness.numbers("german") == [2, 4]


def test_a_poison_message_is_parked_once_and_blocks_no_subscription(harness: DispatchHarness) -> None:
    """Not delivered again and again, not in the way of what is behind it; a second group finds the same messages."""
    harness.make_group("backup")
    harness.add("ox")
    harness.publish([b"\xff not JSON", b"[]", event(1), b'{"realm": "udm"}', event(2)], prefix="id")
    harness.dispatch()
    assert harness.numbers("ox") == [1, 2]
    first = harness.letters()
    assert [row["subject"] for row in first] == ["dead-letters.incoming"] * 3
    headers = [dict(row["headers"]) for row in first]
    assert [each["Purveyor-Position"] for each in headers] == [["2"], ["3"], ["5"]]
    assert headers[0]["Purveyor-Original-Nats-Msg-Id"] == ["id-0"]
    assert "not JSON" in headers[0]["Purveyor-Reason"][0]
    assert first[0]["data"] == b"\xff not JSON"
    harness.dispatch("backup")
    assert harness.letters() == first
    assert harness.numbers("ox") == [1, 2]


def test_order_and_once_with_two_writers(harness: DispatchHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch_query, "SMALL_BATCH_POSITIONS", 50)
    for number in range(5):
        harness.add(f"q{number}", "users/user" if number % 2 else ".*")
    harness.publish([event(number, "users/user" if number % 3 else "other") for number in range(3000)])
    harness.dispatch(writers=2, max_offsets=1100)
    for number in range(5):
        wanted = [each for each in range(3000) if each % 3 or not number % 2]
        assert harness.numbers(f"q{number}") == wanted


def test_the_writing_task_is_sent_to_spark_once_while_the_same_take_part(
    harness: DispatchHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[WriteTask] = []

    def send(task: WriteTask, schema: str) -> ArrowTask:
        sent.append(task)
        return ArrowTask(task, schema)

    monkeypatch.setattr(batch_job, "ArrowTask", send)
    harness.add("ox")
    harness.events(1, 300)
    harness.start(max_offsets=50)
    harness.wait()
    assert harness.numbers("ox") == list(range(1, 301))
    assert len(sent) == 2  # the batch in which it begins leaves out what was before
    harness.add("open")
    harness.events(301, 350)
    harness.wait()
    assert [len(task.targets) for task in sent[2:]] == [2] * len(sent[2:])
    assert (harness.numbers("ox")[-50:], harness.numbers("open")) == (list(range(301, 351)),) * 2


def test_two_hundred_subscriptions(harness: DispatchHarness) -> None:
    """More than fit as a literal: their routes are joined."""
    for number in range(200):
        harness.add(f"s{number}", f"topic/{number}", "everybody")
    harness.publish([event(1, "topic/7"), event(2, "everybody"), event(3, "topic/199"), event(4, "nobody")])
    harness.dispatch()
    assert harness.numbers("s7") == [1, 2]
    assert harness.numbers("s199") == [2, 3]
    assert all(harness.numbers(f"s{number}") == [2] for number in (0, 100, 198))


def test_two_groups_write_every_event_once(harness: DispatchHarness) -> None:
    harness.make_group("backup")
    harness.add("ox")
    harness.events(1, 300)
    first = harness.start("dispatcher", max_offsets=70)
    second = harness.start("backup", max_offsets=110)
    harness.events(301, 500)
    for group in ("dispatcher", "backup"):
        harness.wait(group)
    assert first.exception() is None
    assert second.exception() is None
    assert harness.numbers("ox") == list(range(1, 501))

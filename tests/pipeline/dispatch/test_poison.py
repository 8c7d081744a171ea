"""An expression, an event or a batch that cannot be processed affects no other subscription."""

import asyncio

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from purveyor.jetstream.bulk import outgoing, publish_many
from purveyor.model.subscription import Filter
from purveyor.pipeline.audit import audit
from purveyor.pipeline.dispatch import batch_job
from purveyor.pipeline.job_failures import data_fault, is_data_at_fault, is_message_at_fault, park_once
from purveyor.queues.dead_letters.letter import DeadLetter
from purveyor.queues.dead_letters.store import DeadLetterStore, Resolution
from tests.support.dispatch_harness import DispatchHarness, event
from tests.support.poison import KILLED, Poison
from tests.support.waiting import wait_until

LONG = "a/" * 2048 + "user"
"""Java tries a repeated group on it by recursion, until its stack is used up."""


def test_a_long_topic_and_a_repeated_group_end_nothing(harness: DispatchHarness) -> None:
    harness.add("groups", "([a-z]+/)*user")
    harness.add("ox")
    harness.publish([event(1), event(2, LONG), event(3)])
    harness.dispatch()
    assert harness.numbers("groups") == [1, 2, 3]
    assert harness.numbers("ox") == [1, 3]


def test_an_expression_that_never_ends_suspends_its_subscription_at_the_event(harness: DispatchHarness) -> None:
    """Here and wherever else expressions are tried: others, and what was before, are delivered."""
    harness.add("slow", "(a+)+b|users/user|x")
    harness.add("both", "(a+)+b", "a{64}", "users/user")
    harness.add("all", ".*")
    harness.add("ox")
    harness.start()
    harness.events(1, 2)
    harness.wait()
    harness.publish([event(3), event(4, "a" * 64), event(5), event(6, "x")])
    harness.wait()
    position = harness.last() - 2
    suspended = harness.found("slow").suspended
    assert suspended is not None
    assert suspended.position == position
    assert suspended.reason.startswith("the expression '(a+)+b|users/user|x' takes more than 1 s on the topic 'aaaa")
    assert harness.numbers("slow") == [1, 2, 3]
    assert harness.numbers("both") == [1, 2, 3, 4, 5], "another of its topics matches: nothing is in doubt"
    assert harness.numbers("all") == [1, 2, 3, 4, 5, 6]
    assert harness.numbers("ox") == [1, 2, 3, 5]
    harness.events(7, 8)
    harness.wait()
    assert harness.numbers("ox") == [1, 2, 3, 5, 7, 8]
    assert harness.numbers("slow") == [1, 2, 3], "nothing passes a suspended subscription"
    assert not harness.letters()


def test_control_events_before_its_beginning_do_not_suspend_a_subscription(harness: DispatchHarness) -> None:
    harness.add("ox")
    harness.publish([event(1), event(2, "a" * 64)])
    harness.add("slow", "(a+)+b|users/user")
    harness.events(3, 4)
    harness.dispatch()
    assert harness.found("slow").suspended is None
    assert harness.numbers("slow") == [3, 4]


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Poison:
    return Poison(monkeypatch)


def parked(harness: DispatchHarness) -> list[int]:
    """The positions of the dead letters of `incoming`, in their order."""
    found = []
    for row in harness.letters():
        headers = {name: tuple(values) for name, values in row["headers"]}
        letter = DeadLetter.from_message(headers, row["data"])
        assert letter.origin == "incoming"
        assert letter.position is not None
        found.append(letter.position)
    return found


def forget_ids(harness: DispatchHarness) -> None:
    """Make the server forget the message ids of dead letters soon: what is parked twice is there twice."""
    harness.broker.update("stream:dead-letters", duplicate_window=100_000_000)


def forgotten(harness: DispatchHarness) -> bool:
    """Whether the server takes the message id of a letter for a new one."""
    row = harness.letters()[-1]
    again = ("dead-letters.elsewhere", row["data"], None, dict(row["headers"])["Nats-Msg-Id"][0])
    report = publish_many(harness.address, outgoing([again]))
    if report.stored:
        harness.broker.purge("stream:dead-letters", filter="dead-letters.elsewhere")
    return bool(report.stored)


def run_again(harness: DispatchHarness) -> None:
    """Run the last batch again, as after a crash before its commit. The durable is past it, so the commit tells."""
    commits = harness.settings().checkpoint / "commits"
    last = max((path for path in commits.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    for path in commits.glob(f"*{last.name}*"):
        path.unlink()
    query = harness.start()

    def done() -> bool:
        assert query.exception() is None, query.exception()
        return last.exists()

    wait_until(done)
    query.stop()


def test_an_event_that_fails_for_every_subscription_is_parked_once_and_all_others_are_dispatched(
    harness: DispatchHarness, poison: Poison
) -> None:
    harness.add("ox")
    harness.add("all", ".*")
    forget_ids(harness)
    harness.events(1, 4)
    harness.publish([b"no event"])
    harness.events(5, 6)
    poison.positions = {5: None}
    harness.dispatch(max_offsets=3)
    assert harness.numbers("ox") == harness.numbers("all") == [1, 2, 4, 5, 6]
    assert harness.found("ox").suspended is None
    assert parked(harness) == [5, 7]
    reason = dict(harness.letters()[0]["headers"])["Purveyor-Reason"][0]
    assert reason.startswith("dispatch fails on this event: [USER_RAISED_EXCEPTION] poison")
    report = audit(harness.spark, harness.settings().archive, 1, harness.last())
    assert report.clean
    assert [(each.expected, each.queued, each.dead_lettered) for each in report.accounts] == [(6, 5, 1)] * 2


def test_a_batch_that_was_divided_and_is_run_again_parks_nothing_twice(
    harness: DispatchHarness, poison: Poison
) -> None:
    harness.add("ox")
    forget_ids(harness)
    harness.events(1, 2)
    harness.publish([b"no event"])
    poison.positions = {2: None}
    harness.dispatch()
    wait_until(lambda: forgotten(harness))
    attempts = poison.attempts
    run_again(harness)
    assert poison.attempts > attempts
    assert parked(harness) == [2, 4]
    assert harness.numbers("ox") == [2]


def test_what_an_attempt_wrote_before_it_failed_is_not_written_again(harness: DispatchHarness, poison: Poison) -> None:
    """Also letters: one of a later position, parked by the attempt that failed, is there once."""
    harness.add("ox")
    forget_ids(harness)
    harness.events(1, 3)
    harness.publish([b"no event"])
    poison.positions = {3: None}
    poison.after_writing = True
    harness.dispatch()
    assert harness.numbers("ox") == [1, 2, 3]
    assert sorted(parked(harness)) == [3, 5]


def test_a_letter_of_a_later_position_hides_no_earlier_message_that_is_no_event(harness: DispatchHarness) -> None:
    """A catch-up job can be ahead of the dispatcher."""
    harness.add("ox")
    harness.publish([b"no event", event(1)])
    message = {"position": 3, "subject": "incoming", "headers": (), "data": event(1)}
    assert park_once(harness.address, message, "a catch-up fails on it")
    harness.dispatch()
    assert parked(harness) == [3, 2]


def test_a_position_is_parked_once_also_when_its_letter_was_discarded_since(harness: DispatchHarness) -> None:
    forget_ids(harness)
    message = {"position": 3, "subject": "incoming", "headers": [("Nats-Msg-Id", ["id-3"])], "data": event(3)}
    assert park_once(harness.address, message, "it fails")
    wait_until(lambda: forgotten(harness))
    assert not park_once(harness.address, message, "it fails again")
    assert parked(harness) == [3]

    async def discard() -> None:
        async with harness.connected() as queues:
            box = DeadLetterStore(queues)
            async for letter in box.scan():
                await box.settle(letter, Resolution.DISCARDED)
                await box.remove(letter.id)

    asyncio.run(discard())
    assert not park_once(harness.address, message, "it fails again")
    assert park_once(harness.address, {**message, "position": 33}, "another one fails")


def test_a_subscription_that_alone_fails_on_an_event_is_suspended_there_and_no_other(
    harness: DispatchHarness, poison: Poison
) -> None:
    for name in ("ox", "zoo"):
        harness.add(name)
    harness.add("picky", wanted=Filter(fields={"id": tuple(range(1, 30))}))
    harness.events(1, 6)
    poison.positions = {8: frozenset({"picky with its filter"})}
    harness.start(max_offsets=3)
    harness.wait()
    suspended = harness.found("picky").suspended
    assert suspended is not None
    assert suspended.position == 8
    assert suspended.reason.startswith("dispatch fails on the event at position 8 for this subscription: ")
    assert harness.numbers("picky") == list(range(1, 5))
    assert harness.numbers("ox") == harness.numbers("zoo") == list(range(1, 7))
    assert not harness.letters()
    harness.events(7, 7)
    harness.wait()
    assert harness.numbers("picky") == list(range(1, 5))
    poison.positions = {}
    harness.resume("picky")
    harness.events(8, 9)
    harness.wait()
    assert harness.numbers("picky") == list(range(1, 10))


def test_an_event_before_its_beginning_does_not_suspend_a_subscription(
    harness: DispatchHarness, poison: Poison
) -> None:
    harness.add("ox")
    harness.events(1, 2)
    harness.add("picky", wanted=Filter(fields={"id": (1, 2, 3)}))
    harness.events(3, 3)
    poison.positions = {2: frozenset({"picky with its filter"})}
    harness.dispatch()
    assert harness.found("picky").suspended is None
    assert harness.numbers("picky") == [3]
    assert harness.numbers("ox") == [1, 2, 3]


def test_subscriptions_that_fail_only_together_are_written_one_after_the_other(
    harness: DispatchHarness, poison: Poison
) -> None:
    harness.add("ox")
    harness.add("zoo")
    harness.events(1, 2)
    poison.positions = {3: frozenset({"ox", "zoo"})}
    harness.dispatch()
    assert harness.numbers("ox") == harness.numbers("zoo") == [1, 2]
    assert not harness.letters()
    assert harness.found("ox").suspended is None
    assert harness.found("zoo").suspended is None


def test_an_event_that_fails_once_is_delivered(harness: DispatchHarness, poison: Poison) -> None:
    harness.add("ox")
    harness.events(1, 1)
    poison.positions = {2: None}
    poison.left = 2
    harness.dispatch()
    assert poison.left == 0
    assert harness.numbers("ox") == [1]
    assert not harness.letters()


def test_a_batch_that_succeeds_is_attempted_once(harness: DispatchHarness, poison: Poison) -> None:
    harness.add("ox")
    harness.events(1, 3)
    harness.dispatch()
    assert poison.attempts == 1


def test_a_worker_that_is_killed_blames_no_event(harness: DispatchHarness, poison: Poison) -> None:
    harness.add("ox")
    harness.events(1, 2)
    poison.positions = {3: None}
    poison.job = KILLED
    query = harness.start()
    ended = wait_until(query.exception)
    assert "Python worker exited unexpectedly" in str(ended)
    assert poison.attempts == 1, "the batch is not divided"
    assert not harness.letters()
    assert harness.found("ox").suspended is None
    poison.positions = {}
    harness.dispatch()
    assert harness.numbers("ox") == [1, 2]


def test_a_batch_that_never_ends_is_cancelled_and_divided(
    harness: DispatchHarness, poison: Poison, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_job, "time_limit_seconds", lambda span, _: 1.0 if span.first <= 3 <= span.last else 600.0)
    harness.add("ox")
    harness.events(1, 3)
    poison.positions = {3: None}
    poison.job = "java_method('java.lang.Thread', 'sleep', 3600000L)"
    harness.start(max_offsets=2)
    harness.wait()
    assert harness.numbers("ox") == [1, 3]
    [row] = harness.letters()
    assert dict(row["headers"])["Purveyor-Reason"] == ["dispatch fails on this event: it took more than 1 s"]


def test_a_gap_with_such_an_event_is_filled_without_it(harness: DispatchHarness, poison: Poison) -> None:
    harness.add("full")
    harness.broker.update("stream:full", max_msgs=1, discard="new")
    harness.events(1, 3)
    harness.start()
    harness.wait()
    harness.broker.update("stream:full", max_msgs=-1, discard="old")
    harness.resume("full")
    poison.positions = {3: None}
    harness.events(4, 5)
    harness.wait()
    assert harness.numbers("full") == [1, 3, 4, 5]
    assert parked(harness) == [3]


@pytest.mark.parametrize(
    "error",
    [
        "purveyor.model.errors.ServerUnavailable: no server answers",
        "purveyor.model.errors.InvalidConfig: a setting is wrong",
        "OSError: [Errno 28] No space left on device",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        "[SPARK_JOB_CANCELLED] Job 3 cancelled",
        "java.lang.InterruptedException",
        "java.io.IOException: Mkdirs failed to create file:/archive",
        "org.apache.spark.SparkException: Python worker exited unexpectedly (crashed)",
        "ExecutorLostFailure (executor 1 exited caused by one of the running tasks)",
    ],
)
def test_an_outage_blames_no_event(error: str) -> None:
    text = f"Traceback (most recent call last)\n  somewhere\n{error}"
    assert data_fault(PySparkException(text)) is None
    assert data_fault(RuntimeError(text)) is None


def test_a_data_fault_is_reported_in_one_line() -> None:
    trace = "Job aborted\nTraceback (most recent call last)\n  somewhere\n{}"
    assert data_fault(PySparkException(trace.format("KeyError: 'bad'"))) == "KeyError: 'bad'"
    header = "purveyor.model.errors.InvalidHeader: a header is wrong"
    assert data_fault(PySparkException(trace.format(header))) == "a header is wrong"
    assert data_fault(PySparkException("java.lang.StackOverflowError")) == "java.lang.StackOverflowError"


def test_a_plan_that_cannot_be_made_blames_a_subscription_and_no_event(
    harness: DispatchHarness, poison: Poison
) -> None:
    harness.add("ox")
    harness.add("picky", wanted=Filter(fields={"id": (1, 2)}))
    harness.events(1, 2)
    poison.job = "no_such_column"
    poison.positions = {3: frozenset({"picky with its filter"})}
    harness.dispatch()
    assert harness.numbers("ox") == [1, 2]
    suspended = harness.found("picky").suspended
    assert suspended is not None
    assert suspended.position == 3
    poison.positions = {5: None}
    harness.events(3, 3)
    ended = wait_until(harness.start().exception)
    assert "no_such_column" in str(ended)
    assert not harness.letters()


@pytest.mark.parametrize("error", ["MemoryError", "java.lang.OutOfMemoryError: Java heap space"])
def test_lack_of_memory_divides_a_batch_and_blames_no_event(error: str, spark: SparkSession) -> None:
    found = PySparkException(f"Traceback (most recent call last)\n  somewhere\n{error}")
    assert data_fault(found) is not None
    assert not is_data_at_fault(spark, found)
    assert not is_message_at_fault(spark, found)
    assert is_message_at_fault(spark, PySparkException("KeyError: 'bad'"))

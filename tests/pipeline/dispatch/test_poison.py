"""An expression, an event or a batch that cannot be processed affects no other subscription."""

import asyncio

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from purveyor.jetstream.bulk import outgoing, publish_many
from purveyor.model.subscription import Filter
from purveyor.pipeline.audit import audit
from purveyor.pipeline.dispatch import isolation
from purveyor.pipeline.job_failures import data_fault, is_data_at_fault, is_message_at_fault, park_once
from purveyor.queues.dead_letters.letter import DeadLetter
from purveyor.queues.dead_letters.store import DeadLetterStore, Resolution
from tests.support.dispatch_world import World, event
from tests.support.poison import KILLED, Poison
from tests.support.waiting import wait_until

LONG = "a/" * 2048 + "user"
"""Java tries a repeated group on it by recursion, until its stack is used up."""


def test_a_long_topic_and_a_repeated_group_end_nothing(world: World) -> None:
    world.add("groups", "([a-z]+/)*user")
    world.add("ox")
    world.publish([event(1), event(2, LONG), event(3)])
    world.dispatch()
    assert world.numbers("groups") == [1, 2, 3]
    assert world.numbers("ox") == [1, 3]


def test_an_expression_that_never_ends_suspends_its_subscription_at_the_event(world: World) -> None:
    """Here and wherever else expressions are tried: others, and what was before, are delivered."""
    world.add("slow", "(a+)+b|users/user|x")
    world.add("both", "(a+)+b", "a{64}", "users/user")
    world.add("all", ".*")
    world.add("ox")
    world.start()
    world.events(1, 2)
    world.wait()
    world.publish([event(3), event(4, "a" * 64), event(5), event(6, "x")])
    world.wait()
    position = world.last() - 2
    suspended = world.found("slow").suspended
    assert suspended is not None
    assert suspended.position == position
    assert suspended.reason.startswith("the expression '(a+)+b|users/user|x' takes more than 1 s on the topic 'aaaa")
    assert world.numbers("slow") == [1, 2, 3]
    assert world.numbers("both") == [1, 2, 3, 4, 5], "another of its topics matches: nothing is in doubt"
    assert world.numbers("all") == [1, 2, 3, 4, 5, 6]
    assert world.numbers("ox") == [1, 2, 3, 5]
    world.events(7, 8)
    world.wait()
    assert world.numbers("ox") == [1, 2, 3, 5, 7, 8]
    assert world.numbers("slow") == [1, 2, 3], "nothing passes a suspended subscription"
    assert not world.letters()


def test_control_events_before_its_beginning_do_not_suspend_a_subscription(world: World) -> None:
    world.add("ox")
    world.publish([event(1), event(2, "a" * 64)])
    world.add("slow", "(a+)+b|users/user")
    world.events(3, 4)
    world.dispatch()
    assert world.found("slow").suspended is None
    assert world.numbers("slow") == [3, 4]


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Poison:
    return Poison(monkeypatch)


def parked(world: World) -> list[int]:
    """The positions of the dead letters of `incoming`, in their order."""
    found = []
    for row in world.letters():
        headers = {name: tuple(values) for name, values in row["headers"]}
        letter = DeadLetter.from_message(headers, row["data"])
        assert letter.origin == "incoming"
        assert letter.position is not None
        found.append(letter.position)
    return found


def forget_ids(world: World) -> None:
    """Make the server forget the message ids of dead letters soon: what is parked twice is there twice."""
    world.broker.update("stream:dead-letters", duplicate_window=100_000_000)


def forgotten(world: World) -> bool:
    """Whether the server takes the message id of a letter for a new one."""
    row = world.letters()[-1]
    again = ("dead-letters.elsewhere", row["data"], None, dict(row["headers"])["Nats-Msg-Id"][0])
    report = publish_many(world.address, outgoing([again]))
    if report.stored:
        world.broker.purge("stream:dead-letters", filter="dead-letters.elsewhere")
    return bool(report.stored)


def run_again(world: World) -> None:
    """Run the last batch again, as after a crash before its commit. The durable is past it, so the commit tells."""
    commits = world.settings().checkpoint / "commits"
    last = max((path for path in commits.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    for path in commits.glob(f"*{last.name}*"):
        path.unlink()
    query = world.start()

    def done() -> bool:
        assert query.exception() is None, query.exception()
        return last.exists()

    wait_until(done)
    query.stop()


def test_an_event_that_fails_for_every_subscription_is_parked_once_and_all_others_are_dispatched(
    world: World, poison: Poison
) -> None:
    world.add("ox")
    world.add("all", ".*")
    forget_ids(world)
    world.events(1, 4)
    world.publish([b"no event"])
    world.events(5, 6)
    poison.positions = {5: None}
    world.dispatch(max_offsets=3)
    assert world.numbers("ox") == world.numbers("all") == [1, 2, 4, 5, 6]
    assert world.found("ox").suspended is None
    assert parked(world) == [5, 7]
    reason = dict(world.letters()[0]["headers"])["Purveyor-Reason"][0]
    assert reason.startswith("dispatch fails on this event: [USER_RAISED_EXCEPTION] poison")
    report = audit(world.spark, world.settings().archive, 1, world.last())
    assert report.clean
    assert [(each.expected, each.queued, each.dead_lettered) for each in report.accounts] == [(6, 5, 1)] * 2


def test_a_batch_that_was_divided_and_is_run_again_parks_nothing_twice(world: World, poison: Poison) -> None:
    world.add("ox")
    forget_ids(world)
    world.events(1, 2)
    world.publish([b"no event"])
    poison.positions = {2: None}
    world.dispatch()
    wait_until(lambda: forgotten(world))
    attempts = poison.attempts
    run_again(world)
    assert poison.attempts > attempts
    assert parked(world) == [2, 4]
    assert world.numbers("ox") == [2]


def test_what_an_attempt_wrote_before_it_failed_is_not_written_again(world: World, poison: Poison) -> None:
    """Also letters: one of a later position, parked by the attempt that failed, is there once."""
    world.add("ox")
    forget_ids(world)
    world.events(1, 3)
    world.publish([b"no event"])
    poison.positions = {3: None}
    poison.after_writing = True
    world.dispatch()
    assert world.numbers("ox") == [1, 2, 3]
    assert sorted(parked(world)) == [3, 5]


def test_a_letter_of_a_later_position_hides_no_earlier_message_that_is_no_event(world: World) -> None:
    """A catch-up job can be ahead of the dispatcher."""
    world.add("ox")
    world.publish([b"no event", event(1)])
    message = {"position": 3, "subject": "incoming", "headers": (), "data": event(1)}
    assert park_once(world.address, message, "a catch-up fails on it")
    world.dispatch()
    assert parked(world) == [3, 2]


def test_a_position_is_parked_once_also_when_its_letter_was_discarded_since(world: World) -> None:
    forget_ids(world)
    message = {"position": 3, "subject": "incoming", "headers": [("Nats-Msg-Id", ["id-3"])], "data": event(3)}
    assert park_once(world.address, message, "it fails")
    wait_until(lambda: forgotten(world))
    assert not park_once(world.address, message, "it fails again")
    assert parked(world) == [3]

    async def discard() -> None:
        async with world.connected() as queues:
            box = DeadLetterStore(queues)
            async for letter in box.scan():
                await box.settle(letter, Resolution.DISCARDED)
                await box.remove(letter.id)

    asyncio.run(discard())
    assert not park_once(world.address, message, "it fails again")
    assert park_once(world.address, {**message, "position": 33}, "another one fails")


def test_a_subscription_that_alone_fails_on_an_event_is_suspended_there_and_no_other(
    world: World, poison: Poison
) -> None:
    for name in ("ox", "zoo"):
        world.add(name)
    world.add("picky", wanted=Filter(fields={"id": tuple(range(1, 30))}))
    world.events(1, 6)
    poison.positions = {8: frozenset({"picky with its filter"})}
    world.start(max_offsets=3)
    world.wait()
    suspended = world.found("picky").suspended
    assert suspended is not None
    assert suspended.position == 8
    assert suspended.reason.startswith("dispatch fails on the event at position 8 for this subscription: ")
    assert world.numbers("picky") == list(range(1, 5))
    assert world.numbers("ox") == world.numbers("zoo") == list(range(1, 7))
    assert not world.letters()
    world.events(7, 7)
    world.wait()
    assert world.numbers("picky") == list(range(1, 5))
    poison.positions = {}
    world.resume("picky")
    world.events(8, 9)
    world.wait()
    assert world.numbers("picky") == list(range(1, 10))


def test_an_event_before_its_beginning_does_not_suspend_a_subscription(world: World, poison: Poison) -> None:
    world.add("ox")
    world.events(1, 2)
    world.add("picky", wanted=Filter(fields={"id": (1, 2, 3)}))
    world.events(3, 3)
    poison.positions = {2: frozenset({"picky with its filter"})}
    world.dispatch()
    assert world.found("picky").suspended is None
    assert world.numbers("picky") == [3]
    assert world.numbers("ox") == [1, 2, 3]


def test_subscriptions_that_fail_only_together_are_written_one_after_the_other(world: World, poison: Poison) -> None:
    world.add("ox")
    world.add("zoo")
    world.events(1, 2)
    poison.positions = {3: frozenset({"ox", "zoo"})}
    world.dispatch()
    assert world.numbers("ox") == world.numbers("zoo") == [1, 2]
    assert not world.letters()
    assert world.found("ox").suspended is None
    assert world.found("zoo").suspended is None


def test_an_event_that_fails_once_is_delivered(world: World, poison: Poison) -> None:
    world.add("ox")
    world.events(1, 1)
    poison.positions = {2: None}
    poison.left = 2
    world.dispatch()
    assert poison.left == 0
    assert world.numbers("ox") == [1]
    assert not world.letters()


def test_a_batch_that_succeeds_is_attempted_once(world: World, poison: Poison) -> None:
    world.add("ox")
    world.events(1, 3)
    world.dispatch()
    assert poison.attempts == 1


def test_a_worker_that_is_killed_blames_no_event(world: World, poison: Poison) -> None:
    world.add("ox")
    world.events(1, 2)
    poison.positions = {3: None}
    poison.job = KILLED
    query = world.start()
    ended = wait_until(query.exception)
    assert "Python worker exited unexpectedly" in str(ended)
    assert poison.attempts == 1, "the batch is not divided"
    assert not world.letters()
    assert world.found("ox").suspended is None
    poison.positions = {}
    world.dispatch()
    assert world.numbers("ox") == [1, 2]


def test_a_batch_that_never_ends_is_cancelled_and_divided(
    world: World, poison: Poison, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "time_limit_seconds", lambda span, _: 1.0 if span.first <= 3 <= span.last else 600.0)
    world.add("ox")
    world.events(1, 3)
    poison.positions = {3: None}
    poison.job = "java_method('java.lang.Thread', 'sleep', 3600000L)"
    world.start(max_offsets=2)
    world.wait()
    assert world.numbers("ox") == [1, 3]
    [row] = world.letters()
    assert dict(row["headers"])["Purveyor-Reason"] == ["dispatch fails on this event: it took more than 1 s"]


def test_a_gap_with_such_an_event_is_filled_without_it(world: World, poison: Poison) -> None:
    world.add("full")
    world.broker.update("stream:full", max_msgs=1, discard="new")
    world.events(1, 3)
    world.start()
    world.wait()
    world.broker.update("stream:full", max_msgs=-1, discard="old")
    world.resume("full")
    poison.positions = {3: None}
    world.events(4, 5)
    world.wait()
    assert world.numbers("full") == [1, 3, 4, 5]
    assert parked(world) == [3]


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


def test_a_plan_that_cannot_be_made_blames_a_subscription_and_no_event(world: World, poison: Poison) -> None:
    world.add("ox")
    world.add("picky", wanted=Filter(fields={"id": (1, 2)}))
    world.events(1, 2)
    poison.job = "no_such_column"
    poison.positions = {3: frozenset({"picky with its filter"})}
    world.dispatch()
    assert world.numbers("ox") == [1, 2]
    suspended = world.found("picky").suspended
    assert suspended is not None
    assert suspended.position == 3
    poison.positions = {5: None}
    world.events(3, 3)
    ended = wait_until(world.start().exception)
    assert "no_such_column" in str(ended)
    assert not world.letters()


@pytest.mark.parametrize("error", ["MemoryError", "java.lang.OutOfMemoryError: Java heap space"])
def test_lack_of_memory_divides_a_batch_and_blames_no_event(error: str, spark: SparkSession) -> None:
    found = PySparkException(f"Traceback (most recent call last)\n  somewhere\n{error}")
    assert data_fault(found) is not None
    assert not is_data_at_fault(spark, found)
    assert not is_message_at_fault(spark, found)
    assert is_message_at_fault(spark, PySparkException("KeyError: 'bad'"))

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from purveyor.model.control import ReplayJob
from purveyor.model.errors import PublishRefused
from purveyor.model.registration import PrefillStatus
from purveyor.model.subscription import RealmTopic
from purveyor.pipeline.prefill.fill import REPLAY
from purveyor.pipeline.prefill.workshop import Ending
from tests.pipeline.prefill.bench import Bench, ids


async def test_the_events_of_a_range_come_once_more_in_their_order_and_untouched(bench: Bench, unique: str) -> None:
    await bench.publish("a/x", "1", {"id": 1})
    first = await bench.publish("a/y", "2", {"id": 2}, {"id": 2, "was": True})
    await bench.publish("b/z", "3", {"id": 3})
    last = await bench.publish("a/x", "1", None, {"id": 1})
    await bench.publish("a/x", "4", {"id": 4})
    await bench.add(unique, "a/.*", prefill=False)
    job = await bench.subscriptions.replay(unique, first, last)

    assert await bench.run(job) is Ending.DONE

    messages = await bench.stored(unique)
    assert [message.position for message in messages] == [first, last]
    assert [message.body for message in messages] == [
        {"old": {"id": 2, "was": True}, "new": {"id": 2}},
        {"old": {"id": 1}, "new": {}},
    ]
    assert ids(messages) == [f"replay:{job.job}:{first}", f"replay:{job.job}:{last}"]
    assert {message.headers[REPLAY] for message in messages} == {job.job}
    assert (await bench.state(unique)).status is PrefillStatus.DONE


async def test_a_replay_can_be_narrowed_to_some_topics(bench: Bench, unique: str) -> None:
    first = await bench.publish("a/x", "1", {"id": 1})
    wanted = await bench.publish("a/y", "2", {"id": 2})
    await bench.publish("b/y", "3", {"id": 3})
    await bench.add(unique, "a/.*", prefill=False)
    job = await bench.subscriptions.replay(unique, first, topics=[RealmTopic(bench.realm, ".*/y")])

    await bench.run(job)

    assert [message.position for message in await bench.stored(unique)] == [wanted]


async def test_a_replay_between_times_has_what_was_stored_between_them(bench: Bench, unique: str) -> None:
    await bench.publish("a/x", "1", {"id": 1})
    begin = datetime.now(UTC)
    wanted = await bench.publish("a/x", "2", {"id": 2})
    end = datetime.now(UTC)
    await bench.publish("a/x", "3", {"id": 3})
    await bench.add(unique, "a/x", prefill=False)

    await bench.run(await bench.subscriptions.replay(unique, begin, end))

    assert [message.position for message in await bench.stored(unique)] == [wanted]


async def test_a_replay_that_stopped_in_the_middle_goes_on_without_doubles(bench: Bench, unique: str) -> None:
    await bench.publish_many("a/x", 2500)
    await bench.add(unique, "a/x", prefill=False)
    job = await bench.subscriptions.replay(unique, 1)
    await bench.limit(unique, 1100)
    with pytest.raises(PublishRefused):
        await bench.run(job)
    assert (await bench.state(unique)).status is PrefillStatus.RUNNING  # and so it is not given out
    await bench.limit(unique, -1)

    assert await bench.run(job) is Ending.DONE
    assert await bench.run(job) is Ending.DONE

    assert [message.body["new"]["id"] for message in await bench.stored(unique)] == list(range(1, 2501))


async def test_two_replays_of_one_subscription_come_one_after_the_other(bench: Bench, unique: str) -> None:
    first = await bench.publish("a/x", "1", {"id": 1})
    await bench.publish("a/x", "2", {"id": 2})
    await bench.add(unique, "a/x", prefill=False)
    one, two = [await bench.subscriptions.replay(unique, first, first + 1) for _ in range(2)]
    await bench.run(one)
    found = await bench.registered(unique)
    assert found.prefill is not None
    running = replace(found.prefill, status=PrefillStatus.RUNNING)
    revision = await bench.shop.registry.put_prefill(unique, running, found.prefill_revision)

    assert await bench.run(two) is Ending.LATER

    await bench.shop.registry.put_prefill(unique, found.prefill, revision)
    assert await bench.run(two) is Ending.DONE
    jobs = [message.headers[REPLAY] for message in await bench.stored(unique)]
    assert jobs == [one.job, one.job, two.job, two.job]


async def test_a_replay_comes_behind_the_prefill(bench: Bench, unique: str) -> None:
    position = await bench.publish("a/x", "1", {"id": 1})
    _, [prefill] = await bench.add(unique, "a/x")
    job = await bench.subscriptions.replay(unique, position)
    assert isinstance(job, ReplayJob)

    assert await bench.run(job) is Ending.LATER
    await bench.run(prefill)
    assert await bench.run(job) is Ending.DONE

    assert ids(await bench.stored(unique)) == ["prefill:1:1", f"replay:{job.job}:{position}"]

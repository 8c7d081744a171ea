import asyncio
import json
from dataclasses import replace

import pytest

from purveyor.jetstream.bulk import Target
from purveyor.model.control_events import PrefillJob
from purveyor.model.errors import PublishRefused
from purveyor.model.message_headers import PREFILL_PUBLISHER
from purveyor.model.registration import PrefillStatus
from purveyor.model.subscription import Filter
from purveyor.pipeline.prefill import archive_queries
from purveyor.pipeline.prefill.job_context import JobResult
from purveyor.pipeline.prefill.queue_writer import NUMBER, NUMBERS_PER_RUN, FillSpec, write_rows
from tests.support.prefill_harness import PrefillHarness, ids
from tests.support.waiting import until


async def begun(harness: PrefillHarness, name: str) -> bool:
    return (await harness.state(name)).status is not PrefillStatus.PENDING


async def test_the_queue_holds_each_object_as_it_was_where_the_subscription_begins(
    harness: PrefillHarness, unique: str
) -> None:
    created = await harness.publish("users/user", "ann", {"id": "ann", "n": 1})
    await harness.publish("users/user", "bob", {"id": "bob"})
    modified = await harness.publish("users/user", "bob", {"id": "bob", "n": 2}, {"id": "bob"})
    await harness.publish("users/user", "gone", {"id": "gone"})
    await harness.publish("users/user", "gone", None, {"id": "gone"})
    back = await harness.publish("users/user", "back", {"id": "back", "n": 3})
    await harness.publish("groups/group", "other", {"id": "other"})
    record, [job] = await harness.add(unique, "users/user")
    await harness.publish("users/user", "ann", {"id": "ann", "n": 9}, {"id": "ann", "n": 1})
    await harness.publish("users/user", "bob", None, {"id": "bob", "n": 2})
    await harness.publish("users/user", "new", {"id": "new"})

    assert await harness.run(job) is JobResult.DONE

    messages = await harness.stored(unique)
    assert [message.position for message in messages] == [created, modified, back]
    assert [message.body for message in messages] == [
        {"old": {}, "new": {"id": "ann", "n": 1}},
        {"old": {}, "new": {"id": "bob", "n": 2}},
        {"old": {}, "new": {"id": "back", "n": 3}},
    ]
    assert record.begin is not None
    assert all(message.position <= record.begin for message in messages)
    state = await harness.state(unique)
    assert (state.status, state.total, state.written) == (PrefillStatus.DONE, 3, 3)


async def test_the_messages_come_in_the_order_of_the_topics(harness: PrefillHarness, unique: str) -> None:
    user = await harness.publish("users/user", "u1", {"id": "u1"})
    group = await harness.publish("groups/group", "g1", {"id": "g1"})
    unit = await harness.publish("container/ou", "o1", {"id": "o1"})
    other = await harness.publish("users/contact", "c1", {"id": "c1"})
    _, [job] = await harness.add(unique, "container/.*", "groups/group", "users/user", ".*")

    await harness.run(job)

    assert [message.position for message in await harness.stored(unique)] == [unit, group, user, other]


async def test_only_what_the_filter_lets_through_as_an_object_without_a_past(
    harness: PrefillHarness, unique: str
) -> None:
    await harness.publish("users/user", "a", {"id": "a", "city": "Rome"}, site="x")
    await harness.publish("users/user", "b", {"id": "b", "city": "Oslo"}, site="x")
    await harness.publish("users/user", "c", {"id": "c", "city": "Rome"}, site="y")
    await harness.publish("users/user", "d", {"id": "d", "city": "Rome"}, {"id": "d", "city": "Oslo"}, site="x")
    await harness.publish("users/user", "e", {"id": "e"}, {"id": "e", "city": "Rome"}, site="x")
    wanted = Filter(attributes={"site": ("x",)}, fields={"city": ("Rome",)})
    _, [job] = await harness.add(unique, "users/user", filter_=wanted)

    await harness.run(job)

    assert [message.body["new"]["id"] for message in await harness.stored(unique)] == ["a", "d"]


async def test_a_message_carries_its_origin_and_keeps_its_bytes(harness: PrefillHarness, unique: str) -> None:
    text = (
        f'{{"publisher_name":"p","ts":"2026-01-01T00:00:00Z","realm":"{harness.realm}","topic":"t","key":"k",'
        '"body":{"old":OLD,"new":{"n":12345678901234567890.123456789, "s":"\\u0041"}}}'
    )
    data = text.replace("OLD", '{"n":1}').encode()
    receipt = await harness.queues.publish("incoming", data, headers={"Trace": ["1", "2"]}, msg_id=f"id-{unique}")
    _, [job] = await harness.add(unique, "t")

    await harness.run(job)

    [message] = await harness.stored(unique)
    assert message.data == text.replace("OLD", "{}").encode()
    reported = {name: value for name, value in message.headers.items() if not name.startswith("Nats-Expected-")}
    assert reported == {
        "Trace": "1",
        "Purveyor-Position": str(receipt.sequence),
        "Purveyor-Id": f"id-{unique}",
        "Nats-Msg-Id": "prefill:1:1",
        NUMBER: str(NUMBERS_PER_RUN + 1),
    }


async def test_a_message_has_the_publisher_that_its_event_names_for_prefills(
    harness: PrefillHarness, unique: str
) -> None:
    text = (
        f'{{"publisher_name":"udm-listener","ts":"2026-01-01T00:00:00Z","realm":"{harness.realm}","topic":"t",'
        '"body":{"old":OLD,"new":{"publisher_name":"udm-listener","n":1.10}},"key":"KEY"}'
    )
    for key, old, headers in (
        ("created", "{}", {PREFILL_PUBLISHER: "udm-pre-fill"}),
        ("other", "{}", {"Trace": "1"}),
        ("changed", '{"n":1}', {"Trace": "1", PREFILL_PUBLISHER: 'ä "name"'}),
    ):
        data = text.replace("KEY", key).replace("OLD", old).encode()
        await harness.queues.publish("incoming", data, headers=headers)
    _, [job] = await harness.add(unique, "t")

    await harness.run(job)

    messages = await harness.stored(unique)
    live = text.replace("OLD", "{}")
    assert [message.data.decode() for message in messages] == [
        live.replace("udm-listener", "udm-pre-fill", 1).replace("KEY", "created"),
        live.replace("KEY", "other"),
        live.replace('"udm-listener"', '"\\u00e4 \\"name\\""', 1).replace("KEY", "changed"),
    ]
    assert not any(PREFILL_PUBLISHER in message.headers for message in messages)

    await harness.run(await harness.subscriptions.replay(unique, 1))

    replayed = (await harness.stored(unique))[3:]
    assert {json.loads(message.data)["publisher_name"] for message in replayed} == {"udm-listener"}


async def test_events_that_come_while_it_runs_change_nothing(harness: PrefillHarness, unique: str) -> None:
    await harness.publish_many("users/user", 3000)
    _, [job] = await harness.add(unique, "users/user")
    running = asyncio.create_task(harness.run(job))
    for number in range(1, 200):
        await harness.publish("users/user", str(number), {"id": number, "late": True}, {"id": number})

    assert await running is JobResult.DONE

    messages = await harness.stored(unique)
    assert [message.body["new"] for message in messages] == [{"id": number} for number in range(1, 3001)]


async def test_an_empty_prefill_is_done(harness: PrefillHarness, unique: str) -> None:
    _, [job] = await harness.add(unique, "nothing")

    assert await harness.run(job) is JobResult.DONE

    assert await harness.stored(unique) == []
    assert (await harness.state(unique)).status is PrefillStatus.DONE


async def test_a_job_for_a_subscription_that_is_gone_ends_quietly(harness: PrefillHarness, unique: str) -> None:
    _, [job] = await harness.add(unique, "users/user")
    await harness.subscriptions.delete(unique)

    assert await harness.run(job) is JobResult.DONE

    record, [_] = await harness.add(unique, "users/user")
    assert record.incarnation != job.incarnation
    assert await harness.run(job) is JobResult.DONE
    assert (await harness.state(unique)).status is PrefillStatus.PENDING
    assert await harness.stored(unique) == []


async def test_a_subscription_deleted_meanwhile_ends_its_prefill_quietly(harness: PrefillHarness, unique: str) -> None:
    await harness.publish_many("users/user", 2000)
    _, [job] = await harness.add(unique, "users/user")
    running = asyncio.create_task(harness.run(job))
    await until(lambda: begun(harness, unique))
    await harness.subscriptions.delete(unique)

    assert await running is JobResult.DONE
    assert f"stream:{unique}" not in await harness.queues.streams.names()


async def test_after_a_failure_in_the_middle_it_begins_anew_and_nothing_is_doubled(
    harness: PrefillHarness, unique: str
) -> None:
    await harness.publish_many("users/user", 2500)
    _, [job] = await harness.add(unique, "users/user")
    await harness.limit(unique, 1200)
    with pytest.raises(PublishRefused):
        await harness.run(job)
    assert 0 < len(await harness.stored(unique)) <= 1200
    await harness.limit(unique, -1)

    assert await harness.run(job) is JobResult.DONE

    messages = await harness.stored(unique)
    assert [message.body["new"]["id"] for message in messages] == list(range(1, 2501))
    assert ids(messages) == [f"prefill:2:{number}" for number in range(1, 2501)]
    assert await harness.run(job) is JobResult.DONE
    assert len(await harness.stored(unique)) == 2500


async def test_an_older_run_that_is_still_at_it_can_store_nothing_more(harness: PrefillHarness, unique: str) -> None:
    await harness.publish_many("users/user", 50)
    record, [job] = await harness.add(unique, "users/user")
    assert isinstance(job, PrefillJob)
    older = FillSpec(
        address=harness.queues.address,
        target=Target(subject=f"{unique}.prefill", stream=f"stream:{unique}", position_header=NUMBER),
        origin=unique,
        run=0,
        id_prefix="prefill:0",
    )
    rows = archive_queries.objects(harness.context.spark, harness.context.archive, record.definition, job.position)
    await harness.context.run_on_spark(lambda: write_rows(rows.where("position % 2 = 0"), older))
    assert await harness.run(job) is JobResult.DONE

    await harness.context.run_on_spark(lambda: write_rows(rows, older))

    assert ids(await harness.stored(unique)) == [f"prefill:1:{number}" for number in range(1, 51)]


async def test_an_object_that_is_too_large_for_the_queue_is_parked_and_the_others_are_written(
    harness: PrefillHarness, unique: str
) -> None:
    for key in ("a", "b"):
        await harness.publish("t", key, {"id": key})
    text = (
        f'{{"publisher_name":"p","ts":"2026-01-01T00:00:00Z","realm":"{harness.realm}","topic":"t","key":"big","body":'
    )
    room = harness.queues.connection.max_payload - len(text) - len('{"new":{"x":""}}}')
    large = await harness.publish_bytes(f'{text}{{"new":{{"x":"{"x" * room}"}}}}}}'.encode())
    await harness.publish("t", "c", {"id": "c"})
    _, [job] = await harness.add(unique, "t")

    assert await harness.run(job) is JobResult.DONE

    assert [message.body["new"]["id"] for message in await harness.stored(unique)] == ["a", "b", "c"]
    assert (await harness.state(unique)).total == 3
    [letter] = await harness.messages("stream:dead-letters", f"dead-letters.{unique}")
    assert letter.position == large
    assert "too large" in letter.headers["Purveyor-Reason"]


async def test_a_missing_queue_is_created_again(harness: PrefillHarness, unique: str) -> None:
    await harness.publish("users/user", "a", {"id": "a"})
    _, [job] = await harness.add(unique, "users/user")
    await harness.queues.streams.remove(f"stream:{unique}")

    assert await harness.run(job) is JobResult.DONE

    assert len(await harness.stored(unique)) == 1


async def test_a_run_that_lost_its_claim_ends_without_an_answer(harness: PrefillHarness, unique: str) -> None:
    await harness.publish_many("users/user", 2000)
    _, [job] = await harness.add(unique, "users/user")
    running = asyncio.create_task(harness.run(job))
    await until(lambda: begun(harness, unique))
    found = await harness.registered(unique)
    assert found.prefill is not None
    newer = replace(found.prefill, attempt=found.prefill.attempt + 1, job="newer")
    await harness.context.registry.put_prefill(unique, newer, found.prefill_revision)

    assert await running is JobResult.LEFT
    assert await harness.state(unique) == newer


async def test_the_state_shows_the_progress(harness: PrefillHarness, unique: str) -> None:
    await harness.publish_many("users/user", 30)
    _, [job] = await harness.add(unique, "users/user")

    await harness.run(job)

    state = await harness.state(unique)
    assert json.loads(json.dumps(state.to_json()))["written"] == 30
    assert state.job == job.job

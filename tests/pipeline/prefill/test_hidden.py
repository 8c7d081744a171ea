"""Hidden fields are in no message of a subscription, live or filled; all other bytes are unchanged."""

import pyarrow as pa

from purveyor.jetstream.bulk import AppendOptions
from purveyor.model.delivery_policy import DEFAULT_HIDDEN_FIELDS
from purveyor.model.redaction import redact
from purveyor.pipeline.archive.reader import events
from purveyor.pipeline.dispatch.batch_job import BatchJob, archived_topic_batches
from purveyor.pipeline.dispatch.batch_plan import PlannedTarget
from purveyor.pipeline.dispatch.subscriber_messages import redact_bodies
from tests.support.prefill_harness import PrefillHarness, Stored, definition
from tests.support.scale import chance

SECRET = "{SSHA}secret"


def bodies(realm: str) -> list[bytes]:
    """Events as other programs might write them: two contain the secret, one does not."""
    about = f'{{"publisher_name": "x", "ts": "2026-01-01T00:00:00Z", "realm": "{realm}", "topic": "a/x", '
    first = f'"new": {{"id": "a", "properties": {{"uid": "a", "userPassword": ["{SECRET}"]}}}}'
    third = f'"old": {{"id": "c", "\\u0070assword": "{SECRET}", "salary": 1}}, "new": {{"id": "c", "salary": 2}}'
    texts = (
        f'"attributes": {{"password": "not of the object"}}, "body": {{"old": {{}}, {first}}}',
        '"body": {"old":{}, "new": {"id": "b", "n": 1.10}}',
        f'"body": {{{third}}}',
    )
    return [f"{about}{text}}}".encode() for text in texts]


def data(messages: list[Stored]) -> list[bytes]:
    return [message.data for message in messages]


async def test_prefill_replay_and_live_events_are_without_it(harness: PrefillHarness, unique: str) -> None:
    given = bodies(harness.realm)
    positions = [await harness.publish_bytes(body) for body in given]
    expected = [redact(body, DEFAULT_HIDDEN_FIELDS) for body in given]
    assert expected[1] == given[1]
    assert not any(SECRET.encode() in body for body in expected)
    record, _ = await harness.subscriptions.add(definition(harness, unique, prefill=True))
    [job] = await harness.jobs()

    await harness.run(job)
    emptied = expected[2].replace(b'"old": {"id": "c", "salary": 1}', b'"old": {}')
    assert data(await harness.stored(unique)) == [*expected[:2], emptied]

    await harness.run(await harness.subscriptions.replay(unique, positions[0], positions[-1]))
    assert data(await harness.stored(unique))[3:] == expected

    open_, _ = await harness.subscriptions.add(definition(harness, f"{unique}-open", (), prefill=False))
    other, _ = await harness.subscriptions.add(
        definition(harness, f"{unique}-other", ("new.salary", "id"), prefill=False)
    )
    again = [await harness.publish_bytes(body) for body in given]
    seats = [PlannedTarget(await harness.registered(each.name), again[0] - 1) for each in (record, open_, other)]

    def dispatch() -> None:
        rows = archived_topic_batches(events(harness.context.spark, harness.context.archive, again[0], again[-1]))
        report = BatchJob(harness.queues.address, AppendOptions()).run(rows, seats, writers=1, in_order=False)
        assert not report.refusals

    await harness.context.run_on_spark(dispatch)
    assert data(await harness.stored(unique, "main")) == expected
    assert data(await harness.stored(open_.name, "main")) == given
    cut = data(await harness.stored(other.name, "main"))
    assert cut == [redact(body, ("new.salary", "id")) for body in given]
    assert cut[2].endswith(b'"salary": 1}, "new": {}}}')

    kept = await harness.context.run_on_spark(
        lambda: events(harness.context.spark, harness.context.archive, 1, again[-1]).collect()
    )
    assert {bytes(row.data) for row in kept} >= set(given)  # the archive has them whole


async def test_a_message_that_is_too_large_is_parked_without_it(harness: PrefillHarness, unique: str) -> None:
    await harness.subscriptions.add(definition(harness, unique, prefill=False))
    position = await harness.publish_bytes(bodies(harness.realm)[0])
    await harness.queues.streams.update(f"stream:{unique}", {"max_msg_size": 64})
    found = await harness.registered(unique)

    def dispatch() -> None:
        rows = archived_topic_batches(events(harness.context.spark, harness.context.archive, position, position))
        BatchJob(harness.queues.address, AppendOptions()).run(
            rows, [PlannedTarget(found, position - 1)], writers=1, in_order=False
        )

    await harness.context.run_on_spark(dispatch)
    [parked] = await harness.messages("stream:dead-letters", f"dead-letters.{unique}")
    assert parked.data == redact(bodies(harness.realm)[0], DEFAULT_HIDDEN_FIELDS)


def test_all_rows_at_once_are_censored_as_one_by_one() -> None:
    draw = chance("censoring")
    pieces = ['"password": 1', '"PASSword" :{"a": 1}', '"p\\u0061ssword": []', '"a": "password"', '"n": 1.10']
    rows = []
    for _ in range(300):
        sides = [", ".join(draw.sample(pieces, draw.randint(0, 3))) for _ in range(2)]
        rows.append(f'{{"password": 0, "body": {{"old": {{{sides[0]}}}, "new": {{"x": {{{sides[1]}}}}}}}}}'.encode())
    hidden = draw.choice([("password",), ("x.password",), ("old.password", "n"), ("größe",)])
    column = pa.array([b"", *rows], pa.binary()).slice(1)

    found = redact_bodies(column, hidden)

    assert found.to_pylist() == [redact(row, hidden) for row in rows]
    assert redact_bodies(column, ()) is column
    assert hidden != ("größe",) or found is column

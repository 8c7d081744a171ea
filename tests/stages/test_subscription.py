"""A provisioning consumer that is a transactional stage: each event has its effect once, in order."""

from datetime import timedelta
from typing import Any

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from purveyor.delivery.dead_letters.service import DeadLetterFilter, open_dead_letters
from purveyor.delivery.pull import open_pull
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.headers import POSITION, first
from purveyor.model.event import Event
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.queues.catalogue import DEAD_LETTERS
from purveyor.queues.client import Queues
from purveyor.stages import Context, Refuse, Retry, SqlStore, Stages, SubscriptionPull, SubscriptionSource
from tests.support.stages import QUICK, event, rows
from tests.support.waiting import until


async def test_events_of_a_subscription_go_through_a_stage_once_and_in_order(
    queues: Queues, database: str, unique: str
) -> None:
    name = unique[-24:]
    await Subscriptions(queues).add(Subscription(name=name, realms_topics=(RealmTopic("udm", "users/user"),)))
    calls: list[int] = []
    known = False

    def application(pull: SubscriptionPull) -> Stages:
        stages = Stages(queues, store=SqlStore(database), app="test", timing=QUICK)
        source = SubscriptionSource(queues, name, pull)
        accounts = stages.terminator(f"{name}.accounts", message=Event, source=source)

        @accounts.last_stage(exactly_once=True, retry=Retry.in_order(first_delay=timedelta(milliseconds=10)))
        async def provision(ctx: Context[None], message: Event, db: AsyncSession) -> None:
            number: Any = message.new["number"]
            calls.append(number)
            values = {"n": number, "k": ctx.key}
            await db.execute(text("INSERT INTO effects (number, note) VALUES (:n, :k)"), values)
            if number == 3 and calls.count(3) < 3:
                raise ValueError("not yet")
            if number == 5 and not known:
                raise Refuse("nobody of that name")

        return stages

    async def publish(numbers: range) -> None:
        for number in numbers:
            headers = {POSITION: str(number + 2)}
            await queues.publish(f"{name}.main", event(number, f"user-{number % 2}"), headers=headers)

    for numbers in (range(10), range(10, 14)):
        await publish(numbers)
        async with open_pull(queues) as pull, application(pull):
            await until(lambda: _is_empty(queues, name))
    found = await rows(database, "SELECT number, note FROM effects ORDER BY id")
    assert [number for number, note in found if note == "user-0"] == [0, 2, 4, 6, 8, 10, 12]
    assert [number for number, note in found if note == "user-1"] == [1, 3, 7, 9, 11, 13]
    subject = f"dead-letters.stage-{name}-accounts-0"
    assert (await queues.streams.subjects(DEAD_LETTERS.stream, subject)) == {subject: 1}

    known = True
    async with open_dead_letters(queues) as letters:
        assert (await letters.retry(DeadLetterFilter(origin=f"stage:{name}.accounts.0"))).targets == {
            f"{name}.retry": 1
        }
    [back] = [await queues.streams.get_last(f"stream:{name}", f"{name}.retry")]
    assert first(back.headers, POSITION) == "7"
    async with open_pull(queues) as pull, application(pull):
        await until(lambda: _is_empty(queues, name))
    assert await rows(database, "SELECT number, note FROM effects ORDER BY id DESC LIMIT 1") == [(5, "user-1")]


async def _is_empty(queues: Queues, name: str) -> bool:
    return (await queues.streams.info(f"stream:{name}")).state.messages == 0

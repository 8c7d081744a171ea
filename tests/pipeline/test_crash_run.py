"""The whole pipeline under kill -9: every change of the sources is in each matching queue, once, in order.

A directory changes at random and is imported as its LDIF file grows; other events are published beside it;
subscriptions come and go. Meanwhile Python workers, the driver with its JVM, and nats-server are killed. In the end two
checks must be empty: the audit, and one that knows nothing of the pipeline (see `ledger`). One of the runs begins on
the queue of an older system, with a backlog and a publisher that does not stop.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from purveyor.model.subscription import Filter, RealmTopic, Subscription
from tests.pipeline.installation import EXACT, PATIENCE_SECONDS, SAFE, USERS, WIDE, Installation
from tests.support.nats_servers import OwnServer
from tests.support.scale import chance, pick
from tests.support.waiting import wait_until

CHANGES, DIRECT = pick(300, 70_000), pick(150, 30_000)
KILLS = pick(3, 24)
ONE_SECOND = 1_000_000_000

DEPARTMENT = "properties.departmentNumber"
SALES = Subscription(
    name="sales",
    realms_topics=(RealmTopic("udm", "groups/group"), USERS),
    request_prefill=True,
    filter=Filter(fields={DEPARTMENT: ("sales",)}),
)
EARLY_PREFILL = Subscription(name="mirror", realms_topics=(USERS, RealmTopic("udm", "groups/.*")), request_prefill=True)
EUROPE = Subscription(
    name="europe", realms_topics=(RealmTopic("shop", "orders/.*"),), filter=Filter(attributes={"region": ("eu",)})
)
MORE = (
    Subscription(name="groups", realms_topics=(RealmTopic("udm", "groups/group"),)),
    Subscription(name="refunds", realms_topics=(RealmTopic("shop", "orders/refund"),)),
    Subscription(name="both", realms_topics=(RealmTopic("shop", "orders/order"), USERS), request_prefill=True),
    Subscription(name="research", realms_topics=(USERS,), filter=Filter(fields={DEPARTMENT: ("research",)})),
    Subscription(name="regex", realms_topics=(RealmTopic("udm", "(users|groups)/(user|group)"),)),
)
AT_THE_START = (WIDE, EXACT, *pick((), MORE[:2]))
IN_THE_MIDDLE = (SALES, *pick((), (EARLY_PREFILL, EUROPE, *MORE[2:])))
PASSING = Subscription(name="passing", realms_topics=(USERS,))
"""Added, deleted, and added again."""
TAKEN_OVER = (
    "Stream 'stream:incoming' sealed for migration",
    "Stream 'stream:incoming' sealed with ",
    "Sealed stream 'stream:incoming' is empty, completing migration",
    "Migration completed for 'stream:incoming'",
    "Stream migration completed, resuming normal operation",
)


Make = Callable[..., Installation]


@pytest.fixture
def install(own_server: OwnServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PURVEYOR_NATS_URL", raising=False)
    made: list[Installation] = []

    def make(random: Random, **kind: Any) -> Installation:
        data = tmp_path / "data"
        data.mkdir()
        made.append(Installation(own_server(SAFE, directory=data / "nats"), data, random, **kind))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.chaos
@pytest.mark.timeout(7200)
@pytest.mark.first
def test_nothing_is_lost_doubled_or_disordered_whatever_is_killed(
    install: Make, request: pytest.FixtureRequest
) -> None:
    random = chance("kill -9 of the pipeline's parts")
    here = install(random)
    for each in (*AT_THE_START, PASSING):
        here.add(each)
    targets = ["worker", "server", "driver"] * KILLS
    killed = 0
    for number in range(KILLS):
        here.pipeline.wait_for("ready")
        before = here.last("wide")
        changes, direct = CHANGES // (KILLS + 1), DIRECT // (KILLS + 1)
        here.feed(changes // 2, direct)
        wait_until(partial(lambda seen: here.last("wide") > seen, before), seconds=PATIENCE_SECONDS)
        here.feed(changes - changes // 2, 0)
        time.sleep(random.uniform(0, 1))  # wherever it is then
        killed += here.kill_something(targets[number])
        if number == KILLS // 3:
            here.wait_for_half()
            for each in IN_THE_MIDDLE:
                here.add(each)
            here.run("subscription", "delete", PASSING.name, "--yes")
        if number == 2 * KILLS // 3:
            here.add(PASSING)
    here.feed(CHANGES - len(here.directory.expected), DIRECT - len(here.direct))
    assert killed >= pick(2, 20)
    here.drain()
    here.check(request.getfixturevalue("spark"), (*AT_THE_START, *IN_THE_MIDDLE, PASSING))


@pytest.mark.chaos
@pytest.mark.timeout(1200)
@pytest.mark.first
def test_an_older_queue_is_taken_over_in_place_and_a_stop_longer_than_ids_are_known_doubles_nothing(
    install: Make, request: pytest.FixtureRequest
) -> None:
    """Two promises in one story, because every start of Spark costs seconds.

    A deployment is upgraded in place: the work queue of the older system has a backlog, and its publisher goes on.
    Then a year's downtime in small: the server recognises an id for one second, and the pipeline is away for two.
    """
    here = install(chance("a long downtime"), older=True)
    with here.older_publisher():
        here.pipeline.wait_for(f"migration: {TAKEN_OVER[-1]}")
        here.add(WIDE)
        here.add(EXACT)
        here.pipeline.wait_for("ready")
    reported = [line.removeprefix("migration: ") for line in here.pipeline.lines if line.startswith("migration: ")]
    assert [line for line in reported if "remaining" not in line] == [line for line in TAKEN_OVER if "with" not in line]
    assert reported[1].startswith(TAKEN_OVER[1])
    config = here.broker.ask("STREAM.INFO.stream:incoming")["config"]
    assert (config["retention"], bool(config.get("sealed"))) == ("interest", False)
    assert here.broker.consumers("stream:incoming") == ["archive", "dispatcher", "transform-receipts"]
    for queue in ("ldif", "incoming", "dead-letters", WIDE.name, EXACT.name):
        here.broker.update(f"stream:{queue}", duplicate_window=ONE_SECOND)
    for _ in range(pick(1, 5)):
        before = here.last("wide")
        here.feed(pick(400, 4000), pick(100, 1000))
        wait_until(partial(lambda seen: here.last("wide") > seen, before), seconds=PATIENCE_SECONDS)
        here.pipeline.kill()  # the first rows are there, so the batch is not committed
        time.sleep(2)
        here.start()
        here.pipeline.wait_for("ready")
    here.drain()
    here.check(request.getfixturevalue("spark"), (WIDE, EXACT))


@pytest.mark.long
@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_the_same_holds_on_a_spark_cluster_whose_executors_are_killed(
    install: Make, request: pytest.FixtureRequest
) -> None:
    """Tasks run in processes that got the package sent; what one of them held when it died is done by another."""
    here = install(chance("kill -9 of the pipeline's executors"), master="local-cluster[2,1,1024]")
    here.add(WIDE)
    here.add(EXACT)
    killed = 0
    for number, target in enumerate(["executor", "worker", "executor", "driver", "executor", "executor"]):
        here.pipeline.wait_for("ready")
        before = here.last("wide")
        here.feed(500, 300)
        wait_until(partial(lambda seen: here.last("wide") > seen, before), seconds=PATIENCE_SECONDS)
        here.feed(500, 0)
        time.sleep(here.random.uniform(0, 1))  # wherever it is then
        killed += here.kill_something(target)
        if number == 2:
            here.wait_for_half()
            here.add(SALES)
    here.drain()
    assert killed >= 4
    here.check(request.getfixturevalue("spark"), (WIDE, EXACT, SALES))

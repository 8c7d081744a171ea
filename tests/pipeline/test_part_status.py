"""The pipeline publishes its status, and a server that is away does not block it."""

from datetime import UTC, datetime
from typing import Any

from purveyor.jetstream.address import Address
from purveyor.pipeline.job_failures import Failure
from purveyor.pipeline.part_status import PartStatus, State, StatusPublisher, status_key
from purveyor.queues import status_board
from tests.support.running_api import on_server
from tests.support.waiting import wait_until


def part(state: State, error: Failure | None = None) -> PartStatus:
    return PartStatus(name="dispatch", state=state, since=datetime.now(UTC), error=error)


def posted(address: Address, label: str) -> Any:
    found = on_server(address, lambda queues: status_board.read_notices(queues, "pipeline"))
    return next((each.value for each in found if each.key == status_key(label)), None)


def test_what_a_pipeline_does_is_posted_and_its_end_too(address: Address, unique: str) -> None:
    with StatusPublisher(lambda: address, status_key(unique)) as publisher:
        publisher.publish({"group": "main", "spark_ui": None}, [part(State.RUNNING)])
        wait_until(lambda: (posted(address, unique) or {}).get("parts", [{}])[0].get("state") == "running")
        publisher.publish({"group": "main"}, [part(State.WAITING, Failure("the disk is full"))])
        wait_until(lambda: posted(address, unique)["parts"][0].get("error") == "the disk is full")
        assert "spark_ui" not in posted(address, unique)
    assert posted(address, unique)["stopped"] is True


def test_a_server_that_is_away_does_not_block_the_pipeline(unique: str) -> None:
    nowhere = Address.parse("nats://127.0.0.1:1")
    with StatusPublisher(lambda: nowhere, status_key(unique)) as publisher:
        for _ in range(10_000):  # each would wait for two seconds, if it waited
            publisher.publish({}, [part(State.RUNNING)])

"""A pipeline tells everybody how it is, and is held up by nobody who does not listen."""

from datetime import UTC, datetime
from typing import Any

from purveyor.jetstream.address import Address
from purveyor.pipeline.error_summary import Failure
from purveyor.pipeline.part_status import PartStatus, State
from purveyor.pipeline.status_publisher import Posting, key_of
from purveyor.queues import status_board
from tests.app.http.conftest import on_server
from tests.waiting import wait_until


def part(state: State, error: Failure | None = None) -> PartStatus:
    return PartStatus(name="dispatch", state=state, since=datetime.now(UTC), error=error)


def posted(address: Address, label: str) -> Any:
    found = on_server(address, lambda queues: status_board.read(queues, "pipeline"))
    return next((each.value for each in found if each.key == key_of(label)), None)


def test_what_a_pipeline_does_is_posted_and_its_end_too(address: Address, unique: str) -> None:
    with Posting(lambda: address, unique) as posting:
        posting.show({"group": "main", "spark_ui": None}, [part(State.RUNNING)])
        wait_until(lambda: (posted(address, unique) or {}).get("parts", [{}])[0].get("state") == "running")
        posting.show({"group": "main"}, [part(State.WAITING, Failure("the disk is full"))])
        wait_until(lambda: posted(address, unique)["parts"][0].get("error") == "the disk is full")
        assert "spark_ui" not in posted(address, unique)
    assert posted(address, unique)["stopped"] is True


def test_a_server_that_is_away_holds_nobody_up(unique: str) -> None:
    nowhere = Address.parse("nats://127.0.0.1:1")
    with Posting(lambda: nowhere, unique) as posting:
        for _ in range(10_000):  # each would wait for two seconds, if it waited
            posting.show({}, [part(State.RUNNING)])

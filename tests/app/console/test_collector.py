"""The facts are those of the server; a server that is away is one of them."""

from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from purveyor.app.console import message_preview
from purveyor.app.console.collector import Gatherer, pipeline_facts
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.server import ServerOptions, running
from purveyor.model.errors import PermissionDenied, ServerUnavailable
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.pipeline.error_summary import Failure
from purveyor.pipeline.part_status import PartStatus, Reading, State
from purveyor.pipeline.status_publisher import notice
from purveyor.queues import status_board
from purveyor.queues.catalogue import internal_queues
from purveyor.queues.client import connect
from purveyor.queues.permissions import API, components
from purveyor.queues.status_board import Notice
from tests.conftest import OwnServer


async def test_a_server_that_is_away_is_a_fact() -> None:
    def services() -> Any:
        raise ServerUnavailable("no NATS server answers", fix="is it running?")

    facts = await Gatherer(services).look()
    assert (facts.problem, facts.fix) == ("no NATS server answers", "is it running?")


def test_what_the_pipeline_posts_is_what_the_console_reads() -> None:
    now = datetime.now(UTC)
    reading = Reading(position=12, lag=3, rows=5, rows_per_second=9.5, batch=4, batch_ms=70)
    running = PartStatus(name="dispatch", state=State.RUNNING, since=now, reading=reading)
    broken = PartStatus(name="archive", state=State.WAITING, since=now, error=Failure("full"), restarts=2)
    told = notice({"group": "main", "spark_ui": "http://127.0.0.1:4040"}, [running, broken])
    found = pipeline_facts(Notice("pipeline.all", told, now))
    assert (found.label, found.group, found.spark_ui, found.stopped) == ("all", "main", "http://127.0.0.1:4040", False)
    dispatch, archive = found.parts
    assert (dispatch.position, dispatch.lag, dispatch.rows_per_second, dispatch.batch_ms) == (12, 3, 9.5, 70)
    assert (archive.state, archive.error, archive.restarts) == ("waiting", "full", 2)


@pytest.mark.parametrize(
    "rubbish", [{}, {"parts": 3}, {"parts": [1, {}]}, {"pid": "x", "parts": [{"part": [], "lag": "a"}]}]
)
def test_rubbish_on_the_board_breaks_nothing(rubbish: dict[str, Any]) -> None:
    assert pipeline_facts(Notice("pipeline.all", rubbish, None)).pid is None


async def test_the_user_of_the_api_sees_every_queue_and_looks_into_those_that_are_its_business(
    own_server: OwnServer, tmp_path: Path
) -> None:
    server = own_server(ServerOptions(sync="2m", users=components()), directory=tmp_path / "nats")
    async with connect(server.address, patience_seconds=60) as operator:
        for queue in internal_queues():
            (await operator.ensure(queue)).require_ready()
    status_board.post(server.address, "pipeline.all", {"parts": [{"part": "dispatch", "state": "running"}]})
    address = running(tmp_path / "nats", API)
    assert address is not None
    async with connect(address, patience_seconds=60) as queues:
        services: Any = SimpleNamespace(queues=queues)
        await Subscriptions(queues).add(Subscription(name="ox", realms_topics=(RealmTopic("udm", "users/user"),)))
        facts = await Gatherer(lambda: services).look()
        assert facts.problem is None
        assert {"ldif", "incoming", "prefill", "dead-letters", "ox"} <= set(facts.queues)
        assert facts.reader("incoming", "archive") is not None
        assert list(facts.subscriptions) == ["ox"]
        assert [part.name for part in facts.pipelines[0].parts] == ["dispatch"]
        for name in ("ox", "dead-letters"):
            assert not message_preview.Look(name).needs_operator
            assert (await message_preview.read(queues, message_preview.Look(name))).messages == ()
        assert message_preview.Look("incoming").needs_operator
        with pytest.raises(PermissionDenied):
            await message_preview.read(queues, message_preview.Look("incoming"))

"""A snapshot shows the state of the server, or that the server is unreachable."""

from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from purveyor.app.console.pages.queue_browser import MessageRange, read_messages
from purveyor.app.console.snapshot import Collector, pipeline_snapshot
from purveyor.app.telemetry.queue_metrics import RegistrySnapshots
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.server import ServerOptions, find_running_server
from purveyor.model.errors import PermissionDenied, ServerUnavailable
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.pipeline.job_failures import Failure
from purveyor.pipeline.part_status import PartProgress, PartStatus, State, status_message
from purveyor.queues import status_board
from purveyor.queues.catalogue import internal_queues
from purveyor.queues.client import connect
from purveyor.queues.permissions import API, component_users
from purveyor.queues.status_board import Notice
from tests.support.nats_servers import OwnServer


async def test_an_unreachable_server_is_part_of_the_snapshot() -> None:
    def services() -> Any:
        raise ServerUnavailable("no NATS server answers", fix="is it running?")

    snapshot = await Collector(services).read()
    assert (snapshot.problem, snapshot.fix) == ("no NATS server answers", "is it running?")


def test_what_the_pipeline_posts_is_what_the_console_reads() -> None:
    now = datetime.now(UTC)
    progress = PartProgress(position=12, lag=3, rows=5, rows_per_second=9.5, batch=4, batch_ms=70)
    running = PartStatus(name="dispatch", state=State.RUNNING, since=now, progress=progress)
    broken = PartStatus(name="archive", state=State.WAITING, since=now, error=Failure("full"), restarts=2)
    reported = status_message({"group": "main", "spark_ui": "http://127.0.0.1:4040"}, [running, broken])
    found = pipeline_snapshot(Notice("pipeline.all", reported, now))
    assert (found.label, found.group, found.spark_ui, found.stopped) == ("all", "main", "http://127.0.0.1:4040", False)
    dispatch, archive = found.parts
    assert (dispatch.position, dispatch.lag, dispatch.rows_per_second, dispatch.batch_ms) == (12, 3, 9.5, 70)
    assert (archive.state, archive.error, archive.restarts) == ("waiting", "full", 2)


@pytest.mark.parametrize(
    "rubbish", [{}, {"parts": 3}, {"parts": [1, {}]}, {"pid": "x", "parts": [{"part": [], "lag": "a"}]}]
)
def test_rubbish_on_the_board_breaks_nothing(rubbish: dict[str, Any]) -> None:
    assert pipeline_snapshot(Notice("pipeline.all", rubbish, None)).pid is None


async def test_the_api_user_lists_every_queue_and_reads_its_own(own_server: OwnServer, tmp_path: Path) -> None:
    server = own_server(ServerOptions(sync="2m", users=component_users()), directory=tmp_path / "nats")
    async with connect(server.address, patience_seconds=60) as operator:
        for queue in internal_queues():
            (await operator.ensure(queue)).require_ready()
    status_board.post_notice(server.address, "pipeline.all", {"parts": [{"part": "dispatch", "state": "running"}]})
    address = find_running_server(tmp_path / "nats", API)
    assert address is not None
    async with connect(address, patience_seconds=60) as queues:
        services: Any = SimpleNamespace(queues=queues, registry_snapshots=RegistrySnapshots(queues))
        await Subscriptions(queues).add(Subscription(name="ox", realms_topics=(RealmTopic("udm", "users/user"),)))
        snapshot = await Collector(lambda: services).read()
        assert snapshot.problem is None
        assert {"ldif", "incoming", "prefill", "dead-letters", "ox"} <= set(snapshot.queues)
        assert snapshot.reader("incoming", "archive") is not None
        assert list(snapshot.subscriptions) == ["ox"]
        assert [part.name for part in snapshot.pipelines[0].parts] == ["dispatch"]
        for name in ("ox", "dead-letters"):
            assert not MessageRange(name).needs_operator
            assert (await read_messages(queues, MessageRange(name))).messages == ()
        assert MessageRange("incoming").needs_operator
        with pytest.raises(PermissionDenied):
            await read_messages(queues, MessageRange("incoming"))

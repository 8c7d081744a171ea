"""Alerts about programs beside the API: Prometheus gets no answer, parts fail or are behind, an outbox grows."""

from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
import yaml  # type: ignore[import-untyped]  # it ships no types

from purveyor.app.running_parts import LDAP, running_parts
from purveyor.app.telemetry.pipeline_metrics import PipelineMetrics
from purveyor.app.telemetry.prometheus import render, serve_metrics
from purveyor.app.telemetry.stage_metrics import StageMetrics, watch_stages
from purveyor.jetstream.address import Address
from purveyor.model.retries import RestartPolicy
from purveyor.pipeline.part_status import PartProgress, PartStatus, State
from purveyor.pipeline.part_supervisor import Part, PartSupervisor, QueryRun, RunningPart
from purveyor.queues.client import connect
from purveyor.stages import SqlStore, Stages
from tests.deploy.alerting import fired
from tests.support.command_line import url_of
from tests.support.deployment import DEPLOY
from tests.support.dispatch_harness import DispatchHarness, harness
from tests.support.metrics_page import MetricsPage
from tests.support.serve_ldap import ServeLdap
from tests.support.slapd import READER_DN, READER_PASSWORD, SUFFIX, Slapd, require_slapd
from tests.support.spark_session import spark
from tests.support.stages import Order, sink
from tests.support.waiting import PATIENCE_SECONDS, until, wait_until

__all__ = ["harness", "spark"]  # fixtures
MANY = 10_001
"""More messages than an alert accepts as a backlog."""


class Silent:
    """A reporter that prints nothing."""

    def report_step(self, event: str, text: str) -> None:
        """Ignore an event."""

    def report_parts(self, parts: object) -> None:
        """Ignore the status of the parts."""


def scrape(job: str, url: str) -> str:
    """Return the series that Prometheus adds for a job: whether it got an answer."""
    try:
        is_up = httpx.get(url, timeout=PATIENCE_SECONDS, trust_env=False).is_success
    except httpx.TransportError:
        is_up = False
    return f'up{{job="{job}",instance="{httpx.URL(url).netloc.decode()}"}} {int(is_up)}\n'


def test_a_program_that_does_not_answer() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    jobs = [each["job_name"] for each in config["scrape_configs"]]
    assert len(jobs) == 3
    with serve_metrics(0) as url:
        assert url is not None
        answers = [scrape(job, url) for job in jobs]
    silence = [scrape(job, url) for job in jobs]
    assert not fired(["".join(answers)])
    for job, silent in enumerate(silence):
        assert fired(["".join([*answers[:job], silent, *answers[job + 1 :]])]) == {"PurveyorPartDown"}


def test_a_part_that_fails_again_and_again() -> None:
    metrics, pages, fails = PipelineMetrics(Silent()), [], True

    def start() -> RunningPart:
        if fails:
            raise OSError("no space left on device")
        return Idle()

    def note(status: PartStatus) -> None:
        metrics.report_parts([status])
        if status.state is State.WAITING:
            pages.append(render(metrics.read()).decode())

    policy = RestartPolicy(max_deaths=None, first_pause_seconds=0.01, max_pause_seconds=0.02)
    supervisor = PartSupervisor(Part("archive", start), restart_policy=policy, on_change=note)
    supervisor.start()
    wait_until(lambda: len(pages) >= 6)
    fails = False
    wait_until(lambda: supervisor.status.state is State.RUNNING)
    well = render(metrics.read()).decode()
    supervisor.stop(1)
    assert supervisor.join(PATIENCE_SECONDS)
    assert fired(pages[:6]) == {"PurveyorPipelineRestarts", "PurveyorPipelinePartDown"}
    assert MetricsPage(well).get("pipeline_restarts_total", part="archive")
    assert not fired([well]), "it runs again"


class Idle:
    """A part that has nothing to do."""

    def __init__(self) -> None:
        self._is_alive = True

    def is_alive(self) -> bool:
        return self._is_alive

    def failure(self) -> BaseException | None:
        return None

    def read(self) -> PartProgress:
        return PartProgress(position=1, lag=0)

    def stop(self, patience_seconds: float) -> None:
        self._is_alive = False


def test_a_directory_that_no_process_follows(address: Address, tmp_path: Path, unique: str) -> None:
    """The password of the source is wrong; then the directory accepts it."""
    require_slapd()
    settings = {
        "PURVEYOR_NATS_URL": url_of(address),
        "PURVEYOR_NATS_INBOX": address.inbox,
        "PURVEYOR_LDAP_BASE": SUFFIX,
        "PURVEYOR_LDAP_BIND_DN": READER_DN,
        "PURVEYOR_LDAP_SOURCE": unique,
    }

    def page(password: str, event: str) -> str:
        data = tmp_path / event
        environment = {**settings, "PURVEYOR_LDAP_URI": slapd.uri, "PURVEYOR_LDAP_PASSWORD": password}
        process = ServeLdap(data, "--metrics-port", "0", environment=environment)
        try:
            process.wait_for(event)
            (running,) = running_parts(data, LDAP)
            assert running.metrics_url is not None
            return httpx.get(running.metrics_url, timeout=PATIENCE_SECONDS, trust_env=False).text
        finally:
            process.close()

    with Slapd(tmp_path / "slapd") as slapd:
        slapd.add_base()
        assert fired([page("wrong", "problem")]) == {"PurveyorSourceDown"}
        assert not fired([page(READER_PASSWORD, "following")])


@pytest.mark.spark
def test_a_part_that_is_far_behind(harness: DispatchHarness) -> None:
    metrics = PipelineMetrics(Silent())
    harness.events(1, 3 * MANY)
    query = harness.start(max_offsets=1000)
    run = QueryRun(query)

    def page() -> str:
        progress = run.read()
        if progress is not None:
            status = PartStatus(name="dispatch", state=State.RUNNING, since=datetime.now(UTC), progress=progress)
            metrics.report_parts([status])
        return render(metrics.read()).decode()

    def lag(text: str) -> float:
        return MetricsPage(text).get("pipeline_lag_messages", part="dispatch") or 0

    behind = wait_until(lambda: text if lag(text := page()) >= MANY else None)
    assert fired([behind]) == {"PurveyorPipelineBehind"}
    harness.wait()
    wait_until(lambda: MetricsPage(page()).get("pipeline_lag_messages", part="dispatch") == 0)
    query.stop()
    assert not fired([page()])


async def test_an_outbox_that_no_relay_sends(address: Address, tmp_path: Path, unique: str) -> None:
    def page(metrics: StageMetrics) -> str:
        return render(metrics.read()).decode()

    def unsent(metrics: StageMetrics) -> float | None:
        return MetricsPage(page(metrics)).get("outbox_messages", app="shop", state="unsent")

    def application(*, create_tables: bool = False) -> Stages:
        url = f"sqlite:///{tmp_path / 'shop.db'}"
        return Stages(queues, store=SqlStore(url, create_tables=create_tables), app="shop")

    async with connect(address) as queues:
        async with application(create_tables=True):
            pass  # creates the tables, and ends
        writes = application()
        to = await sink(queues, writes, unique)
        async with writes.store.transaction() as transaction:
            for number in range(MANY):
                await writes.send(to, Order(number), db=transaction.connection)
        async with watch_stages(writes, every_seconds=0.1) as metrics:
            await until(lambda: unsent(metrics) == MANY)
            assert fired([page(metrics)]) == {"PurveyorOutboxGrows"}
            async with application():
                await until(lambda: unsent(metrics) == 0)
            assert not fired([page(metrics)])
        await writes.store.close()

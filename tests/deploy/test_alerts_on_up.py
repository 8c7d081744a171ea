"""The alerts, `doctor` and `/readyz` on a real `purveyor up`: calm while it is idle or busy, and each fault is seen."""

import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy import alerting
from tests.support.command_line import invoke
from tests.support.metrics_page import MetricsPage
from tests.support.processes import descendants, suspended
from tests.support.push import Site
from tests.support.up_program import Up
from tests.support.waiting import PATIENCE_SECONDS, wait_until

EXAMPLES = Path(__file__).parents[2] / "examples"
AGES = frozenset({"purveyor_push_failing_seconds"})


def fired(pages: list[str]) -> set[str]:
    return alerting.fired(pages, growing=AGES)


class System:
    """A running `up` with one subscription that is pulled and one that is pushed."""

    def __init__(self, data: Path, up: Up, site: Site) -> None:
        self.data, self.up, self.site = data, up, site
        ready = up.wait_for("ready", "API")
        up.wait_for("up", "everything")
        passwords = tomllib.loads(Path(ready["passwords"]).read_text())
        self.url = ready["url"]
        self.client = httpx.Client(base_url=self.url, timeout=60)
        self._admin = ("admin", passwords["admin_password"])
        self._events = ("events", passwords["events_password"])
        self._published = 0
        topics = [{"realm": "udm", "topic": "users/user"}]
        push = {"endpoint": site.url("/configured?for=hook")}
        for wanted in (
            {"name": "ox", "realms_topics": topics, "password": "oxpw"},
            {"name": "hook", "realms_topics": topics, "password": "hookpw", "delivery": "push", "push": push},
        ):
            added = self.client.post("/v1/subscriptions", json=wanted, auth=self._admin)
            assert added.status_code == 201, added.text

    def publish(self, count: int) -> None:
        for _ in range(count):
            self._published += 1
            body = {"old": {}, "new": {"uuid": f"u-{self._published}"}}
            event = {
                "publisher_name": "t",
                "ts": "2026-01-01T00:00:00Z",
                "realm": "udm",
                "topic": "users/user",
                "body": body,
            }
            assert self.client.post("/v1/messages", json=event, auth=self._events).status_code == 202

    def consume(self) -> None:
        """Acknowledge every message that waits for `ox`."""
        while True:
            got = self.client.get("/v1/subscriptions/ox/messages/next?timeout=1", auth=("ox", "oxpw")).json()
            if not got:
                return
            url = f"/v1/subscriptions/ox/messages/{got['sequence_number']}/status"
            assert self.client.patch(url, json={"status": "ok"}, auth=("ox", "oxpw")).status_code == 200

    def page(self) -> str:
        answer = self.client.get("/metrics")
        assert answer.status_code == 200
        return answer.text

    def metrics(self) -> MetricsPage:
        return MetricsPage(self.page())

    def is_done(self) -> bool:
        """Consume what waits; return whether every message was delivered."""
        self.consume()
        found = self.metrics()
        return not any(found.get("queue_messages", queue=queue, kind="subscription") for queue in ("hook", "ox"))

    def doctor(self) -> dict[str, str]:
        """Return the findings that are wrong, with their fixes."""
        outcome = invoke("--data-dir", str(self.data), "doctor", "--json")
        wrong = {each["text"]: each["fix"] for each in outcome.json["findings"] if each["weight"] == "wrong"}
        assert outcome.code == (1 if wrong else 0), outcome
        return {text: fix for text, fix in wrong.items() if "GiB are free" not in text}

    def finds(self, words: str) -> str:
        """Wait until `doctor` says this, and return its advice."""

        def advice() -> str | None:
            return next((fix for text, fix in self.doctor().items() if words in text), None)

        found: str = wait_until(advice, what=words)
        return found

    def degraded(self) -> list[str]:
        answer = self.client.get("/readyz")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        assert found["status"] == ("degraded" if found["degraded"] else "ready")
        return [each["text"] for each in found["degraded"]]

    def shows(self, name: str, value: float, **labels: str) -> Callable[[], bool]:
        return lambda: self.metrics().get(name, **labels) == value


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    site = Site()
    up = Up(tmp_path / "data", "--master", "local[2]", environment={"PURVEYOR_PUSH_ALLOW": "127.0.0.0/8"})
    try:
        running = System(tmp_path / "data", up, site)
        yield running
        running.client.close()
    finally:
        up.close()
        site.stop()


@pytest.mark.spark
@pytest.mark.timeout(1500)
@pytest.mark.first
def test_a_healthy_system_is_calm_and_every_fault_is_seen(system: System) -> None:
    _is_calm_when_idle(system)
    _is_calm_when_busy(system)
    _a_frozen_jvm_is_seen(system)
    _a_frozen_process_is_seen(system)
    _an_endpoint_that_answers_500_is_seen(system)
    _is_calm_for_hours_after_the_work(system)
    assert system.up.stop() == 0
    assert "Traceback" not in (system.data / "logs" / "pipeline.out").read_text()
    assert all("at" in each for each in system.up.events)


def _is_calm_when_idle(system: System) -> None:
    page = system.page()
    assert not fired([page])
    found = MetricsPage(page)
    assert [found.get("process_up", process=name) for name in ("pipeline", "push")] == [1, 1]
    for part in ("transform", "dispatch", "archive", "prefill"):
        assert found.get("pipeline_part_up", part=part, process="pipeline") == 1
    assert not system.doctor()
    assert not system.degraded()


def _is_calm_when_busy(system: System) -> None:
    pages = []
    for _ in range(5):
        system.publish(40)
        pages.append(system.page())
        system.consume()
    assert not fired(pages)
    assert not system.degraded()
    sent = {"subscription": "hook", "outcome": "acknowledge", "process": "push"}
    wait_until(system.shows("push_attempts_total", 200, **sent))  # empty queues alone may be waiting for dispatch
    wait_until(system.is_done)
    assert not fired([system.page()])
    assert not system.doctor()


def _is_calm_for_hours_after_the_work(system: System) -> None:
    """The receipts of the transform keep the newest message in `incoming`; all readers have processed it."""
    ages = AGES | {"purveyor_queue_oldest_age_seconds"}
    written = {"queue": "incoming", "kind": "internal"}
    before = system.metrics().get("queue_written_total", **written) or 0
    invoke("--data-dir", str(system.data), "import", str(EXAMPLES / "people.ldif")).ok()
    wait_until(lambda: (system.metrics().get("queue_written_total", **written) or 0) > before)
    # For two minutes the archive keeps what it has processed, for a backup.
    no_age = system.shows("queue_oldest_age_seconds", 0, queue="incoming", kind="internal")
    wait_until(no_age, seconds=5 * PATIENCE_SECONDS)
    wait_until(system.is_done)  # not before: empty queues alone may be waiting for dispatch
    assert not alerting.fired([system.page()], growing=ages, minutes=120)
    assert (system.metrics().get("queue_messages", queue="incoming", kind="internal") or 0) > 0
    assert not system.doctor()
    assert not system.degraded()


def _a_frozen_jvm_is_seen(system: System) -> None:
    """The processes exist, and nothing moves."""
    (jvm,) = descendants(system.up.process.pid, "org.apache.spark.deploy.SparkSubmit")
    with suspended(jvm):
        system.publish(5)
        assert f"kill -CONT {jvm}" in system.finds("dispatch has not answered")
        for part in ("transform", "dispatch", "archive", "prefill"):
            wait_until(system.shows("pipeline_part_up", 0, part=part, process="pipeline"))
        assert (system.metrics().get("queue_oldest_age_seconds", queue="incoming", kind="internal") or 0) > 0
        assert fired([system.page()]) == {"PurveyorPipelinePartDown"}
        assert any("dispatch has not answered" in text for text in wait_until(system.degraded))
        assert "does not answer" in system.up.wait_for("problem", "pipeline")["detail"]
    system.up.wait_for("recovered", "pipeline")
    system.consume()
    wait_until(lambda: not system.doctor())


def _a_frozen_process_is_seen(system: System) -> None:
    for process, about in (("pipeline", "the pipeline"), ("push", "the push worker")):
        pid = system.up.pid_of(f"serve {process}")
        with suspended(pid):
            wait_until(system.shows("process_up", 0, process=process))
            assert fired([system.page()]) == {"PurveyorProcessDown"}
            assert f"kill -CONT {pid}" in system.finds(f"{about} (process {pid}")
        wait_until(system.shows("process_up", 1, process=process))
    api = system.up.pid_of("serve api")  # it listens at a port that no setting names
    with suspended(api):
        assert f"kill -CONT {api}" in system.finds(f"the API (process {api}) does not answer at {system.url}")
    wait_until(lambda: not system.doctor())


def _an_endpoint_that_answers_500_is_seen(system: System) -> None:
    system.site.set_status(500)
    system.publish(20)
    wait_until(lambda: (system.metrics().get("push_failing_seconds", subscription="hook") or 0) > 0)
    assert "why it answers 500" in system.finds("hook has not been pushed")
    assert any("hook has not been pushed" in text for text in wait_until(system.degraded))
    assert fired([system.page()]) == {"PurveyorPushFailing"}
    retries = {"subscription": "hook", "outcome": "retry", "process": "push"}
    pages = [system.page()]
    before = MetricsPage(pages[0]).get("push_attempts_total", **retries) or 0
    wait_until(lambda: (system.metrics().get("push_attempts_total", **retries) or 0) > before)
    pages.append(system.page())
    assert fired(pages) == {"PurveyorPushFailing", "PurveyorPushFails"}
    system.site.set_status(204)
    system.consume()
    wait_until(system.is_done, seconds=2 * PATIENCE_SECONDS)
    wait_until(lambda: not system.doctor() and not system.degraded())
    assert "recovered" in {each["event"] for each in system.up.events if each["part"] == "push"}

"""`purveyor serve api --workers`: several processes on one port, of which any may be killed."""

import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from purveyor.app.up.api_workers import ApiWorkers
from purveyor.jetstream.address import Address
from purveyor.model.errors import ServerFailed
from tests.support.api_workers import Workers
from tests.support.command_line import Cli
from tests.support.killing import alive
from tests.support.running_api import count, event, read_incoming_rows
from tests.support.waiting import PATIENCE_SECONDS, until, wait_until

CLIENTS = 8
KILLS = 2

Start = Callable[..., Workers]


@pytest.fixture
def start(tmp_path: Path, address: Address) -> Iterator[Start]:
    started: list[Workers] = []

    def begin(*arguments: str, **environment: str) -> Workers:
        started.append(Workers(tmp_path / "data", address, *arguments, **environment))
        return started[-1]

    yield begin
    for each in started:
        each.close()


def requests(url: str, route: str) -> dict[str, float]:
    """Return the requests that each process has counted, as any process shows them."""
    page = httpx.get(f"{url}/metrics").raise_for_status().text
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    found = [each for each in samples if each.name == "purveyor_http_requests_total"]
    assert all("process" in each.labels for each in found)
    return {each.labels["process"]: each.value for each in found if each.labels["route"] == route}


def test_workers_share_the_port_and_each_page_of_metrics_counts_the_requests_of_all(start: Start) -> None:
    api = start(PURVEYOR_API_WORKERS="3")
    assert [*sorted(api.parts())] == [1, 2, 3]
    assert {each.url for each in api.parts().values()} == {api.url}

    def ask() -> bool:  # each request on a connection of its own
        assert httpx.get(f"{api.url}/v1/subscriptions", auth=("admin", "admin-secret")).status_code == 200
        return len(requests(api.url, "/v1/subscriptions")) == 3

    asked = 0

    def asked_all() -> bool:
        nonlocal asked
        asked += 1
        return ask()

    wait_until(asked_all, what="a request to each worker")
    # A page is at most a second old.
    for _ in range(6):
        wait_until(lambda: sum(requests(api.url, "/v1/subscriptions").values()) == asked, what="the sum of all")
    assert {*requests(api.url, "/v1/subscriptions")} == {"api-1", "api-2", "api-3"}


class Publisher(threading.Thread):
    """Publishes events one after the other, and repeats those whose connection broke."""

    def __init__(self, url: str, name: str, stop: threading.Event) -> None:
        super().__init__()
        self._url = url
        self._name = name
        self._halt = stop
        self.accepted: list[str] = []
        self.broken = 0
        self.refused: list[str] = []

    def run(self) -> None:
        number = 0
        with httpx.Client(base_url=self._url, auth=("events", "events-secret"), timeout=PATIENCE_SECONDS) as client:
            while not self._halt.is_set():
                identity = f"{self._name}-{number}"
                try:
                    answer = client.post("/v1/messages", json=event(number, id=identity))
                except httpx.TransportError:
                    self.broken += 1
                    continue
                if answer.status_code != 202:
                    self.refused.append(answer.text)
                    return
                self.accepted.append(identity)
                number += 1


def test_a_killed_worker_costs_its_connections_only_and_is_started_again(
    start: Start, address: Address, unique: str
) -> None:
    api = start("--workers", "2")
    before, stop = count(address), threading.Event()
    publishers = [Publisher(api.url, f"{unique}-{number}", stop) for number in range(CLIENTS)]
    for each in publishers:
        each.start()
    try:
        for kill in range(1, KILLS + 1):
            wait_until(lambda done=kill: all(len(each.accepted) > 5 * done for each in publishers))  # type: ignore[misc]
            victim = api.parts()[kill]
            os.kill(victim.pid, signal.SIGKILL)
            died = api.wait_for("died", kill)
            assert f"worker {kill}: killed by SIGKILL; starting again in" in died["detail"]
            api.wait_for("recovered", kill)
            assert api.parts()[kill].pid != victim.pid
        reached = {each: len(each.accepted) for each in publishers}
        wait_until(lambda: all(len(each.accepted) > reached[each] for each in publishers))
    finally:
        stop.set()
        for each in publishers:
            each.join(PATIENCE_SECONDS)
    assert [each.refused for each in publishers] == [[]] * CLIENTS
    assert all(each.broken <= KILLS for each in publishers)
    accepted = [identity for each in publishers for identity in each.accepted]
    rows = [dict(row["headers"]) for row in read_incoming_rows(address, before + 1, count(address))]
    stored = [row["Purveyor-Id"][0] for row in rows if row.get("Purveyor-Id", [""])[0].startswith(unique)]
    assert len(stored) == len({*stored})
    assert {*accepted} <= {*stored}
    up = httpx.get(f"{api.url}/metrics").text
    assert re.findall(r'purveyor_process_up\{process="(api-\d)"\} 1', up) == ["api-1", "api-2"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_stops_all_workers_and_answers_long_polls(start: Start, how: signal.Signals, unique: str) -> None:
    api = start("--workers", "2")
    body = {"name": unique, "realms_topics": [{"realm": unique, "topic": "x"}], "password": "secret"}
    assert httpx.post(f"{api.url}/v1/subscriptions", json=body, auth=("admin", "admin-secret")).status_code == 201
    answers: list[int] = []

    def poll() -> None:
        path = f"{api.url}/v1/subscriptions/{unique}/messages/next?timeout=600"
        answers.append(httpx.get(path, auth=(unique, "secret"), timeout=PATIENCE_SECONDS).status_code)

    polls = [threading.Thread(target=poll) for _ in range(4)]
    for each in polls:
        each.start()
    pids = [each.pid for each in api.parts().values()]
    # A login is counted when its request has an answer; the polls have none, so wait for their connections.
    port = int(api.url.rpartition(":")[2])
    wait_until(lambda: sum(connections(pid, port) for pid in pids) >= len(polls), what="four long polls")
    err = api.end(how)
    for each in polls:
        each.join(PATIENCE_SECONDS)
    assert (api.process.returncode, err, answers) == (0, "", [200] * 4)
    assert not any(map(alive, pids))
    assert api.parts() == {}
    assert [each["event"] for each in api.events] == ["ready", "stopped"]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{api.url}/healthz")


def connections(pid: int, port: int) -> int:
    """Return how many established connections to a port a process has."""
    links = [str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()]
    sockets = {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:")}
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return sum(row[9] in sockets and int(row[1].partition(":")[2], 16) == port and row[3] == "01" for row in rows)


def test_workers_do_not_outlive_a_parent_that_is_killed(start: Start) -> None:
    api = start("--workers", "2")
    pids = [each.pid for each in api.parts().values()]
    assert len(pids) == 2
    api.end(signal.SIGKILL)
    wait_until(lambda: not any(map(alive, pids)))


def test_the_number_of_workers_has_limits(cli: Cli) -> None:
    cli("serve", "api", "--workers", "0").refused("--workers")
    cli("serve", "api", "--workers", "65").refused("--workers")


def program(text: str) -> tuple[str, ...]:
    return (sys.executable, "-u", "-c", f"import json, sys, time\nsay = lambda **e: print(json.dumps(e))\n{text}")


async def run(events: list[tuple[str, str]], *programs: str, until_event: str) -> None:
    with open(os.devnull) as nothing:  # noqa: PTH123, ASYNC230 - any descriptor will do

        def on_event(name: str, detail: str, _fields: Mapping[str, Any]) -> None:
            events.append((name, detail))
            if name == until_event:
                workers.stop()

        workers = ApiWorkers([program(each) for each in programs], nothing.fileno(), on_event)
        await workers.run()


async def test_workers_are_reported_as_one_api() -> None:
    events: list[tuple[str, str]] = []
    away = 'say(event="waiting", detail="no server"); say(event="connected", detail="it answers")\n'
    ready = 'say(event="ready", detail="API at x", url="x"); time.sleep(600)'
    await run(events, away + ready, ready, until_event="ready")
    assert events == [("waiting", "no server"), ("connected", "it answers"), ("ready", "API at x")]


async def test_a_worker_that_cannot_start_stops_the_others_with_its_reason(tmp_path: Path) -> None:
    events: list[tuple[str, str]] = []
    pid_file = tmp_path / "pid"
    stays = f'import os; open({str(pid_file)!r}, "w").write(str(os.getpid())); say(event="ready"); time.sleep(600)'
    fails = (
        f"import os\nwhile not os.path.exists({str(pid_file)!r}): time.sleep(0.01)\n"
        'sys.stderr.write("error: the certificate is gone\\nfix: bring it back\\n"); sys.exit(1)'
    )
    with pytest.raises(ServerFailed, match="worker 2 did not start: the certificate is gone") as refused:
        await run(events, stays, fails, until_event="never")
    assert refused.value.fix == "bring it back"
    await until(lambda: not alive(int(pid_file.read_text())))

"""`purveyor up`: all parts on one machine, with parts that die, until it is stopped."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from purveyor.app.cli.up import EventPrinter
from purveyor.app.up.supervisor import Part, PartEvent, Supervisor, UpOptions, make_parts
from purveyor.jetstream.server import find_running_server
from purveyor.model.errors import ServerFailed
from purveyor.model.retries import RestartPolicy
from tests.support.command_line import invoke
from tests.support.killing import alive
from tests.support.processes import descendants
from tests.support.up_program import Up
from tests.support.waiting import wait_until

START = Callable[..., Up]
SWIFT = RestartPolicy(max_deaths=None, first_pause_seconds=0.01, max_pause_seconds=0.05)
EVENT = {"publisher_name": "t", "ts": "2026-01-01T00:00:00Z", "realm": "udm", "topic": "users/user"}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[START]:
    started: list[Up] = []

    def begin(*arguments: str) -> Up:
        started.append(Up(tmp_path / "data", "--master", "local[2]", *arguments))
        return started[-1]

    yield begin
    for each in started:
        each.close()


def test_the_nats_server_is_a_part_only_where_none_is_set() -> None:
    assert [part.name for part in make_parts(UpOptions())] == ["NATS", "pipeline", "push", "API"]
    assert [part.name for part in make_parts(UpOptions(with_nats=False))] == ["pipeline", "push", "API"]
    assert make_parts(UpOptions(options=("--data-dir", "d")))[0].command[-5:] == (
        "--data-dir",
        "d",
        "serve",
        "nats",
        "--json",
    )


def test_directories_are_followed_only_where_the_settings_name_one() -> None:
    wanted = UpOptions(with_ldap=True, ldap=("--metrics-port", "0"))
    parts = {part.name: part.command for part in make_parts(wanted)}
    assert [*parts] == ["NATS", "pipeline", "LDAP", "push", "API"]
    assert parts["LDAP"][-5:] == ("serve", "ldap", "--json", "--metrics-port", "0")


def test_a_standby_is_a_second_process_of_the_pipeline() -> None:
    parts = {part.name: part for part in make_parts(UpOptions(with_standby=True, pipeline=("--master", "local[2]")))}
    assert [*parts] == ["NATS", "pipeline", "standby", "push", "API"]
    assert parts["standby"].command == parts["pipeline"].command
    assert [name for name, part in parts.items() if part.has_partner] == ["pipeline", "standby"]
    assert [name for name, part in parts.items() if part.starts_last] == ["standby"]


def program(text: str, name: str = "part", *, must_be_ready: bool = False) -> Part:
    return Part(name, (sys.executable, "-u", "-c", f"import json, os, sys, time\n{text}"), 60, must_be_ready)


READY = 'print(json.dumps({"event": "ready", "detail": str(os.getpid())}))\n'
STAYS = READY + "time.sleep(600)"


async def test_parts_are_started_in_order_and_stopped_in_the_opposite_one() -> None:
    events: list[PartEvent] = []
    farewell = "import signal\nsignal.signal(15, lambda *_: (print(json.dumps({'event': 'stopped'})), sys.exit(0)))\n"
    all_parts = [program(farewell + STAYS, name, must_be_ready=True) for name in ("a", "b", "c")]
    async with Supervisor(all_parts, events.append).running():
        pass
    assert [(each.event, each.part) for each in events] == [
        *(("ready", name) for name in "abc"),
        *(("stopped", name) for name in "cba"),
    ]


STANDS_BY = READY.replace('"ready"', '"standby"')


@pytest.mark.parametrize(("first", "second"), [(READY, STANDS_BY), (STANDS_BY, READY)])
async def test_a_process_that_stands_by_starts_last_and_stops_first(first: str, second: str) -> None:
    """Which of the two stands by changes over time; the one that works stops in its turn."""
    events: list[PartEvent] = []
    farewell = "import signal\nsignal.signal(15, lambda *_: (print(json.dumps({'event': 'stopped'})), sys.exit(0)))\n"

    def part(name: str, says: str) -> Part:
        is_pair, is_second = name != "API", name == "standby"
        begun = program(farewell + says + "time.sleep(600)", name)
        return replace(begun, has_partner=is_pair, starts_last=is_second)

    parts = [part("pipeline", first), part("standby", second), part("API", READY)]
    both = asyncio.Event()

    def on_event(event: PartEvent) -> None:
        events.append(event)
        if event.part == "standby":
            both.set()

    async with Supervisor(parts, on_event).running():
        await both.wait()
    started = [each.part for each in events if each.event in ("ready", "standby")]
    assert started[-1] == "standby"
    stands_by, works = ("standby", "pipeline") if second == STANDS_BY else ("pipeline", "standby")
    assert [each.part for each in events if each.event == "stopped"] == [stands_by, "API", works]


async def test_a_part_that_dies_is_reported_and_restarted(tmp_path: Path) -> None:
    events: list[PartEvent] = []
    mark = tmp_path / "mark"
    dies = f"import pathlib\nmark = pathlib.Path({str(mark)!r})\n" + (
        READY + "if not mark.exists():\n  mark.touch(); print('error: out of luck', file=sys.stderr); sys.exit(1)\n"
        "print(json.dumps({'event': 'again'})); time.sleep(600)"
    )

    def on_event(event: PartEvent) -> None:
        events.append(event)
        if event.event == "again":
            supervisor.stop()

    supervisor = Supervisor([program(dies)], on_event, restart_policy=SWIFT)
    await supervisor.run()
    assert "out of luck; starting again in" in next(each.detail for each in events if each.event == "died")
    assert [each.event for each in events].count("ready") == 2


async def test_a_part_of_the_pipeline_that_runs_without_an_error_again_is_reported_once() -> None:
    def progress(state: str, error: str | None = None) -> str:
        return f"print(json.dumps({ {'event': 'progress', 'part': 'dispatch', 'state': state, 'error': error}!r}))\n"

    lines = [
        progress("running"),
        progress("waiting", "no server"),
        progress("starting", "no server"),
        progress("running", "no server"),
        progress("starting"),  # the process died: the new one knows nothing of the error
        progress("running"),
        progress("running"),
    ]
    events: list[PartEvent] = []

    def on_event(event: PartEvent) -> None:
        events.append(event)
        if event.event == "end":
            supervisor.stop()

    supervisor = Supervisor([program(READY + "".join(lines) + 'print(\'{"event": "end"}\')\n' + STAYS)], on_event)
    await supervisor.run()
    reported = [(each.event, each.detail) for each in events if each.event in ("problem", "recovered")]
    assert reported == [
        ("problem", "dispatch waiting: no server"),
        ("recovered", "dispatch runs without an error again"),
    ]


def test_every_line_says_when(capsys: pytest.CaptureFixture[str]) -> None:
    began = datetime.now(UTC).replace(microsecond=0)
    EventPrinter(json=False).print(PartEvent("push", "ready", "push delivers"))
    EventPrinter(json=True).print(PartEvent("push", "ready", "push delivers"))
    text, line = capsys.readouterr().out.splitlines()
    at, _, rest = text.partition(" ")
    assert rest == "ready: push delivers"
    assert began <= datetime.fromisoformat(at) <= datetime.now(UTC)
    received = json.loads(line)
    assert began <= datetime.fromisoformat(received.pop("at")) <= datetime.now(UTC)
    assert received == {"event": "ready", "detail": "push delivers", "part": "push"}


async def test_a_part_that_cannot_start_ends_all_with_its_error() -> None:
    wrong = program("print('error: no such thing\\nfix: buy one', file=sys.stderr); sys.exit(1)", "wrong")
    events: list[PartEvent] = []
    supervisor = Supervisor([program(STAYS, "fine", must_be_ready=True), wrong], events.append, restart_policy=SWIFT)
    with pytest.raises(ServerFailed, match="wrong did not start: no such thing") as caught:
        await supervisor.run()
    assert caught.value.fix == "buy one"
    assert not alive(int(next(each.detail for each in events if each.part == "fine")))


async def test_a_standby_that_cannot_start_is_started_again_and_ends_no_other_part() -> None:
    events: list[PartEvent] = []

    def on_event(event: PartEvent) -> None:
        events.append(event)
        if [each.event for each in events].count("died") == 2:
            supervisor.stop()

    standby = replace(program('sys.exit("error: no memory")', "standby"), starts_last=True)
    supervisor = Supervisor([program(STAYS, "working"), standby], on_event, restart_policy=SWIFT)
    await supervisor.run()
    died = [each for each in events if each.event == "died"]
    assert [(each.part, each.detail.partition(";")[0]) for each in died] == [("standby", "no memory")] * 2


async def test_unknown_output_is_passed_on_and_a_part_that_ignores_signals_is_killed() -> None:
    events: list[PartEvent] = []
    stub = "import signal\nsignal.signal(15, signal.SIG_IGN)\nprint('no JSON'); print('x' * 3_000_000); print('[1]')\n"
    part = Part("silent", program(stub + STAYS).command, grace_seconds=0.2)
    async with Supervisor([part], events.append).running():
        pass
    assert next(each.detail for each in events if each.event == "output") == "no JSON"
    assert events[-1].event == "killed"
    assert not alive(int(next(each.detail for each in events if each.event == "ready")))


async def test_a_second_stop_kills_what_does_not_end() -> None:
    events: list[PartEvent] = []
    part = Part("silent", program("import signal\nsignal.signal(15, signal.SIG_IGN)\n" + STAYS).command, 600)

    def on_event(event: PartEvent) -> None:
        events.append(event)
        if event.event == "up":
            supervisor.stop()
            supervisor.stop()

    supervisor = Supervisor([part], on_event)
    await supervisor.run()
    assert not alive(int(events[0].detail))


async def test_the_supervisor_stops_when_its_output_is_closed() -> None:
    pids: list[int] = []

    def on_event(event: PartEvent) -> None:
        pids.append(int(event.detail))
        raise BrokenPipeError

    await Supervisor([program(STAYS)], on_event).run()
    assert not alive(pids[0])


def test_invalid_settings_are_refused_before_the_start(tmp_path: Path) -> None:
    data = ("--data-dir", str(tmp_path / "data"))
    invoke(*data, "up", "--host", "0.0.0.0").refused("not every password", "PURVEYOR_ADMIN_PASSWORD")
    invoke(*data, "up", "--port", "99999").refused("--port")
    (tmp_path / "file").touch()
    invoke("--data-dir", str(tmp_path / "file"), "up").refused(str(tmp_path / "file"))
    assert not (tmp_path / "data").exists()


def test_a_port_in_use_is_refused_before_any_part_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        outcome = invoke("--data-dir", str(tmp_path / "data"), "up", "--port", port)
        outcome.refused(f"cannot listen at 127.0.0.1 port {port}", "--port or PURVEYOR_API_PORT")
    assert outcome.out == ""
    assert not (tmp_path / "data" / "nats").exists()


def modes_below(directory: Path) -> dict[Path, int]:
    """Return the modes of a directory and of all files below it; skip files that disappear meanwhile."""
    found: dict[Path, int] = {}
    for path in (directory, *directory.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            if not path.is_symlink():
                found[path] = path.lstat().st_mode
    return found


@pytest.mark.spark
@pytest.mark.timeout(900)
@pytest.mark.first
def test_everything_comes_up_survives_kill_9_and_stops_in_order(start: START, tmp_path: Path) -> None:
    data = tmp_path / "data"
    up = start()
    api = up.wait_for("ready", "API")
    assert up.wait_for("ready", "NATS")["address"].startswith("nats://127.0.0.1:")
    file = Path(api["passwords"])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    passwords = tomllib.loads(file.read_text())

    invoke("--data-dir", str(data), "up").refused(f"process {up.process.pid}", "--data-dir")

    up.wait_for("up", "everything")
    secrets = [*passwords.values(), *(path.read_text().strip() for path in (data / "nats").glob("password*"))]
    below = descendants(up.process.pid, "")
    shown = "".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in below if alive(pid)) + str(up.events)
    assert len(secrets) == 8
    assert not any(secret in shown for secret in secrets)

    with httpx.Client(base_url=api["url"], timeout=60) as client:
        admin, events = ("admin", passwords["admin_password"]), ("events", passwords["events_password"])
        wanted = {"name": "ox", "realms_topics": [{"realm": "udm", "topic": "users/user"}], "password": "oxpw"}
        assert client.post("/v1/subscriptions", json=wanted, auth=admin).status_code == 201

        def publish(number: int) -> None:
            event = {**EVENT, "body": {"old": {}, "new": {"uuid": f"u-{number}"}}}
            sent = client.post("/v1/messages", json=event, auth=events, headers={"Idempotency-Key": str(number)})
            assert sent.status_code == 202

        def receive() -> str:
            def next_message() -> Any:
                got = client.get("/v1/subscriptions/ox/messages/next?timeout=20", auth=("ox", "oxpw"))
                return got.json() if got.status_code == 200 else None

            found = wait_until(next_message)
            done = f"/v1/subscriptions/ox/messages/{found['sequence_number']}/status"
            assert client.patch(done, json={"status": "ok"}, auth=("ox", "oxpw")).status_code == 200
            return str(found["body"]["new"]["uuid"])

        publish(1)
        assert receive() == "u-1"
        (nats,) = [pid for pid in descendants(up.process.pid, "serve nats") if os.getsid(pid) == pid]
        os.kill(nats, signal.SIGKILL)
        assert "killed by SIGKILL" in up.wait_for("died", "NATS")["detail"]
        up.wait_for("ready", "NATS", times=2)
        wait_until(lambda: client.get("/readyz").status_code == 200)
        publish(2)
        assert receive() == "u-2"
        wait_until(lambda: list((data / "archive" / "events").glob("*/*.parquet")))

    made = modes_below(data)
    for part in ("archive", "checkpoints", "logs", "nats/jetstream", "spark"):
        assert any(path.is_relative_to(data / part) for path in made), part
    assert [path for path, mode in made.items() if mode & (stat.S_IRWXG | stat.S_IRWXO)] == []

    assert up.stop(signal.SIGINT) == 0
    stopped = [part for part in up.parts_with("stopped") if part != "everything"]
    assert stopped == ["API", "push", "pipeline", "NATS"]
    assert find_running_server(data / "nats") is None
    wait_until(lambda: not [pid for pid in below if alive(pid)])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
def test_no_part_outlives_a_supervisor_that_is_killed() -> None:
    code = (
        "import asyncio, sys\nfrom purveyor.app.up.supervisor import Part\n"
        "from purveyor.app.up.supervisor import Supervisor\n"
        "part = Part('part', tuple(sys.argv[1:]), 5)\n"
        "asyncio.run(Supervisor([part], lambda events: print(events.detail, flush=True)).run())"
    )
    with subprocess.Popen([sys.executable, "-c", code, *program(STAYS).command], stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        part = int(supervisor.stdout.readline())
        assert alive(part)
        supervisor.kill()
        wait_until(lambda: not alive(part))

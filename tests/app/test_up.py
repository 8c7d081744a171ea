"""`purveyor up`: everything on one machine, whichever part is killed, until it is told to stop."""

import contextlib
import os
import signal
import stat
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from purveyor.app.up.exit_rules import Again, Backoff, GiveUp, Life, Past, after
from purveyor.app.up.managed_process import News
from purveyor.app.up.processes import Part, Wanted, parts
from purveyor.app.up.supervisor import Supervisor
from purveyor.jetstream.server import running
from purveyor.model.errors import ServerFailed
from tests.app.conftest import invoke
from tests.app.up_program import Up
from tests.killing import alive
from tests.spark.processes import descendants
from tests.waiting import wait_until

START = Callable[..., Up]
SWIFT = Backoff(first_seconds=0.01, longest_seconds=0.05)
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


def test_pauses_grow_and_begin_anew_after_a_calm_life() -> None:
    backoff = Backoff(first_seconds=1, longest_seconds=5, calm_seconds=60)
    past, pauses = Past(), []
    for seconds in (1.0, 1.0, 1.0, 1.0, 90.0, 1.0):
        past, decision = after(past, Life(-9, seconds, came_up=True), backoff)
        assert isinstance(decision, Again)
        pauses.append(decision.pause_seconds)
    assert pauses == [1, 2, 4, 5, 1, 2]
    for _ in range(2000):
        past, decision = after(past, Life(1, 0.1, came_up=False), backoff)
    assert decision == Again(5)


def test_what_ends_by_itself_before_it_ever_worked_is_given_up() -> None:
    assert after(Past(), Life(1, 1, came_up=False), SWIFT)[1] == GiveUp()
    assert isinstance(after(Past(), Life(-9, 1, came_up=False), SWIFT)[1], Again)
    assert isinstance(after(Past(came_up=True), Life(1, 1, came_up=False), SWIFT)[1], Again)


def test_the_nats_server_is_a_part_only_where_none_is_set() -> None:
    assert [part.name for part in parts(Wanted())] == ["NATS", "pipeline", "push", "API"]
    assert [part.name for part in parts(Wanted(with_nats=False))] == ["pipeline", "push", "API"]
    assert parts(Wanted(options=("--data-dir", "d")))[0].command[-5:] == ("--data-dir", "d", "serve", "nats", "--json")


def program(text: str, name: str = "part", *, needed: bool = False) -> Part:
    return Part(name, (sys.executable, "-u", "-c", f"import json, os, sys, time\n{text}"), 60, needed)


READY = 'print(json.dumps({"event": "ready", "detail": str(os.getpid())}))\n'
STAYS = READY + "time.sleep(600)"


async def test_parts_are_started_in_order_and_stopped_in_the_opposite_one() -> None:
    news: list[News] = []
    farewell = "import signal\nsignal.signal(15, lambda *_: (print(json.dumps({'event': 'stopped'})), sys.exit(0)))\n"
    all_parts = [program(farewell + STAYS, name, needed=True) for name in ("a", "b", "c")]
    async with Supervisor(all_parts, news.append).running():
        pass
    assert [(each.event, each.part) for each in news] == [
        *(("ready", name) for name in "abc"),
        *(("stopped", name) for name in "cba"),
    ]


async def test_a_part_that_dies_says_why_and_is_started_again(tmp_path: Path) -> None:
    news: list[News] = []
    mark = tmp_path / "mark"
    dies = f"import pathlib\nmark = pathlib.Path({str(mark)!r})\n" + (
        READY + "if not mark.exists():\n  mark.touch(); print('error: out of luck', file=sys.stderr); sys.exit(1)\n"
        "print(json.dumps({'event': 'again'})); time.sleep(600)"
    )

    def tell(told: News) -> None:
        news.append(told)
        if told.event == "again":
            supervisor.stop()

    supervisor = Supervisor([program(dies)], tell, backoff=SWIFT)
    await supervisor.run()
    assert "out of luck; starting again in" in next(each.detail for each in news if each.event == "died")
    assert [each.event for each in news].count("ready") == 2


async def test_a_part_that_cannot_start_ends_all_with_its_own_words() -> None:
    wrong = program("print('error: no such thing\\nfix: buy one', file=sys.stderr); sys.exit(1)", "wrong")
    news: list[News] = []
    supervisor = Supervisor([program(STAYS, "fine", needed=True), wrong], news.append, backoff=SWIFT)
    with pytest.raises(ServerFailed, match="wrong did not start: no such thing") as caught:
        await supervisor.run()
    assert caught.value.fix == "buy one"
    assert not alive(int(next(each.detail for each in news if each.part == "fine")))


async def test_rubbish_is_passed_on_and_a_deaf_part_is_killed() -> None:
    news: list[News] = []
    deaf = "import signal\nsignal.signal(15, signal.SIG_IGN)\nprint('no JSON'); print('x' * 3_000_000); print('[1]')\n"
    part = Part("deaf", program(deaf + STAYS).command, grace_seconds=0.2)
    async with Supervisor([part], news.append).running():
        pass
    assert next(each.detail for each in news if each.event == "said") == "no JSON"
    assert news[-1].event == "killed"
    assert not alive(int(next(each.detail for each in news if each.event == "ready")))


async def test_a_second_stop_kills_what_does_not_end() -> None:
    news: list[News] = []
    part = Part("deaf", program("import signal\nsignal.signal(15, signal.SIG_IGN)\n" + STAYS).command, 600)

    def tell(told: News) -> None:
        news.append(told)
        if told.event == "up":
            supervisor.stop()
            supervisor.stop()

    supervisor = Supervisor([part], tell)
    await supervisor.run()
    assert not alive(int(news[0].detail))


async def test_when_nobody_reads_its_output_any_more_it_stops() -> None:
    pids: list[int] = []

    def tell(told: News) -> None:
        pids.append(int(told.detail))
        raise BrokenPipeError

    await Supervisor([program(STAYS)], tell).run()
    assert not alive(pids[0])


def test_mistakes_are_told_before_anything_starts(tmp_path: Path) -> None:
    data = ("--data-dir", str(tmp_path / "data"))
    invoke(*data, "up", "--host", "0.0.0.0").refused("not every password", "PURVEYOR_ADMIN_PASSWORD")
    invoke(*data, "up", "--port", "99999").refused("--port")
    (tmp_path / "file").touch()
    invoke("--data-dir", str(tmp_path / "file"), "up").refused(str(tmp_path / "file"))
    assert not (tmp_path / "data").exists()


@pytest.mark.spark
def modes_below(directory: Path) -> dict[Path, int]:
    """The modes of a directory and of all files below it; those that vanish meanwhile are left out."""
    found: dict[Path, int] = {}
    for path in (directory, *directory.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            if not path.is_symlink():
                found[path] = path.lstat().st_mode
    return found


@pytest.mark.timeout(900)
@pytest.mark.first
def test_everything_comes_up_survives_kill_9_and_stops_in_order(start: START, tmp_path: Path) -> None:
    data = tmp_path / "data"
    up = start()
    api = up.says("ready", "API")
    assert up.says("ready", "NATS")["address"].startswith("nats://127.0.0.1:")
    file = Path(api["passwords"])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    passwords = tomllib.loads(file.read_text())

    invoke("--data-dir", str(data), "up").refused(f"process {up.process.pid}", "--data-dir")

    up.says("up", "everything")
    secrets = [*passwords.values(), *(path.read_text().strip() for path in (data / "nats").glob("password*"))]
    below = descendants(up.process.pid, "")
    shown = "".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in below if alive(pid)) + str(up.news)
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
            while True:
                got = client.get("/v1/subscriptions/ox/messages/next?timeout=20", auth=("ox", "oxpw"))
                if got.status_code == 200 and got.json() is not None:
                    break
            found = got.json()
            done = f"/v1/subscriptions/ox/messages/{found['sequence_number']}/status"
            assert client.patch(done, json={"status": "ok"}, auth=("ox", "oxpw")).status_code == 200
            return str(found["body"]["new"]["uuid"])

        publish(1)
        assert receive() == "u-1"
        (nats,) = [pid for pid in descendants(up.process.pid, "serve nats") if os.getsid(pid) == pid]
        os.kill(nats, signal.SIGKILL)
        assert "killed by SIGKILL" in up.says("died", "NATS")["detail"]
        up.says("ready", "NATS", times=2)
        wait_until(lambda: client.get("/readyz").status_code == 200)
        publish(2)
        assert receive() == "u-2"
        wait_until(lambda: list((data / "archive" / "events").glob("*/*.parquet")))

    made = modes_below(data)
    for part in ("archive", "checkpoints", "logs", "nats/jetstream", "spark"):
        assert any(path.is_relative_to(data / part) for path in made), part
    assert [path for path, mode in made.items() if mode & (stat.S_IRWXG | stat.S_IRWXO)] == []

    assert up.stop(signal.SIGINT) == 0
    stopped = [part for part in up.told("stopped") if part != "everything"]
    assert stopped == ["API", "push", "pipeline", "NATS"]
    assert running(data / "nats") is None
    wait_until(lambda: not [pid for pid in below if alive(pid)])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent died")
def test_no_part_outlives_a_supervisor_that_is_killed() -> None:
    code = (
        "import asyncio, sys\nfrom purveyor.app.up.processes import Part\n"
        "from purveyor.app.up.supervisor import Supervisor\n"
        "part = Part('part', tuple(sys.argv[1:]), 5)\n"
        "asyncio.run(Supervisor([part], lambda news: print(news.detail, flush=True)).run())"
    )
    with subprocess.Popen([sys.executable, "-c", code, *program(STAYS).command], stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        part = int(supervisor.stdout.readline())
        assert alive(part)
        supervisor.kill()
        wait_until(lambda: not alive(part))

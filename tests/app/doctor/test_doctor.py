"""`purveyor doctor`: what is wrong is found, with what to do, and the exit code says so."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from purveyor.app.doctor import deployment_checks, machine_checks
from purveyor.app.doctor.api_checks import check_api
from purveyor.app.doctor.deployment_checks import check_pipeline
from purveyor.app.doctor.machine_checks import Finding, Weight
from purveyor.app.running_parts import API, NATS, announce
from purveyor.app.settings import Settings
from purveyor.delivery.push.push_reports import PushProblems
from purveyor.delivery.subscriptions import Subscriptions
from purveyor.jetstream.address import Address
from purveyor.jetstream.config import StreamConfig
from purveyor.jetstream.server import EmbeddedServer, ServerOptions
from purveyor.model.delivery_policy import Delivery, Push
from purveyor.model.errors import UnknownStream
from purveyor.model.registration import DispatchState, Suspension
from purveyor.model.subscription import RealmTopic, Subscription
from purveyor.queues.catalogue import DEAD_LETTERS
from purveyor.queues.client import connect
from purveyor.queues.dead_letters.letter import DeadLetter, park
from purveyor.queues.dead_letters.store import DeadLetterStore, Resolution
from purveyor.queues.permissions import component_users
from tests.support.command_line import invoke, url_of
from tests.support.nats_servers import FAST, OwnServer
from tests.support.running_api import RunningApi
from tests.support.waiting import wait_until

Findings = list[dict[str, Any]]


def found(*argv: str, code: int = 0) -> Findings:
    outcome = invoke(*argv, "doctor", "--json")
    assert outcome.code == code, outcome
    shown = outcome.json
    assert shown["wrong"] is bool(code)
    findings: Findings = shown["findings"]
    for each in findings:
        assert each["weight"] == "ok" or each.get("fix") or each["weight"] == "note", each
    return findings


def about(findings: Findings, topic: str, weight: str = "ok") -> list[str]:
    return [each["text"] for each in findings if each["about"] == topic and each["weight"] == weight]


def test_a_machine_before_the_first_start_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PURVEYOR_API_PORT", "0")
    findings = found("--data-dir", str(tmp_path / "data"))
    assert about(findings, "java")
    assert about(findings, "nats-server")
    assert about(findings, "disk")
    assert about(findings, "spark")
    assert "none runs" in about(findings, "nats", "note")[0]
    assert not (tmp_path / "data").exists()  # it looks, and changes nothing
    text = invoke("--data-dir", str(tmp_path / "data"), "doctor").ok().out
    assert "Fix: `purveyor up` starts one" in text


def test_a_running_system_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PURVEYOR_API_PORT", "0")
    monkeypatch.setenv("PURVEYOR_SYNC", "1m")
    data = tmp_path / "data"
    with EmbeddedServer(data / "nats", ServerOptions(sync="1m", users=component_users())):
        invoke("--data-dir", str(data), "queues", "ensure").ok()
        findings = found("--data-dir", str(data))
        assert "answers in" in about(findings, "nats")[0]
        assert [text.split()[4] for text in about(findings, "permissions")[1:]] == ["api", "pipeline", "push", "intake"]
        assert "power cut" in about(findings, "sync", "warning")[0]
        assert about(findings, "clock")
        assert about(findings, "queues")
        assert about(findings, "jetstream")

        (data / "nats" / "password").chmod(0o644)
        invoke("--data-dir", str(data), "stream", "rm", "stream:ldif", "--yes").ok()
        invoke("--data-dir", str(data), "stream", "add", "stream:ldif", "--subjects", "ldif.>").ok()
        findings = found("--data-dir", str(data), code=1)
        assert "nats/password" in about(findings, "data", "wrong")[0]
        assert "ldif" in about(findings, "queues", "warning")[0]
    assert "none runs" in about(found("--data-dir", str(data), code=1), "nats", "warning")[0]


async def test_dead_letters_are_counted_without_the_receipts_of_settled_ones(own_server: OwnServer) -> None:
    async with connect(own_server(FAST).address) as queues:
        (await queues.ensure(DEAD_LETTERS)).require_usable()
        now = datetime.now(UTC)
        for number in range(3):
            letter = DeadLetter(
                reason="x", origin="push", subject="ox.main", data=b"%d" % number, failed_first=now, failed_last=now
            )
            await park(queues, letter)
        box = DeadLetterStore(queues)

        async def shown() -> list[str]:
            return [each.text async for each in deployment_checks.check_dead_letters(queues)]

        assert await shown() == ["3 dead letters wait for a decision"]
        for number in (1, 2, 3):
            parked = await box.find(number)
            assert parked is not None
            await box.settle(parked, Resolution.DISCARDED)
            await box.remove(number)
        assert (await queues.streams.info(DEAD_LETTERS.stream)).state.messages == 3
        assert await shown() == []


async def test_subscriptions_that_get_nothing_are_found(own_server: OwnServer) -> None:
    async with connect(own_server().address) as queues:
        topics, push = (RealmTopic("shop", ".*"),), Push(endpoints=("https://example.com/in",))
        pushed = Subscription(name="hook", realms_topics=topics, delivery=Delivery.PUSH, push=push, order_by=None)
        subscriptions = Subscriptions(queues)
        await subscriptions.add(pushed)
        await subscriptions.add(Subscription(name="mail", realms_topics=topics))

        async def reported() -> dict[str, str]:
            usages = await queues.streams.usage()
            findings = [each async for each in deployment_checks.check_progress(queues, usages, Settings())]
            return {each.text: each.fix or "" for each in findings if each.weight is Weight.WRONG}

        assert [*await reported()] == ["no push worker runs, and 1 subscription should be pushed"]
        incarnation = (await subscriptions.get("hook")).incarnation
        problems = PushProblems(queues)
        problems.set("hook", incarnation, "https://example.com/in answers 500")
        await problems.close()
        registry, other = await subscriptions.registry(), await subscriptions.get("mail")
        suspension = Suspension(position=7, reason="the queue is full", at=datetime.now(UTC))
        state = DispatchState(incarnation=other.incarnation, next=7, suspended=suspension)
        await registry.put_dispatch(other.name, state, other.dispatch_revision)
        shown = {text: fix for text, fix in (await reported()).items() if "push worker" not in text}
        assert len(shown) == 2
        assert any("has not been pushed since" in text and "answers 500" in text for text in shown)
        assert any("suspended at position 7" in text and text.endswith(": the queue is full") for text in shown)
        assert all(f"purveyor subscription {word} " in " ".join(shown.values()) for word in ("show", "resume"))


def test_a_server_that_does_not_answer_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PURVEYOR_NATS_URL", "nats://127.0.0.1:1")
    assert about(found("--timeout", "500ms", code=1), "nats", "wrong")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_a_server_that_is_suspended_is_named(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with EmbeddedServer(data / "nats", FAST) as server, announce(data, NATS):
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        try:
            findings = found("--data-dir", str(data), "--timeout", "500ms", code=1)
        finally:
            os.kill(server.pid, signal.SIGCONT)
    (fix,) = [each["fix"] for each in findings if (each["about"], each["weight"]) == ("nats", "wrong")]
    assert "kill -CONT" in fix


def test_an_api_is_asked_where_it_listens(api: RunningApi, tmp_path: Path) -> None:
    def checked() -> list[tuple[str, str]]:
        return [(each.weight.value, each.text) for each in check_api(Settings(data_dir=tmp_path))]

    assert checked() == []
    with announce(tmp_path, API, url=api.url):
        assert checked() == [("ok", f"the API answers at {api.url}")]
        assert not list(machine_checks.check_ports(Settings(data_dir=tmp_path, api_port=1)))
    nowhere = Address.parse("nats://127.0.0.1:9")
    with RunningApi(lambda: nowhere, patience_seconds=0.1) as away, announce(tmp_path, API, url=away.url):
        ((weight, text),) = checked()
        assert (weight, f"the API at {away.url} cannot serve requests" in text) == ("warning", True)
    with announce(tmp_path, API, url="http://127.0.0.1:1"):
        ((weight, text),) = checked()
        assert (weight, "does not answer at http://127.0.0.1:1" in text) == ("wrong", True)


def test_an_api_of_several_processes_is_asked_once(api: RunningApi, tmp_path: Path) -> None:
    with announced_worker(tmp_path, api.url, 1), announced_worker(tmp_path, api.url, 2) as second:
        assert [(each.weight.value, each.text) for each in checked(tmp_path)] == [
            ("ok", f"the API answers at {api.url}")
        ]
        second.send_signal(signal.SIGSTOP)
        # The signal takes effect a moment later.
        found = wait_until(lambda: findings if len(findings := checked(tmp_path)) > 1 else None)
        assert [each.weight.value for each in found] == ["wrong", "ok"]
        assert f"worker 2 of the API at {api.url} (process {second.pid})" in found[0].text


ANNOUNCE_WORKER = (
    "import sys, time; from pathlib import Path; from purveyor.app.running_parts import announce\n"
    "with announce(Path(sys.argv[1]), 'api', url=sys.argv[2], worker=int(sys.argv[3])):\n"
    "    print('ready', flush=True); time.sleep(600)"
)


@contextlib.contextmanager
def announced_worker(data: Path, url: str, number: int) -> "Iterator[subprocess.Popen[str]]":
    command = [sys.executable, "-c", ANNOUNCE_WORKER, str(data), url, str(number)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def checked(data: Path) -> list[Finding]:
    """Return the findings about the API, the worst first."""
    return sorted(check_api(Settings(data_dir=data)), key=lambda each: each.weight.value, reverse=True)


def test_credentials_with_few_rights_are_reported(own_server: OwnServer, monkeypatch: pytest.MonkeyPatch) -> None:
    started = own_server(ServerOptions(sync="2m", users=component_users()))
    monkeypatch.setenv("PURVEYOR_NATS_URL", url_of(started.address.with_password("intake", _password(started))))
    monkeypatch.setenv("PURVEYOR_NATS_INBOX", "_INBOX.intake")
    monkeypatch.setenv("PURVEYOR_API_PORT", "0")
    findings = found()
    assert "publish events" in about(findings, "permissions", "warning")[0]
    assert about(findings, "sync", "note")

    async def stored() -> list[str]:
        async with connect(started.address) as queues:
            return await queues.streams.names()

    assert asyncio.run(stored()) == []  # asking whether one may publish has published nothing


def _password(started: EmbeddedServer) -> str:
    return (started.directory / "password.intake").read_text().strip()


def test_a_port_of_another_program_is_wrong_and_our_own_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "_CONNECT_TIMEOUT_SECONDS", 0.2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = Settings(data_dir=tmp_path, api_port=taken.getsockname()[1])
        (finding,) = machine_checks.check_ports(settings)
    assert finding.weight is Weight.WRONG


@pytest.mark.parametrize(
    ("master", "weight"),
    [
        ("local[*]", Weight.OK),
        ("local[2,4]", Weight.OK),
        ("local-cluster[2,1,1024]", Weight.OK),
        ("yarn", Weight.OK),
        ("k8s://https://10.0.0.1:6443", Weight.OK),
        ("spark://127.0.0.1:1", Weight.WRONG),
        ("127.0.0.1:7077", Weight.WRONG),
        ("local[many]", Weight.WRONG),
        ("spark://host", Weight.WRONG),
    ],
)
def test_a_spark_master_has_a_form(master: str, weight: Weight) -> None:
    assert machine_checks.check_spark_master(master).weight is weight


def test_a_mapping_is_read(tmp_path: Path) -> None:
    assert machine_checks.check_mapping("udm").text == "udm, built in"
    file = tmp_path / "school.toml"
    file.write_text("[[rule]]\nany = ['a']\ntopik = 'b'")
    found = machine_checks.check_mapping(str(file))
    assert found.weight is Weight.WRONG
    assert "school.toml, line 3: rule 1: unknown key 'topik'" in found.text
    file.write_text("[[rule]]\nany = ['a']\ntopic = 'b'")
    assert machine_checks.check_mapping(str(file)).text == f"{file}, a file"


def test_a_data_directory_of_others_is_told(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert next(machine_checks.check_data_directory(tmp_path)).weight is Weight.WRONG
    file = tmp_path / "file"
    file.touch()
    assert [each.weight for each in machine_checks.check_data_directory(file)] == [Weight.WRONG]
    if os.geteuid() == 0:
        os.chown(tmp_path, 12345, -1)
        assert any("belongs to user 12345" in each.text for each in machine_checks.check_data_directory(tmp_path))


def checkpoint(data: Path, sequence: int, created: str = "then") -> Settings:
    path = data / "checkpoints" / "dispatch-dispatcher"
    for name in ("offsets", "commits"):
        (path / name).mkdir(parents=True)
    offset = {"stream": "stream:incoming", "created": created, "sequence": sequence, "lost": 0}
    (path / "offsets" / "3").write_text("v1\n{}\n" + json.dumps(offset))
    (path / "commits" / "3").write_text("v1\n{}")
    return Settings(data_dir=data)


def stream(
    first: int, last: int, created: str = "then", *, floor: int = 50, continues: str = ""
) -> Callable[[str], dict[str, Any]]:
    state = {"first_seq": first, "last_seq": last, "messages": last - first + 1}
    config = {"metadata": {"purveyor.continues": continues}}
    answers: dict[str, dict[str, Any]] = {
        "STREAM.INFO.stream:incoming": {"created": created, "config": config, "state": state},
        "CONSUMER.INFO.stream:incoming.dispatcher": {"ack_floor": {"stream_seq": floor}},
    }

    def ask(request: str) -> dict[str, Any]:
        return answers[request] if request in answers else gone(request)

    return ask


def gone(_: str) -> dict[str, Any]:
    raise UnknownStream("no such stream")


@pytest.mark.parametrize(
    ("ask_api", "weight"),
    [
        (stream(40, 90), Weight.OK),
        (stream(40, 90, "later", continues="then"), Weight.OK),
        (stream(1, 90, "later"), Weight.WRONG),
        (stream(1, 30), Weight.WARNING),
        (stream(60, 90, floor=70), Weight.WARNING),
        (stream(60, 90), Weight.WRONG),
        (gone, Weight.WRONG),
    ],
    ids=["same", "migrated", "made-again", "older-store", "older-checkpoint", "lost", "gone"],
)
def test_a_checkpoint_belongs_to_its_stream(tmp_path: Path, ask_api: Any, weight: Weight) -> None:
    (finding,) = check_pipeline(checkpoint(tmp_path, 50), ask_api)
    assert finding.weight is weight, finding
    assert finding.about == "checkpoints"


def test_a_damaged_checkpoint_is_reported(tmp_path: Path) -> None:
    settings = checkpoint(tmp_path, 50)
    (tmp_path / "checkpoints" / "dispatch-dispatcher" / "offsets" / "3").write_text("half")
    (finding,) = check_pipeline(settings, None)
    assert finding.weight is Weight.WARNING


def test_a_checkpoint_that_was_set_aside_is_not_looked_at(tmp_path: Path) -> None:
    settings = checkpoint(tmp_path, 50)
    path = tmp_path / "checkpoints" / "dispatch-dispatcher"
    path.rename(path.with_name(f"{path.name}.replaced-1"))
    (finding,) = check_pipeline(settings, stream(1, 30))
    assert finding.weight is Weight.NOTE


def test_a_pipeline_that_died_is_reported(tmp_path: Path) -> None:
    dead = {"pid": 2**22 + 1, "parts": [{"part": "dispatch", "state": "running"}]}
    (tmp_path / "pipeline-status.json").write_text(json.dumps(dead))
    assert _about_pipeline(tmp_path) == [Weight.WARNING]
    failing = {"pid": os.getpid(), "parts": [{"part": "dispatch", "state": "waiting", "error": "no server"}]}
    (tmp_path / "pipeline-status.json").write_text(json.dumps(failing))
    assert _about_pipeline(tmp_path) == [Weight.WARNING]
    (tmp_path / "pipeline-status.json").write_text("[]")
    assert _about_pipeline(tmp_path) == [Weight.WARNING]


def _about_pipeline(data: Path) -> list[Weight]:
    found: list[Finding] = [*check_pipeline(Settings(data_dir=data), None)]
    return [finding.weight for finding in found if finding.about == "pipeline"]


def test_the_clock_and_the_limits_of_the_server(own_server: OwnServer, monkeypatch: pytest.MonkeyPatch) -> None:
    address = own_server().address

    async def look() -> list[Finding]:
        async with connect(address) as queues:
            await queues.streams.add(StreamConfig(name="S", subjects=("s",)))
        settings = Settings(nats_url=url_of(address))
        return [finding async for finding in deployment_checks.check_server(settings, lambda _: address)]

    async def an_hour_ahead(*_: object) -> float:
        return 3600.0

    (clock,) = [each for each in asyncio.run(look()) if each.about == "clock"]
    assert clock.weight is Weight.OK
    monkeypatch.setattr(deployment_checks, "clock_offset_seconds", an_hour_ahead)
    (clock,) = [each for each in asyncio.run(look()) if each.about == "clock"]
    assert clock.weight is Weight.WRONG

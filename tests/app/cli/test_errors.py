"""Errors of commands: one clear line, a fix where there is one, exit code 1 and no traceback."""

import contextlib
import json
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from purveyor.app.cli import context
from purveyor.jetstream.address import Address
from purveyor.model.errors import PurveyorError, ServerFailed
from tests.support.command_line import PROGRAM, Cli, invoke, url_of
from tests.support.waiting import PATIENCE_SECONDS


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("stream", "add", "a.b"), ["stream name 'a.b'", "fix:"]),
        (("stream", "add", ""), ["name of a stream is empty"]),
        (("stream", "info", "two words"), ["'two words'"]),
        (("stream", "add", "S", "--subjects", "a..b"), ["subject 'a..b'", "empty token"]),
        (("stream", "add", "S", "--subjects", "a.>.b"), ["'>' must be the last token"]),
        (("stream", "add", "S", "--max-age", "soon"), ["duration 'soon'", "30s"]),
        (("stream", "add", "S", "--max-bytes", "big"), ["size 'big'", "1GiB"]),
        (("stream", "add", "S", "--replicas", "9"), ["9 replicas"]),
        (("stream", "add", "S", "--discard-per-subject"), ["discard policy 'new'"]),
        (("stream", "info", "NOWHERE"), ["no stream 'NOWHERE'", "stream ls"]),
        (("stream", "rm", "NOWHERE", "--yes"), ["no stream 'NOWHERE'"]),
        (("consumer", "ls", "NOWHERE"), ["no stream 'NOWHERE'"]),
        (("consumer", "info", "NOWHERE", "C"), ["NOWHERE"]),
        (("consumer", "next", "NOWHERE", "C"), ["NOWHERE"]),
        (("consumer", "add", "NOWHERE", "C"), ["NOWHERE"]),
        (("consumer", "add", "NOWHERE", "a b"), ["consumer name 'a b'"]),
        (("consumer", "add", "S", "C", "--deliver", "yesterday"), ["'yesterday'", "a sequence"]),
        (("consumer", "add", "S", "C", "--target", "a.*"), ["'a.*'", "wildcard"]),
        (("sub", "--stream", "NOWHERE"), ["NOWHERE"]),
        (("sub", "a b"), ["subject 'a b'"]),
        (("pub", "no.stream.here", "x"), ["no stream takes the subject 'no.stream.here'", "stream add"]),
        (("pub", "no.stream.here", "x", "--count", "2000"), ["no.stream.here"]),
        (("pub", "a.*", "x"), ["'a.*'", "wildcard"]),
        (("pub", "a..b", "x"), ["'a..b'"]),
        (("pub", "a", "-H", "no colon", "x"), ["header 'no colon'"]),
        (("pub", "a", "-H", "bad name:x", "x"), ["header name 'bad name'"]),
        (("pub", "a", "-H", "Name:two\nlines", "x"), ["header 'Name'", "line break"]),
        (("--timeout", "soon", "stream", "ls"), ["duration 'soon'"]),
        (("--config", "nowhere.toml", "stream", "ls"), ["nowhere.toml"]),
        (("--nats-credentials", "nowhere.creds", "stream", "ls"), ["nowhere.creds"]),
    ],
)
def test_a_mistake_is_one_clear_line(cli: Cli, argv: tuple[str, ...], words: list[str]) -> None:
    cli(*argv).refused(*words)


@pytest.mark.parametrize("how", [(), ("--no-ack",), ("--count", "2000")])
def test_a_message_above_the_limit(cli: Cli, stream: str, how: tuple[str, ...]) -> None:
    Path("large").write_bytes(b"x" * 17_000_000)
    cli("pub", f"{stream}.x", "--file", "large", *how).refused("1700", "16777216", "fix:")


def test_wrong_credentials(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PURVEYOR_NATS_URL", url_of(address.with_password("mallory", "gue55ed")))
    outcome = invoke("stream", "ls").refused("does not accept user 'mallory'", "PURVEYOR_NATS_URL")
    assert "gue55ed" not in outcome.err


def test_no_server_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    url = f"nats://127.0.0.1:{port}"
    invoke("--nats-url", url, "--timeout", "300ms", "stream", "ls").refused(url, "running")


def test_no_server_set(tmp_path: Path) -> None:
    invoke("stream", "ls").refused(str(tmp_path / "xdg"), "purveyor serve nats", "PURVEYOR_NATS_URL")


@contextlib.contextmanager
def speaking_server(version: str) -> Iterator[str]:
    """Start a server that introduces itself as a NATS server of some version and answers PING."""
    info = {"server_id": "X", "version": version, "max_payload": 1048576, "headers": True, "proto": 1}

    def serve(listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listening.accept()
                with client, contextlib.suppress(OSError):
                    client.sendall(f"INFO {json.dumps(info)}\r\n".encode())
                    while received := client.recv(4096):
                        if b"PING\r\n" in received:
                            client.sendall(b"PONG\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,), daemon=True)
        thread.start()
        yield f"nats://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE_SECONDS)


def test_a_server_too_old() -> None:
    with speaking_server("2.9.25") as url:
        invoke("--nats-url", url, "stream", "ls").refused("2.9.25", "older than 2.14", "upgrade")


def test_a_password_in_a_flag_is_refused_and_not_repeated() -> None:
    outcome = invoke("--nats-url", "nats://ada:s3cret@127.0.0.1:1", "stream", "ls").refused("ps", "PURVEYOR_NATS_URL")
    assert "s3cret" not in outcome.err


def test_the_password_shows_nowhere(cli: Cli, address: Address, stream: str) -> None:
    assert address.password
    for argv in (
        ("--debug", "stream", "info", stream),
        ("--debug", "stream", "info", "NOWHERE"),
        ("--debug", "pub", f"{stream}.x", "y", "--json"),
        ("--debug", "queues", "list", "--json"),
    ):
        outcome = cli(*argv)
        assert address.password not in outcome.out + outcome.err


@pytest.mark.parametrize(
    "argv",
    [
        ("nope",),
        ("stream",),
        ("stream", "nope"),
        ("stream", "info"),
        ("stream", "add", "S", "--retention", "for-ever"),
        ("stream", "add", "S", "--max-msgs", "many"),
        ("consumer", "add", "S", "C", "--sample", "0"),
        ("pub", "a", "b", "--count", "0"),
        ("--nope", "stream", "ls"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(argv: tuple[str, ...]) -> None:
    outcome = invoke(*argv)
    assert (outcome.code, outcome.out) == (2, "")
    assert [line.split(":")[0] for line in outcome.err.splitlines()] == ["error", "fix"]
    assert "--help" in outcome.err


def test_an_option_in_the_wrong_place_gets_a_fix() -> None:
    outcome = invoke("stream", "ls", "--nats-url", "nats://h")
    assert outcome.code == 2
    assert "write --nats-url before the command" in outcome.err


def break_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(context.Cli, "call", broken)


def test_a_defect_is_a_short_line_and_a_trace_only_with_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    break_with(RuntimeError("odd\x1b"), monkeypatch)
    invoke("stream", "ls").refused(r"unexpected RuntimeError: odd\x1b", "--debug")
    with_trace = invoke("--debug", "stream", "ls")
    assert with_trace.code == 1
    assert "Traceback" in with_trace.err
    assert "RuntimeError" in with_trace.err


def test_our_errors_have_a_trace_with_debug_too(monkeypatch: pytest.MonkeyPatch) -> None:
    break_with(PurveyorError("no", fix="yes"), monkeypatch)
    assert "Traceback" in invoke("--debug", "stream", "ls").err


def test_more_lines_of_an_error_are_indented(monkeypatch: pytest.MonkeyPatch) -> None:
    break_with(ServerFailed("first\nsecond"), monkeypatch)
    assert invoke("stream", "ls").err == "error: first\n  second\n"


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    break_with(KeyboardInterrupt(), monkeypatch)
    outcome = invoke("stream", "ls")
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "")


def test_the_program_ends_with_the_code_of_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PURVEYOR_NATS_URL", "nats://127.0.0.1:1")
    done = subprocess.run([*PROGRAM, "stream", "add", "a.b"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: invalid stream name 'a.b'")

"""The login at the HTTP API, and one clear error with a fix for each way in which the API cannot be used."""

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from purveyor.app.cli.main import OVER_HTTP
from purveyor.jetstream.address import Address
from tests.support.api_fixtures import running_api
from tests.support.certificates import self_signed
from tests.support.command_line import PROGRAM, Cli, Outcome, invoke
from tests.support.running_api import RunningApi, count
from tests.support.waiting import PATIENCE_SECONDS, wait_until

__all__ = ["running_api"]


class Page(BaseHTTPRequestHandler):
    """Another program: a page, a redirection, an error of a proxy, JSON."""

    def do_GET(self) -> None:
        path = self.path.split("/")[1]
        status = int(path) if path.isdecimal() else 200
        self.send_response(status)
        if 300 <= status < 400:
            self.send_header("Location", "https://elsewhere.example/v1/topics")
        self.send_header("Content-Type", "application/json" if path == "json" else "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(b"<h1>It works</h1>")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def other_program() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(autouse=True)
def password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PURVEYOR_API_PASSWORD", "admin-secret")


def topics(url: str, *flags: str, user: str = "admin") -> Outcome:
    return invoke("--api", url, "--api-user", user, "--timeout", "1s", *flags, "topic", "list")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("", "is not the API of Purveyor: the answer to GET /v1/topics was 200 and text/html"),
        ("/404", "is not the API of Purveyor: the answer to GET /v1/topics was 404"),
        ("/json", "is not the API of Purveyor"),
        ("/301", "redirects to https://elsewhere.example/v1/topics"),
        ("/401", "the request was answered with 401 (Unauthorized)"),
        ("/403", "the request was answered with 403 (Forbidden)"),
        ("/413", "the request was answered with 413 ("),  # Python 3.13 has another phrase
        ("/502", "is unavailable: status 502"),
    ],
)
def test_another_program_is_recognised(other_program: str, path: str, words: str) -> None:
    assert "fix: " in topics(other_program + path).refused(words).err


def test_an_api_that_is_not_there_is_named(running_api: RunningApi, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nothing = f"http://127.0.0.1:{free.getsockname()[1]}"  # bound, so that no other program gets it
        topics(nothing).refused(f"{nothing} is unavailable: connection refused", "`purveyor serve api` runs there")
    topics("http://no-such-host.invalid").refused("http://no-such-host.invalid is unavailable: ", "fix: check the URL")
    topics(f"{running_api.url}/below").refused("Not Found", "fix: ")
    topics(running_api.url.replace("http://", "https://")).refused("does not speak TLS", "write http://")


def test_an_api_without_its_server_says_so() -> None:
    away = Address.parse("nats://127.0.0.1:1")
    with RunningApi(lambda: away, patience_seconds=1) as api:
        topics(api.url).refused(f"the API at {api.url} is unavailable: ", "fix: ")


def test_a_wrong_login_is_refused_and_in_the_end_slowed_down(running_api: RunningApi, unique: str) -> None:
    refused = topics(running_api.url, user=unique)
    refused.refused("the login is not accepted", "fix: check the user and password")
    for _ in range(9):
        topics(running_api.url, user=unique)
    slowed = topics(running_api.url, user=unique).refused("too many logins have failed")
    assert "try again in" in slowed.err
    topics(running_api.url).ok()


def test_the_certificate_of_the_api_is_checked(address: Address, tmp_path: Path) -> None:
    tls = self_signed(tmp_path, "api")
    with RunningApi(lambda: address, tls=tls) as api:
        url = api.url.replace("http://", "https://")
        topics(url).refused(f"the certificate of {url} is not accepted: ", "--api-tls-ca")
        topics(url, "--timeout", "30s", "--api-tls-ca", "api.pem").ok()
        topics(url, "--api-tls-ca", "missing.pem").refused("missing.pem cannot be used", "check --api-tls-ca")
        topics(api.url).refused("fix: ")


def test_a_token_or_files_log_in(running_api: RunningApi, monkeypatch: pytest.MonkeyPatch) -> None:
    admin = running_api.client("admin", "admin-secret")
    token = admin.post("/v1/tokens", json={"label": "cli"}).json()["token"]
    Path("token").write_text(f"{token}\n", encoding="utf-8")
    Path("password").write_text("admin-secret\n", encoding="utf-8")
    Path("empty").write_text("\n", encoding="utf-8")
    url = running_api.url
    invoke("--api", url, "--api-token-file", "token", "topic", "list").ok()  # stronger than the environment
    invoke("--api", url, "topic", "list").refused("a password and no user", "--api-user")
    monkeypatch.setenv("PURVEYOR_API_TOKEN", token)
    invoke("--api", url, "topic", "list").refused("more than one login for the API: api_password and api_token")
    monkeypatch.delenv("PURVEYOR_API_PASSWORD")
    invoke("--api", url, "topic", "list").ok()
    invoke("--api", url, "--api-user", "admin", "topic", "list").refused("--api-user", "token")
    topics(url, "--api-password-file", "password").ok()
    topics(url, "--api-password-file", "missing").refused("no password can be read from missing")
    topics(url, "--api-password-file", "empty").refused("there is no password in the first line of empty")
    monkeypatch.setenv("PURVEYOR_API_TOKEN", "a\nb")
    invoke("--api", url, "topic", "list").refused("api_token is no token")


def test_secrets_are_no_flags_and_in_no_message(running_api: RunningApi, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = running_api.url.replace("http://", "http://admin:s3cret@")
    assert "s3cret" not in topics(secret).refused("--api holds a user", "PURVEYOR_API_PASSWORD").err
    monkeypatch.setenv("PURVEYOR_API_URL", secret)
    assert "s3cret" not in invoke("topic", "list").refused("api_url", "leave the user out").err
    for wrong in ("127.0.0.1:7777", "ftp://host", "http://", "http://host:port", "http://[", "http://host/?a=b"):
        topics(wrong).refused("use http://host:port or https://host:port")


def test_the_url_may_be_a_setting(cli: Cli, running_api: RunningApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PURVEYOR_API_URL", running_api.url)
    monkeypatch.setenv("PURVEYOR_API_USERNAME", "nobody")
    cli("topic", "list").refused("the login is not accepted")
    cli("stream", "ls").ok()  # HTTP does not offer it, so it goes to the NATS server
    monkeypatch.delenv("PURVEYOR_API_PASSWORD")
    cli("topic", "list").ok()  # without a login the URL is for other programs
    monkeypatch.delenv("PURVEYOR_NATS_URL")
    cli("topic", "list").refused("there is no login for the API", "PURVEYOR_API_TOKEN")
    cli("stream", "ls").refused("no NATS server is set", "this command does not work over HTTP")
    cli("--data-dir", "data", "topic", "list").refused("none runs on data/nats")
    Path("purveyor.toml").write_text(f'api_url = "{running_api.url}"\napi_username = "admin"\n', encoding="utf-8")
    monkeypatch.delenv("PURVEYOR_API_URL")
    monkeypatch.delenv("PURVEYOR_API_USERNAME")
    monkeypatch.setenv("PURVEYOR_API_PASSWORD", "admin-secret")
    cli("topic", "list").ok()


def test_commands_that_http_does_not_offer_say_so(cli: Cli, running_api: RunningApi) -> None:
    for command in (("stream", "ls"), ("doctor",), ("queues", "list"), ("up",)):
        refused = invoke("--api", running_api.url, *command).refused(f"`purveyor {command[0]}` does not work over HTTP")
        assert all(name in refused.err for name in OVER_HTTP)
        assert "PURVEYOR_NATS_URL" in refused.err
    misplaced = invoke("topic", "list", "--api", running_api.url)
    assert "write --api before the command" in misplaced.err


def test_ctrl_c_ends_publishing_while_it_waits_for_a_line(
    running_api: RunningApi, address: Address, unique: str
) -> None:
    before = count(address)
    environment = {**os.environ, "PURVEYOR_API_PASSWORD": "events-secret"}
    command = [*PROGRAM, "--api", running_api.url, "--api-user", "events", "publish", "-"]
    line = b'{"realm": "%s", "topic": "t", "body": {"new": {"id": "1"}}}\n' % unique.encode()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as running:
        assert running.stdin is not None
        running.stdin.write(line * 1001)  # one request, and the first line of the next
        running.stdin.flush()
        wait_until(lambda: count(address) >= before + 1000)
        running.send_signal(signal.SIGINT)
        assert running.wait(PATIENCE_SECONDS) == 130
        assert running.stderr is not None
        assert running.stderr.read() == b""

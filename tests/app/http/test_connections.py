"""A client without a login costs the API a bounded amount of memory, and keeps a connection for a bounded time."""

import base64
import json
import logging
import resource
import select
import socket
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pytest

from purveyor.app.http.connections import Admission, ConnectionLimits, Connections, raise_file_limit
from purveyor.delivery.push.egress_policy import parse_ranges
from purveyor.jetstream.address import Address
from purveyor.jetstream.server import EmbeddedServer
from tests.support.certificates import self_signed
from tests.support.running_api import PASSWORD, RunningApi, event, wanted
from tests.support.waiting import wait_until

SECONDS = 2.0
QUICK = ConnectionLimits(header_seconds=SECONDS, body_seconds=SECONDS, linger_seconds=SECONDS)
LOGIN = "authorization: Basic " + base64.b64encode(b"events:events-secret").decode()


@pytest.fixture(scope="module")
def quick(nats_server: EmbeddedServer) -> Iterator[RunningApi]:
    """An API with short deadlines."""
    with RunningApi(lambda: nats_server.address, limits=QUICK) as api:
        yield api.when_ready()


def connect(api: RunningApi, source: str = "127.0.0.1") -> socket.socket:
    host, _, port = api.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=30, source_address=(source, 0))


def head(first: str, *lines: str) -> bytes:
    return "\r\n".join([first, "host: x", *lines, "", ""]).encode()


def read_all(link: socket.socket) -> bytes:
    """Read until the API closes or resets the connection."""
    found = b""
    try:
        while data := link.recv(65536):
            found += data
    except ConnectionError:
        pass
    return found


def send_until_answered(link: socket.socket, data: bytes, most_bytes: int) -> None:
    """Send something again and again, until there is an answer to read."""
    for _ in range(most_bytes // len(data)):
        if select.select([link], [], [], 0)[0]:
            return
        link.sendall(data)


def refusal(answer: bytes, status: int) -> dict[str, Any]:
    """Return the problem document of an answer."""
    start, _, body = answer.partition(b"\r\n\r\n")
    assert start.startswith(b"HTTP/1.1 %d " % status), answer[:300]
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"content-type: application/problem+json" in start
    assert b"connection: close" in start
    found: dict[str, Any] = json.loads(body)
    assert found["status"] == status
    assert found["detail"]
    assert found["fix"]
    return found


@pytest.mark.parametrize(
    ("start", "more"),
    [
        (head("GET /healthz HTTP/1.1")[:-2] + b"x-long: ", b"a" * 1024),
        (b"GET /healthz?", b"a" * 1024),
        (head("GET /healthz HTTP/1.1")[:-2], b"x-short: a\r\n"),
        (head("GET /healthz HTTP/1.1")[:-2], b"x-empty:\r\n"),
        (head("GET /healthz HTTP/1.1")[:-2], b"x-" + b"n" * 1024),
        (head("POST /v1/messages HTTP/1.1", LOGIN, "transfer-encoding: chunked") + b"0\r\n", b"x-trailer: a\r\n"),
        (head("POST /v1/messages HTTP/1.1", LOGIN, "transfer-encoding: chunked") + b"0\r\nx: ", b"a" * 1024),
    ],
    ids=["one header", "the url", "many headers", "empty headers", "a name", "many trailers", "one trailer"],
)
def test_headers_without_an_end_are_refused(api: RunningApi, start: bytes, more: bytes) -> None:
    with closing(connect(api)) as link:
        link.sendall(start)
        send_until_answered(link, more, 64 << 20)
        refusal(read_all(link), 431)


@pytest.mark.parametrize("line", ["x-long: " + "a" * (32 << 10), "\r\n".join(["x: a"] * 101)])
def test_headers_that_are_too_large_are_431_also_when_they_come_in_one_piece(api: RunningApi, line: str) -> None:
    with closing(connect(api)) as link:
        link.sendall(head("GET /healthz HTTP/1.1", line))
        assert "32768 bytes" in refusal(read_all(link), 431)["detail"]


def test_headers_within_the_limits_are_served(api: RunningApi) -> None:
    with closing(connect(api)) as link:
        lines = [f"x-{number}: {'a' * 300}" for number in range(95)]
        link.sendall(head("GET /healthz HTTP/1.1", *lines, "connection: close"))
        assert read_all(link).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("sent", [b"GET /heal", head("GET /healthz HTTP/1.1")[:-2], b"\r\n"])
def test_headers_that_do_not_come_are_408(quick: RunningApi, sent: bytes) -> None:
    with closing(connect(quick)) as link:
        link.sendall(sent)
        refusal(read_all(link), 408)


def test_a_connection_without_a_request_is_closed_and_no_answer_is_sent(quick: RunningApi) -> None:
    with closing(connect(quick)) as link:
        assert read_all(link) == b""


def test_a_connection_that_was_used_cannot_be_kept_by_empty_lines(quick: RunningApi) -> None:
    with closing(connect(quick)) as link:
        link.sendall(head("GET /healthz HTTP/1.1"))
        assert link.recv(65536).startswith(b"HTTP/1.1 200 ")
        link.sendall(b"\r\n")
        refusal(read_all(link), 408)


@pytest.mark.parametrize("framing", ["content-length: 100000", "transfer-encoding: chunked"])
def test_a_body_that_does_not_come_is_408(quick: RunningApi, framing: str, caplog: pytest.LogCaptureFixture) -> None:
    with closing(connect(quick)) as link:
        link.sendall(head("POST /v1/messages HTTP/1.1", LOGIN, framing))
        refusal(read_all(link), 408)
    assert served(quick)  # the API is done with it, and does not log it as an error
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_body_that_comes_steadily_may_take_longer(nats_server: EmbeddedServer) -> None:
    limits = ConnectionLimits(body_seconds=SECONDS, bytes_per_second=1)
    body = json.dumps(event()).encode()
    with RunningApi(lambda: nats_server.address, limits=limits) as api, closing(connect(api.when_ready())) as link:
        link.sendall(head("POST /v1/messages HTTP/1.1", LOGIN, f"content-length: {len(body)}", "connection: close"))
        link.sendall(body[:60])
        time.sleep(2 * SECONDS)
        link.sendall(body[60:])
        assert read_all(link).startswith(b"HTTP/1.1 202 ")


def test_what_follows_an_answer_is_not_read_for_ever(quick: RunningApi) -> None:
    """Without a login the API answers before the body; a client that continues to send loses its connection."""
    with closing(connect(quick)) as link:
        link.sendall(head("POST /v1/messages HTTP/1.1", "content-length: 1000000000") + b"a" * 1000)
        assert link.recv(65536).startswith(b"HTTP/1.1 401 ")
        assert b"HTTP/1.1" not in read_all(link)


def test_a_connection_is_used_again_when_the_body_came_after_the_answer(api: RunningApi) -> None:
    with closing(connect(api)) as link:
        link.sendall(head("POST /v1/messages HTTP/1.1", "content-length: 1000") + b"a" * 10)
        assert link.recv(65536).startswith(b"HTTP/1.1 401 ")
        link.sendall(b"a" * 990 + head("GET /healthz HTTP/1.1"))
        assert link.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_a_long_poll_is_not_cut(nats_server: EmbeddedServer, admin: Any, name: str) -> None:
    assert admin.post("/v1/subscriptions", json=wanted(name)).status_code == 201
    limits = ConnectionLimits(header_seconds=SECONDS, body_seconds=SECONDS)
    with RunningApi(lambda: nats_server.address, limits=limits) as api:
        consumer = api.when_ready().client(name, PASSWORD)
        answer = consumer.get(f"/v1/subscriptions/{name}/messages/next", params={"timeout": 3 * SECONDS})
        assert (answer.status_code, answer.json()) == (200, None)


def test_a_client_that_does_not_read_loses_its_connection(quick: RunningApi) -> None:
    with closing(socket.socket()) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, _, port = quick.url.removeprefix("http://").partition(":")
        link.connect((host, int(port)))
        answers = 0
        try:
            while answers < 10_000:
                link.sendall(head("GET /openapi.json HTTP/1.1"))
                answers += 1
                time.sleep(0.001)
        except ConnectionError:
            pass
        assert answers < 10_000


def test_pipelined_requests_are_answered_in_their_order_and_are_limited(api: RunningApi) -> None:
    with closing(connect(api)) as link:
        link.sendall(head("GET /healthz HTTP/1.1") * 10 + head("GET /nowhere HTTP/1.1", "connection: close"))
        answers = read_all(link).split(b"HTTP/1.1 ")[1:]
        assert [answer[:3] for answer in answers] == [b"200"] * 10 + [b"401"]
    with closing(connect(api)) as link:
        link.sendall(head("GET /healthz HTTP/1.1") * 1000)
        assert read_all(link).count(b"HTTP/1.1 200 ") < 1000


def test_a_body_that_is_pipelined_is_kept_until_its_turn(api: RunningApi) -> None:
    body = json.dumps(event()).encode()
    with closing(connect(api)) as link:
        publish = head("POST /v1/messages HTTP/1.1", LOGIN, f"content-length: {len(body)}", "connection: close") + body
        link.sendall(head("GET /healthz HTTP/1.1") + publish)
        answers = read_all(link).split(b"HTTP/1.1 ")[1:]
        assert [answer[:3] for answer in answers] == [b"200", b"202"]


def test_what_is_no_http_is_400(api: RunningApi) -> None:
    with closing(connect(api)) as link:
        link.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        refusal(read_all(link), 400)
    with closing(connect(api)) as link:
        link.sendall(head("GET /healthz HTTP/1.1") + b"\x16\x03")
        assert read_all(link) == b""  # it would be taken for the answer to the first request


def served(api: RunningApi, source: str = "127.0.0.1") -> bool:
    with closing(connect(api, source)) as link:
        link.sendall(head("GET /healthz HTTP/1.1", "connection: close"))
        answer = read_all(link)
    if answer.startswith(b"HTTP/1.1 200 "):
        return True
    assert b"retry-after: 1\r\n" in answer
    assert "connections" in refusal(answer, 503)["detail"]
    return False


def test_there_is_a_limit_of_connections_and_one_address_has_half_of_them(address: Address) -> None:
    with RunningApi(lambda: address, limits=ConnectionLimits(connections=8)) as api, ExitStack() as stack:
        api.anybody.close()
        wait_until(lambda: served(api))
        links = [stack.enter_context(closing(connect(api))) for _ in range(4)]
        assert not served(api)
        assert served(api, "127.0.0.2")
        others = [stack.enter_context(closing(connect(api, "127.0.0.2"))) for _ in range(4)]
        assert not served(api, "127.0.0.3")
        others.pop().close()
        wait_until(lambda: served(api, "127.0.0.3"))
        assert not served(api)
        links.pop().close()
        wait_until(lambda: served(api))


def test_a_trusted_proxy_may_have_all_connections(address: Address) -> None:
    limits, proxies = ConnectionLimits(connections=8), parse_ranges(["127.0.0.0/30"])
    with RunningApi(lambda: address, limits=limits, trusted_proxies=proxies) as api, ExitStack() as stack:
        api.anybody.close()
        wait_until(lambda: served(api))
        for _ in range(7):
            stack.enter_context(closing(connect(api)))
        assert served(api)
        stack.enter_context(closing(connect(api)))
        assert not served(api)


def test_connections_far_beyond_the_limit_get_no_answer() -> None:
    connections = Connections(ConnectionLimits(connections=10))
    found = [connections.admit(f"192.0.2.{number}", number) for number in range(1, 200)]
    assert found == [Admission.SERVED] * 10 + [Admission.REFUSED] * 128 + [Admission.DROPPED] * 61


def test_the_limit_of_open_files_is_raised_or_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
        assert raise_file_limit(900) == 900
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 900 + 128 + 256
        assert raise_file_limit(hard) == hard - 128 - 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def encrypted(nats_server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApi]:
    tls = self_signed(tmp_path_factory.mktemp("tls"), "api")
    limits = ConnectionLimits(connections=200, header_seconds=4 * SECONDS, linger_seconds=SECONDS)
    with RunningApi(lambda: nats_server.address, limits=limits, tls=tls) as api:
        wait_until(lambda: served_by_tls(api))
        yield api


def served_by_tls(api: RunningApi, source: str = "127.0.0.1") -> bool:
    context = ssl._create_unverified_context()
    try:
        with context.wrap_socket(connect(api, source)) as link:
            link.sendall(head("GET /healthz HTTP/1.1", "connection: close"))
            return read_all(link).startswith(b"HTTP/1.1 200 ")
    except OSError:
        return False


def test_a_handshake_counts_as_a_connection_and_does_not_last_for_ever(encrypted: RunningApi) -> None:
    with ExitStack() as stack:
        links = [stack.enter_context(closing(connect(encrypted))) for _ in range(100)]
        for link in links[:50]:
            link.sendall(b"\x16\x03\x01\x40\x00\x01")
        assert not served_by_tls(encrypted)
        assert served_by_tls(encrypted, "127.0.0.2")
        assert [read_all(link) for link in links] == [b""] * 100
        wait_until(lambda: served_by_tls(encrypted))


def test_headers_over_tls_have_the_same_limits(encrypted: RunningApi) -> None:
    with ssl._create_unverified_context().wrap_socket(connect(encrypted)) as link:
        link.sendall(head("GET /healthz HTTP/1.1", "x-long: " + "a" * (33 << 10)))
        refusal(read_all(link), 431)
    with ssl._create_unverified_context().wrap_socket(connect(encrypted)) as link:
        link.sendall(b"GET /heal")
        refusal(read_all(link), 408)


def test_many_requests_at_once_over_tls_are_all_answered(encrypted: RunningApi) -> None:
    """The first bytes of a request often come with the last of the handshake."""
    with ThreadPoolExecutor(4) as threads:
        found = [*threads.map(lambda _: served_by_tls(encrypted), range(80))]
    assert found.count(True) == 80

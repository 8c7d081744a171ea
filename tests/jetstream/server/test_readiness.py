"""A server is known by its answer: a stranger on its port is not taken for it, and never sees the password."""

import socket
import threading
from contextlib import suppress
from dataclasses import replace

import pytest

from purveyor.jetstream.server import EmbeddedServer
from purveyor.jetstream.server.config import Identity
from purveyor.jetstream.server.server_checks import free_port, is_port_free, why_not_ready
from purveyor.model.errors import SetupError

ADA = Identity("purveyor-1", "ada", "s3cret")


def probe_fake_server(greeting: bytes) -> tuple[str | None, bytes]:
    """Ask a listener that greets like this; the missing, and all that the listener was sent."""
    received = bytearray()

    def listen(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, suppress(OSError):  # it may turn away before it has received all
            connection.sendall(greeting)
            connection.shutdown(socket.SHUT_WR)
            while chunk := connection.recv(4096):
                received.extend(chunk)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=listen, args=(server,))
        thread.start()
        missing = why_not_ready("127.0.0.1", server.getsockname()[1], ADA)
        thread.join()
    return missing, bytes(received)


@pytest.mark.parametrize(
    "greeting",
    [
        b'INFO {"server_name": "another", "jetstream": true}\r\n',
        b'INFO {"server_name": "purveyor-1"}\r\n',
        b"INFO {}\r\n",
        b"INFO []\r\n",
        b"SSH-2.0-OpenSSH_9.9\r\n",
        b"\xff" * 100_000,
        b"",
    ],
)
def test_another_server_is_not_ready_and_receives_no_password(greeting: bytes) -> None:
    missing, received = probe_fake_server(greeting)
    assert missing is not None
    assert received == b""


@pytest.mark.parametrize("answer", [b"", b"-ERR 'Authorization Violation'\r\n", b'MSG i 1 13\r\n{"error": {}}\r\n'])
def test_ready_means_that_jetstream_answers(answer: bytes) -> None:
    missing, received = probe_fake_server(b'INFO {"server_name": "purveyor-1", "jetstream": true}\r\n' + answer)
    assert missing is not None
    assert received.startswith(b"CONNECT ")


def test_the_server_itself_is_ready_for_the_right_password_only(nats_server: EmbeddedServer) -> None:
    host, port = nats_server.address.hosts()[0]
    run = nats_server._supervisor
    assert run is not None
    assert why_not_ready(host, port, run._identity) is None
    assert "Authorization" in str(why_not_ready(host, port, replace(run._identity, password="wrong")))


def test_ports_that_are_taken_are_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert not is_port_free("127.0.0.1", port)
        assert free_port("127.0.0.1") != port


def test_a_chosen_port_is_not_one_for_outgoing_connections() -> None:
    assert 20_000 <= free_port("127.0.0.1") < 32_768


def test_a_connection_with_itself_is_let_go_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    itself = socket.socket()
    itself.bind(("127.0.0.1", 0))
    itself.connect(itself.getsockname())
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: itself)
    port = itself.getsockname()[1]
    assert why_not_ready("127.0.0.1", port, ADA) == f"no server listens on 127.0.0.1:{port}"
    assert itself.fileno() == -1


def test_a_host_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(SetupError, match=r"no server can listen on 192\.0\.2\.1"):
        free_port("192.0.2.1")

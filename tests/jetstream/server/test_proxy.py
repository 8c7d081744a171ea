"""The proxy that other tests pull the server away with does what it says."""

import socket
import threading
from contextlib import closing

import pytest

from tests.support.proxy import TcpProxy


def connect(proxy: TcpProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=60)


def greeting(connection: socket.socket) -> bytes:
    return connection.recv(5)


def test_it_forwards_both_ways(tcp_proxy: TcpProxy) -> None:
    with closing(connect(tcp_proxy)) as connection, connection.makefile("rb") as lines:
        assert lines.readline().startswith(b"INFO ")
        connection.sendall(b'CONNECT {"user":"x","pass":"y"}\r\n')
        assert b"Authorization Violation" in lines.readline()
        assert lines.read() == b""


def test_cut_resets_what_is_open_and_takes_new_connections(tcp_proxy: TcpProxy) -> None:
    with closing(connect(tcp_proxy)) as connection:
        assert greeting(connection) == b"INFO "
        tcp_proxy.cut()
        assert tcp_proxy.open == 0
        with pytest.raises(ConnectionResetError), connection.makefile("rb") as rest:
            rest.read()
    with closing(connect(tcp_proxy)) as connection:
        assert greeting(connection) == b"INFO "


def test_refused_until_restored_on_the_same_port(tcp_proxy: TcpProxy) -> None:
    port = tcp_proxy.port
    for _ in range(3):
        tcp_proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            connect(tcp_proxy)
        tcp_proxy.restore()
        with closing(connect(tcp_proxy)) as connection:
            assert greeting(connection) == b"INFO "
    assert tcp_proxy.port == port


def test_frozen_moves_nothing_until_restored(tcp_proxy: TcpProxy) -> None:
    tcp_proxy.freeze()
    with closing(connect(tcp_proxy)) as connection:
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(5)
        tcp_proxy.restore()
        connection.settimeout(10)
        assert greeting(connection) == b"INFO "


def test_large_transfers_arrive_whole() -> None:
    data = bytes(range(256)) * 40_000  # more than all the buffers on the way hold

    def send(server: socket.socket) -> None:
        far, _ = server.accept()
        with far:
            far.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as server, TcpProxy(*server.getsockname()) as proxy:
        sender = threading.Thread(target=send, args=(server,))
        sender.start()
        with connect(proxy) as near, near.makefile("rb") as stream:
            assert stream.read() == data
        sender.join()

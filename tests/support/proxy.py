"""A loopback TCP proxy whose connections a test can cut, freeze or refuse.

    with TcpProxy(*address.hosts()[0]) as proxy:
        connect(proxy.address(address))
        proxy.refuse()      # open connections are reset, new ones refused
        proxy.restore()     # the same port takes connections again

It has one thread of its own, so it serves blocking and asyncio tests alike. Each method returns when it has happened.
"""

import contextlib
import queue
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Self

from purveyor.jetstream.address import Address
from tests.support.waiting import PATIENCE_SECONDS

_CHUNK_BYTES = 256 * 1024
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER with no time: close sends RST, as from a machine that went away


class _Direction:
    """One direction of a connection, with the bytes read from one side and not yet written to the other."""

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self.source = source
        self.target = target
        self.waiting = b""
        self.ended = False
        self.closed = False


class TcpProxy:
    """Forwards connections from its port to one server."""

    def __init__(self, host: str, port: int) -> None:
        self._upstream = (host, port)
        self._selector = selectors.DefaultSelector()
        self._directions: dict[socket.socket, _Direction] = {}  # by the socket read from
        self._back: dict[socket.socket, socket.socket] = {}  # each socket's other side
        self._frozen = False
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._listener = _bound(0)
        self.port: int = self._listener.getsockname()[1]
        self.accepted = 0
        """Return the number of connections accepted so far."""
        self._listening = False
        self._start_listening()
        self._thread = threading.Thread(target=self._serve, name="tcp-proxy", daemon=True)
        self._thread.start()

    def address(self, original: Address) -> Address:
        """Return the address of the server through this proxy, with the same credentials."""
        return replace(original, urls=(f"nats://127.0.0.1:{self.port}",))

    @property
    def open(self) -> int:
        """Return the number of open connections."""
        return len(self._back) // 2

    def cut(self) -> None:
        """Reset every open connection; accept new ones as before."""
        self._do(self._cut)

    def refuse(self) -> None:
        """Reset every open connection, and refuse new ones until `restore`."""
        self._do(self._stop_listening)

    def freeze(self) -> None:
        """Keep connections open and accept new ones, but forward no bytes until `restore`."""
        self._do(lambda: self._set_frozen(frozen=True))

    def restore(self) -> None:
        """Accept connections on the same port and forward bytes again."""
        self._do(self._restore)

    def close(self) -> None:
        """Close the proxy and all connections."""
        if self._thread.is_alive():
            self._commands.put(None)
            self._wake_sender.send(b"!")
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _do(self, action: Callable[[], None]) -> None:
        done = threading.Event()

        def command() -> None:
            action()
            done.set()

        self._commands.put(command)
        self._wake_sender.send(b"!")
        if not done.wait(PATIENCE_SECONDS):
            raise RuntimeError("the proxy does not answer")

    # The methods below run in the thread of the proxy.

    def _serve(self) -> None:
        running = True
        while running:
            for key, events in self._selector.select():
                if key.fileobj is self._wake_receiver:
                    running = self._obey()
                elif key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket):
                    self._move(key.fileobj, events)
        self._cut()
        for each in (self._listener, self._wake_sender, self._wake_receiver):
            each.close()
        self._selector.close()

    def _obey(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self._wake_receiver.recv(4096)
        while not self._commands.empty():
            command = self._commands.get()
            if command is None:
                return False
            command()
        return True

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:  # gone again before we took it
            return
        try:
            server = socket.create_connection(self._upstream, timeout=60)
        except OSError:  # the server behind is down: what the client sees is a reset
            _reset(client)
            return
        self.accepted += 1
        for one, other in ((client, server), (server, client)):
            one.setblocking(False)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._directions[one] = _Direction(one, other)
            self._back[one] = other
        for each in (client, server):
            self._watch(each)

    def _watch(self, each: socket.socket) -> None:
        """Register for reads where the buffer has room, and for writes where it has bytes."""
        reading, writing = self._directions[each], self._directions[self._back[each]]
        events = 0
        if not self._frozen:
            if not reading.waiting and not reading.ended:
                events |= selectors.EVENT_READ
            if writing.waiting:
                events |= selectors.EVENT_WRITE
        known = each in self._selector.get_map()
        if events and known:
            self._selector.modify(each, events)
        elif events:
            self._selector.register(each, events)
        elif known:
            self._selector.unregister(each)

    def _move(self, each: socket.socket, events: int) -> None:
        if each not in self._back or self._frozen:  # cut or frozen by an event of the same round
            return
        other = self._back[each]
        try:
            if events & selectors.EVENT_READ:
                self._read(self._directions[each])
            if events & selectors.EVENT_WRITE:
                self._write(self._directions[other])
        except BlockingIOError:
            pass
        except OSError:
            self._drop(each)
            return
        if self._directions[each].closed and self._directions[other].closed:
            self._drop(each)
            return
        self._watch(each)
        self._watch(other)

    def _read(self, direction: _Direction) -> None:
        data = direction.source.recv(_CHUNK_BYTES)
        direction.waiting, direction.ended = data, not data
        self._write(direction)

    def _write(self, direction: _Direction) -> None:
        if direction.waiting:
            sent = direction.target.send(direction.waiting)
            direction.waiting = direction.waiting[sent:]
        if direction.ended and not direction.waiting and not direction.closed:
            direction.closed = True
            direction.target.shutdown(socket.SHUT_WR)

    def _drop(self, each: socket.socket) -> None:
        for one in (each, self._back[each]):
            if one in self._selector.get_map():
                self._selector.unregister(one)
            del self._directions[one], self._back[one]
            _reset(one)

    def _cut(self) -> None:
        while self._back:
            self._drop(next(iter(self._back)))

    def _start_listening(self) -> None:
        if not self._listening:
            self._listener.listen(128)
            self._listener.setblocking(False)
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._listening = True

    def _stop_listening(self) -> None:
        self._cut()
        if self._listening:
            self._selector.unregister(self._listener)
            self._listener.close()
            # Bound but not listening: connections are refused, and no other program can take the port.
            self._listener = _bound(self.port)
            self._listening = False

    def _set_frozen(self, *, frozen: bool) -> None:
        self._frozen = frozen
        for each in list(self._back):
            self._watch(each)

    def _restore(self) -> None:
        self._set_frozen(frozen=False)
        self._start_listening()


def _bound(port: int) -> socket.socket:
    door = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    door.bind(("127.0.0.1", port))
    return door


def _reset(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    connection.close()

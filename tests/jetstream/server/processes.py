"""Processes for these tests: a supervisor of its own that can be killed, and ways to wait for what happens to it."""

import json
import os
import queue
import signal
import subprocess
import sys
from pathlib import Path

import nats
from nats.aio.client import Client
from nats.js import JetStreamContext

from purveyor.jetstream.address import Address
from purveyor.jetstream.server import EventKind, ServerEvent
from tests.support.waiting import PATIENCE_SECONDS

_SUPERVISOR = """
import json, signal, sys
from pathlib import Path
from purveyor.model.errors import PurveyorError
from purveyor.jetstream.server import EmbeddedServer, ServerOptions

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored, if whoever runs the tests ignores it

server = EmbeddedServer(Path(sys.argv[1]), ServerOptions(sync="2m"))
if "ready" in sys.argv:
    print("{}", flush=True)
    sys.stdin.readline()
try:
    server.start()
except PurveyorError as error:
    print(json.dumps({"error": type(error).__name__, "message": str(error)}), flush=True)
    sys.exit(1)
print(json.dumps({"server": server.pid, "url": str(server.address)}), flush=True)
sys.stdin.readline()
if "forget" not in sys.argv:
    server.stop()
"""


class Supervisor:
    """Another process that starts an embedded server and keeps it until its standard input is closed."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SUPERVISOR, str(directory), *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def answer(self) -> dict[str, str | int]:
        """The next line it prints."""
        assert self.process.stdout is not None
        answer: dict[str, str | int] = json.loads(self.process.stdout.readline())
        return answer

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def close(self) -> None:
        with self.process:  # closes the pipes, which ends it, and waits
            if self.process.poll() is None and self.process.stdin is not None:
                self.process.stdin.close()


class Events:
    """A listener that can be waited on."""

    def __init__(self) -> None:
        self._heard: queue.SimpleQueue[ServerEvent] = queue.SimpleQueue()

    def __call__(self, event: ServerEvent) -> None:
        self._heard.put(event)

    def next(self, kind: EventKind) -> ServerEvent:
        """The next event, which must be of this kind."""
        event = self._heard.get(timeout=PATIENCE_SECONDS)
        assert event.kind is kind, event
        return event


def kill(pid: int | None, how: signal.Signals = signal.SIGKILL) -> None:
    assert pid is not None
    os.kill(pid, how)


async def jetstream_of(address: Address) -> tuple[Client, JetStreamContext]:
    connection = await nats.connect(
        list(address.urls), user=address.user, password=address.password, allow_reconnect=False, connect_timeout=60
    )
    return connection, connection.jetstream()


async def store_one(address: Address, stream: str, text: bytes) -> int:
    """Store a message in a stream, made if it is not there; its sequence."""
    connection, jetstream = await jetstream_of(address)
    try:
        await jetstream.add_stream(name=stream, subjects=[stream])
        return (await jetstream.publish(stream, text)).seq
    finally:
        await connection.close()


async def stored(address: Address, stream: str) -> list[bytes]:
    """The messages of a stream."""
    connection, jetstream = await jetstream_of(address)
    try:
        count = (await jetstream.stream_info(stream)).state.messages
        return [(await jetstream.get_msg(stream, seq + 1)).data or b"" for seq in range(count)]
    finally:
        await connection.close()

"""The adapter relies on members that uvicorn does not document: a uvicorn release that changes them fails here."""

import asyncio
import inspect
from pathlib import Path

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

import purveyor
from purveyor.app.http import uvicorn_adapter
from purveyor.app.http.uvicorn_adapter import (
    PROTOCOL_ATTRIBUTES,
    REQUEST_ATTRIBUTES,
    REQUIRED_MEMBERS,
    JoinedWrites,
)


@pytest.mark.parametrize(
    ("owner", "name"), [(owner, name) for owner, names in REQUIRED_MEMBERS.items() for name in names]
)
def test_uvicorn_has_the_methods_that_the_adapter_overrides_or_calls(owner: type, name: str) -> None:
    assert callable(getattr(owner, name, None)), f"{owner.__name__}.{name} is gone: adapt {uvicorn_adapter.__name__}"


async def test_uvicorn_sets_the_attributes_that_the_adapter_reads() -> None:
    config = uvicorn.Config(app=lambda _scope: None, lifespan="off", ws="none")
    protocol = HttpToolsProtocol(config=config, server_state=ServerState(), app_state={})
    missing = [name for name in PROTOCOL_ATTRIBUTES if not hasattr(protocol, name)]
    assert missing == []
    names = {name for name, _ in inspect.getmembers(RequestResponseCycle)}
    source = inspect.getsource(RequestResponseCycle.__init__)
    assert [name for name in REQUEST_ATTRIBUTES if name not in names and f"self.{name}" not in source] == []
    assert "read_paused" in inspect.getsource(FlowControl)
    assert inspect.signature(HttpToolsProtocol.send_400_response).parameters.keys() == {"self", "msg"}
    assert inspect.signature(uvicorn.Server.startup).parameters.keys() == {"self", "sockets"}
    assert inspect.signature(uvicorn.Server.shutdown).parameters.keys() == {"self", "sockets"}


async def test_the_head_of_an_answer_goes_out_with_its_body() -> None:
    class Recorder(asyncio.Transport):
        def __init__(self) -> None:
            super().__init__()
            self.written: list[bytes] = []

        def write(self, data: bytes | bytearray | memoryview) -> None:
            self.written.append(bytes(data))

    recorder = Recorder()
    joined = JoinedWrites(recorder, asyncio.get_running_loop())
    joined.write(b"HTTP/1.1 200 OK\r\n\r\n")
    assert recorder.written == []
    joined.write(b"body")
    assert recorder.written == [b"HTTP/1.1 200 OK\r\n\r\nbody"]
    joined.write(b"HTTP/1.1 204 No Content\r\n\r\n")
    await asyncio.sleep(0)
    assert recorder.written[1:] == [b"HTTP/1.1 204 No Content\r\n\r\n"]


def test_only_the_adapter_imports_internals_of_uvicorn() -> None:
    source = Path(purveyor.__file__).parent
    importers = {path.name for path in source.rglob("*.py") if "from uvicorn" in path.read_text(encoding="utf-8")}
    assert importers == {"uvicorn_adapter.py"}

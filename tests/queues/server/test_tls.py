"""The embedded server speaks TLS if it is given a certificate, to both clients, and then nothing else."""

import dataclasses
from pathlib import Path

import pytest

from purveyor.model.errors import InvalidConfig, SetupError
from purveyor.queues import ServerOptions, outgoing, publish_many
from purveyor.queues.address import Address
from purveyor.queues.client import connect
from purveyor.queues.config import StreamConfig
from purveyor.queues.server import ServerTls, running
from tests.certificates import self_signed
from tests.conftest import FAST, OwnServer


async def both_work(address: Address, stream: str) -> None:
    async with connect(address, patience_seconds=10) as queues:
        await queues.streams.add(StreamConfig(name=stream, subjects=(stream,)))
        assert (await queues.publish(stream, b"one", msg_id="1")).sequence == 1
    assert publish_many(address, outgoing([(stream, b"two", None, "2")])).stored == 1


async def test_everyone_speaks_tls_with_it(tmp_path: Path, own_server: OwnServer) -> None:
    cert, key = self_signed(tmp_path, "nats")
    server = own_server(ServerOptions(sync=FAST.sync, tls=ServerTls(certificate=cert, key=key)))
    found = running(server.directory)
    assert found == server.address
    await both_work(server.address, "S")
    plain = dataclasses.replace(server.address, tls=None)
    with pytest.raises(SetupError, match="not trusted"):
        publish_many(plain, outgoing([("S", b"x", None, "3")]))


async def test_a_certificate_for_another_name_needs_that_name(tmp_path: Path, own_server: OwnServer) -> None:
    cert, key = self_signed(tmp_path, "nats", "DNS:nats.example")
    tls = ServerTls(certificate=cert, key=key, ca=cert, hostname="nats.example")
    server = own_server(ServerOptions(sync=FAST.sync, tls=tls))
    await both_work(server.address, "S")
    of_component = running(server.directory, "api")
    assert of_component is not None
    assert of_component.tls == server.address.tls


def test_files_that_do_not_fit_are_refused_at_once(tmp_path: Path) -> None:
    cert, _ = self_signed(tmp_path, "one")
    _, key = self_signed(tmp_path, "two")
    with pytest.raises(InvalidConfig, match=r"one\.pem"):
        ServerTls(certificate=cert, key=key)
    with pytest.raises(InvalidConfig, match=r"none\.pem"):
        ServerTls(certificate=tmp_path / "none.pem", key=key)
